"""Try data, network and task of a run before it begins, to find mistakes early."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_bn.app import recalibrate
from fl_bn.app.assembly import callback_makers, client_model, dataset, partitions, shape, source_model, task
from fl_bn.app.config import SITES, ConfigError, RunConfig
from fl_bn.app.errors import as_config_error
from fl_bn.app.history import round_columns
from fl_bn.bn.modules import copied
from fl_bn.bn.roles import Role, batch_norms, inputs_like
from fl_bn.data.augment import augmenter
from fl_bn.data.dataset import to_input
from fl_bn.federation.composition import check_layers
from fl_bn.federation.local import torch_seed
from fl_bn.federation.policy import AS_METHOD, MUCH, start_left
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.settings import seeded
from fl_bn.federation.values import to_numpy
from fl_bn.flower.compat import LOGGER
from fl_bn.methods import Method
from fl_bn.task import Classification


@as_config_error()
def check(config: RunConfig) -> None:
    """Try callbacks, partition, payload and augmentation, and the network on two samples.

    Raises:
        DataNotFound: A file of the data is missing.
        ConfigError: A part cannot work. The message has the reason.
    """
    callback_makers(config)
    if config.rounds == 0:
        recalibrate.check(config)
    model, method = client_model(config), config.build_method()
    check_layers(source_model(config), method)
    measured = config.calibrate == -1 or config.calibrate > 0
    if measured and (reason := why_not(model, method, trains=True)):
        raise ConfigError(f"calibrate={config.calibrate} would do nothing: {reason}. Set calibrate to 0")
    to_numpy(model.state_dict())  # raises an error for a dtype that cannot be sent
    round_columns(task(config))  # raises an error for a metric that has the name of another column
    if config.dataset != SITES:
        partitions(config)
    try_data(config)
    _warn(config, method, model)


def try_data(config: RunConfig) -> None:
    """Try the network and the augmentation on two samples."""
    if config.dataset != SITES:
        data = dataset(config)
        try_batch(config, to_input(data.x_train[:2]), data.y_train[:2])
        if change := augmenter(config.augment, seeded(config.seed)):
            change(data.x_train[:2], data.y_train[:2])
    elif ":" not in config.model:  # else the network may take other inputs than images
        try_batch(config, torch.zeros(2, config.channels, config.image_size, config.image_size))


def _warn(config: RunConfig, method: Method, model: nn.Module) -> None:
    """Warn of statistics that freeze too early, and of a defence that counts on no attacker."""
    norms = batch_norms(model)
    untouched = method.freezes_statistics(method.phase(1, config.rounds)) and method.shares(Role.STATISTIC)
    unmeasured = config.calibrate == 0 or (config.calibrate == AS_METHOD and config.dp_noise)
    if config.rounds and untouched and unmeasured and not config.model_weights and norms:
        LOGGER.warning("%s: the statistics freeze before round 1, while they are a new network's: set calibrate=-1", config.method)
    left = start_left(method, config, [layer.momentum for layer in norms.values() if layer.momentum is not None])
    if left > MUCH and config.round_policy().calibrate in (0, AS_METHOD):
        share = f"{100 * left:.0f} % of each running mean and variance comes from the initial values"
        LOGGER.warning("%s: the statistics freeze early, while %s: freeze later, or set calibrate=-1", config.method, share)
    defence = config.defence()
    if defence.active and not defence.f:
        LOGGER.warning("statistics-rule and update-rule protect against no attack while declared-byzantine is 0: set it to their number")


def try_batch(config: RunConfig, x: Tensor, y: Tensor | None = None) -> None:
    """Raise ``ConfigError`` if the network cannot take a batch, or the task cannot use its output.

    In evaluation mode, no layer needs other clients. ``y`` None: the targets are
    not known.
    """
    of, model = task(config, y), copied(client_model(config)).eval()
    x, y = (part.expand(2, *part.shape[1:]) if part is not None and len(part) == 1 else part for part in (x, y))  # type: ignore[assignment]
    try:
        with torch.no_grad(), torch_seed(config.seed, torch.device("cpu")):
            out = of.output(model(x.to(inputs_like(model).dtype)))
        if not isinstance(of, Classification):
            if y is not None:
                state = of.state()
                state.update(out, y)
                state.result()[of.metric]
        elif not isinstance(out, Tensor) or tuple(out.shape[:2]) != (len(x), shape(config)[0]):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"expected scores {(len(x), shape(config)[0])}, one for each class, but got {got}")
    except Exception as error:  # a stranger's network and task: anything may happen in them
        raise ConfigError(
            f"model={config.model!r} under method={config.method!r} or task={config.task!r} fails on a batch {tuple(x.shape)}: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
