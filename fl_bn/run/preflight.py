"""Try data, network and task of a run on the server before it begins, so that mistakes are found before clients train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_bn.bn.copying import copied
from fl_bn.bn.roles import Role, batch_norms, inputs_like
from fl_bn.data.augment import augmenter
from fl_bn.data.dataset import to_input
from fl_bn.federation.local import torch_seed
from fl_bn.federation.norm_layers import check_layers
from fl_bn.federation.payload import to_numpy
from fl_bn.federation.policy import AS_METHOD, MUCH, start_left
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.settings import seeded
from fl_bn.flower.compat import LOGGER
from fl_bn.methods import Method
from fl_bn.run import recalibrate
from fl_bn.run.assembly import callback_makers, client_model, dataset, partitions, shape, source_model, task
from fl_bn.run.config import SITES, ConfigError, RunConfig
from fl_bn.run.history import round_columns
from fl_bn.support.wire import WireError
from fl_bn.task import Classification, Task


def check(config: RunConfig) -> None:
    """Try the parts of a run: callbacks, partition, payload and augmentation, and the network on two samples.

    For classification, the shape of the network's output is checked. For other tasks, loss and metrics are computed.

    Raises:
        DataNotFound: A file of the data is missing.
        ConfigError: A part cannot work. The message has the reason.
    """
    callback_makers(config)
    if config.rounds == 0:
        recalibrate.check(config)
    if config.dataset != SITES:
        partitions(config)
    model, method = client_model(config), config.build_method()
    try:
        check_layers(source_model(config), method)
    except ValueError as error:
        raise ConfigError(f"model {config.model!r}: {error}") from error
    measured = config.calibrate == -1 or config.calibrate > 0
    if measured and (reason := why_not(model, method, trains=True)):
        raise ConfigError(f"calibrate={config.calibrate} would do nothing: {reason}. Set calibrate to 0")
    try:
        to_numpy(model.state_dict())
    except WireError as error:
        raise ConfigError(f"model {config.model!r}: {error}") from error
    try:
        round_columns(task(config))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if (two := _two_samples(config)) is not None:
        _try(config, *two)
    if config.dataset != SITES and (change := augmenter(config.augment, seeded(config.seed))) is not None:
        data = dataset(config)
        try:
            change(data.x_train[:2], data.y_train[:2])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    untouched = method.freezes_statistics(method.phase(1, config.rounds)) and method.shares(Role.STATISTIC)
    by_itself = config.calibrate == AS_METHOD and not config.dp_noise
    if config.rounds and untouched and not measured and not by_itself and not config.model_weights and batch_norms(model):
        LOGGER.warning(
            "%s: the statistics freeze before round 1 (freeze-after=%s of rounds=%s) with the values of a new network, which describe no "
            "data. Set freeze-after to 1 or more, calibrate to -1, or model-weights to the file of a trained network",
            config.method,
            config.rounds // 2 if config.freeze_after < 0 else config.freeze_after,
            config.rounds,
        )
    _warn_of_an_early_freeze(config, method, model)
    defence = config.defence()
    if defence.active and not defence.f:
        LOGGER.warning(
            "declared-byzantine is 0, so statistics-rule=%r and update-rule=%r protect against no attack, and trimmed-mean, multi-krum and "
            "nnm are the mean: set declared-byzantine to the number of clients that may attack",
            config.statistics_rule,
            config.update_rule,
        )


def _warn_of_an_early_freeze(config: RunConfig, method: Method, model: nn.Module) -> None:
    """Warn if the statistics freeze so early that they still consist largely of the initial values (mean 0, variance 1).

    There is no warning if the clients measure statistics before round 1 (``calibrate``).
    """
    left = start_left(method, config, [layer.momentum for layer in batch_norms(model).values() if layer.momentum is not None])
    if left > MUCH and config.round_policy().calibrate in (0, AS_METHOD):
        LOGGER.warning(
            "%s: the statistics freeze early, while %.0f %% of each running mean and variance still comes from the initial values 0 and 1. "
            "So the run may be less accurate than fedavg. Take more local steps, freeze later (freeze-after), or measure the statistics "
            "before round 1 (calibrate=-1)",
            config.method,
            100 * left,
        )


def _two_samples(config: RunConfig) -> tuple[Tensor, Tensor | None] | None:
    """Return inputs and targets of two samples, on which the network is tried.

    If the data are at the sites, the inputs are images of zeros and there are no targets. None: the network is the
    user's own and the data are at the sites, so the form of its inputs is unknown.
    """
    if config.dataset != SITES:
        data = dataset(config)
        return to_input(data.x_train[:2]), data.y_train[:2]
    if ":" in config.model:
        return None
    _, channels, size = shape(config)
    return torch.zeros(2, channels, size, size), None


def _try(config: RunConfig, x: Tensor, y: Tensor | None) -> None:
    """Pass a batch through the network in evaluation mode, where no layer needs other clients, and check its output.

    Args:
        config: The run config.
        x: The inputs of two samples.
        y: The targets of the two samples; None: they are unknown, and the loss is not tried.

    Raises:
        ConfigError: The network or the task fails, or the output has a wrong shape.
    """
    classes, of = shape(config)[0], task(config, y)
    model = copied(client_model(config)).eval()
    x = (x if len(x) > 1 else x.expand(2, *x.shape[1:])).to(inputs_like(model).dtype)
    try:
        with torch.no_grad(), torch_seed(config.seed, torch.device("cpu")):
            raw = model(x)
    except Exception as error:  # a stranger's network: anything may happen in it
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"the network cannot take these data: model={config.model!r} under method={config.method!r} fails on a batch of shape "
            f"{tuple(x.shape)}: {problem}. Choose another model, method or image-size"
        ) from error
    out = _predicted(config, of, raw)
    if not isinstance(of, Classification):
        if y is not None:
            _try_loss(config, of, out, y if len(y) > 1 else y.expand(2, *y.shape[1:]))
        return
    if not isinstance(out, Tensor) or out.ndim < 2 or tuple(out.shape[:2]) != (2, classes):
        raise ConfigError(
            f"the network must return scores (2, {classes}, ...) for a batch of 2 samples, one for each class, but model={config.model!r} "
            f"returns {_described(out)}"
        )


def _predicted(config: RunConfig, of: Task, raw: Any) -> Any:
    try:
        return of.output(raw)
    except Exception as error:  # a stranger's task: anything may happen in it
        raise ConfigError(f"task={config.task!r} finds no prediction in the output of model={config.model!r}: {error}") from error


def _try_loss(config: RunConfig, of: Task, out: Any, y: Tensor) -> None:
    """Compute loss and metrics of the batch, to see whether the task works.

    Raises:
        ConfigError: The task fails.
    """
    try:
        state = of.state()
        state.update(out, y)
        state.result()[of.metric]
    except Exception as error:  # a stranger's task: anything may happen in it
        raise ConfigError(
            f"task={config.task!r} fails on a batch of 2 samples. The output of model={config.model!r} is {_described(out)}, the targets "
            f"are {tuple(y.shape)}: {type(error).__name__}: {error}"
        ) from error


def _described(out: Any) -> str:
    return str(tuple(out.shape)) if isinstance(out, Tensor) else f"a {type(out).__name__}"
