"""Check a run: its config, the model's normalisation layers, the data, and the batches that are drawn from them.

torch and Flower are imported inside the functions, so that ``fl-bn doctor`` works even if they are missing
or of a wrong version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_bn.checks.guard import guard, reason
from fl_bn.support.finding import Finding

if TYPE_CHECKING:
    from fl_bn.federation.local import Samples
    from fl_bn.federation.settings import LocalTraining
    from fl_bn.run.config import RunConfig

LABELS = "check that labels count from 0, and that the largest label is right; go on if a class is only rare"
FEW = 4  # the variance of fewer samples is mostly noise


def run_config(values: Mapping[str, Any]) -> tuple[Finding, RunConfig | None]:
    """Check that ``values`` (key -> value) make a valid run config.

    Returns:
        The finding, and the run config. If the run config is wrong, None takes its place.
    """
    from fl_bn.run.config import ConfigError, RunConfig

    try:
        config = RunConfig.from_mapping(values)
    except ConfigError as error:
        return refusal(error), None
    text = f"method={config.method} model={config.model} dataset={config.dataset} clients={config.clients} rounds={config.rounds}"
    return Finding("ok", "run config", text), config


def refusal(error: Exception) -> Finding:
    """Return the finding for a run config that is wrong."""
    return Finding("fail", "run config", str(error), "correct --run-config; `fl-bn config` prints every key")


def model_layers(config: RunConfig) -> Finding:
    """Check which normalisation layers the method finds in the model, and what it does with their tensors."""
    from fl_bn.federation.norm_layers import describe_layers, has_batch_norm, no_batch_norm
    from fl_bn.run.assembly import client_model, source_model

    try:
        source, model = source_model(config), client_model(config)
    except (ValueError, TypeError, FileNotFoundError) as error:
        return Finding("fail", "model", reason(error), "correct model, dataset or method in --run-config, or install what is missing")
    text = "; ".join(describe_layers(source, model, config.build_method()))
    if (method := config.build_method()).has_statistics and (reason_without := no_batch_norm(source, method)):
        return Finding("fail", "model", f"{text}; {reason_without}", "choose a model with BatchNorm, or method='fedavg'")
    if not has_batch_norm(source):
        text = f"{text}; this model has no BatchNorm layer"
        return Finding("warn", "model", text, f"choose a model with BatchNorm, or accept that {config.method} is plain averaging here")
    return Finding("ok", "model", text)


def run_data(config: RunConfig) -> Finding:
    """Check that the data set of the run config can be loaded, and whether a class has no training sample."""
    from fl_bn.data.record import describe, untrained_classes
    from fl_bn.run.assembly import dataset
    from fl_bn.run.config import SITES

    if config.dataset == SITES:
        return Finding("ok", "data", "every site has its own data, and the server has none")
    try:
        data = dataset(config)
    except (ValueError, FileNotFoundError) as error:
        return _no_data(error, "dataset and data-path in --run-config")
    text = f"{len(data.y_train)} training and {len(data.y_test)} test samples {tuple(data.x_train.shape[1:])}"
    text = f"dataset={config.dataset}: {text}, {describe(data.y_train, data.classes)}"
    if missing := untrained_classes(data):
        return Finding("warn", "data", f"{text}, but no training sample of {missing}", LABELS)
    return Finding("ok", "data", text)


def own_form(node: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add run-config keys that describe this site's own data: classes, channels and image size.

    For tables, also add the digest of the columns. A model and a task are added, too, where ``values`` lacks them.

    Args:
        node: The site's node config.
        values: Keys of the run config.

    Returns:
        ``values`` with the keys; unchanged if ``values`` names a data set already, or if the site has no data of its own.

    Raises:
        ValueError: The data are damaged, or in a form that cannot be read.
        FileNotFoundError: The data are not there.
    """
    if not node.get("dataset") or "dataset" in values:
        return dict(values)
    from fl_bn.data.csv_files import TableData
    from fl_bn.data.dataset import load
    from fl_bn.run.config import SITES

    data = load(str(node["dataset"]), str(node.get("data-path", "")), int(values.get("image-size", 0)))
    shape = {"classes": data.classes, "channels": data.channels, "image-size": data.image_size}
    if not isinstance(data, TableData):
        return {**values, "dataset": SITES, **shape}
    usual = {"model": "mlp", "task": "classification" if data.columns.classes else "regression"}  # the default network is for images
    return {**usual, **values, "dataset": SITES, **shape, "columns-digest": data.columns.digest}


def site_experiment(values: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Finding]:
    """Make all checks of a run on a site: its run config, model, data and batches.

    Args:
        values: Keys of the run config.
        node: The site's node config.

    Yields:
        The finding of each check.
    """
    names_data = "dataset" in values
    try:
        values = own_form(node, values)
    except (ValueError, FileNotFoundError) as error:
        yield _no_data(error, "dataset and data-path in site.toml")
        return
    finding, config = run_config(values)
    if config is None:
        yield finding
        return
    if node.get("dataset") and not names_data:
        form = f"dataset='sites' classes={config.classes} channels={config.channels} image-size={config.image_size}"
        form += f" model='{config.model}' task='{config.task}'" * bool(config.columns_digest)
        finding = Finding(
            "ok", finding.check, f"{finding.text}; none was given, so {form} were taken from this site's data: compare with the run's"
        )
    yield finding
    as_the_app(node)
    yield guard("model", lambda: model_layers(config))
    try:
        train, test, counts = _samples(config, node)
    except (ValueError, FileNotFoundError) as error:
        yield _no_data(error, "dataset and data-path in site.toml, or --run-config")
        return
    yield guard("data", lambda: site_data(train, test, counts, str(node.get("dataset", "")), config.dataset, counted=not names_data))
    yield (finding := guard("batches", lambda: smallest_batch(len(train), config.local_training())))
    if finding.status != "fail":
        yield guard("model on data", lambda: model_on_data(config, train))


def as_the_app(node: Mapping[str, Any]) -> None:
    """Allow this process to import those modules of users that fl-bn's Flower app may import at this site.

    Args:
        node: The site's node config.
    """
    from fl_bn.run.assembly import allow_modules

    allow_modules(Path(__file__).parents[2], node)


def _samples(config: RunConfig, node: Mapping[str, Any]) -> tuple[Samples, Samples, tuple[int, ...]]:
    """Load the samples on which the client of this site would train.

    If the site has no data of its own, they are a client's share of the run's data set. The client's index is the node
    config's ``partition-id``, or else 0, since only the server of a run knows the site's own index.

    Returns:
        The training samples, the test samples, and the number of training samples per class.
    """
    from fl_bn.run.assembly import OwnData, client_samples, partition_of

    index = partition_of(node, config) if "partition-id" in node else 0
    return client_samples(config, index, OwnData.of(node, config))


def site_data(train: Samples, test: Samples, counts: Sequence[int], own: str, run: str, counted: bool = False) -> Finding:
    """Check how many samples a site has, of what shape, and of which classes.

    Args:
        train: The training samples.
        test: The test samples.
        counts: Training samples per class; empty if labels are no classes.
        own: The ``dataset`` of the site's node config; empty: the site has no data of its own.
        run: The ``dataset`` of the run config.
        counted: Whether the number of classes was computed from the largest label of this site.
    """
    held = ", ".join(f"{label}: {count}" for label, count in enumerate(counts) if count)
    missing = [str(label) for label, count in enumerate(counts) if not count]
    whose = f"own data ({own})" if own else f"no data of its own, so this checks a client's share of the run's {run}"
    text = f"{whose}; {len(train)} training and {len(test)} test samples {tuple(train.x.shape[1:])}"
    text += f"; training samples per class {held}" if counts else ""
    text += f"; none of {', '.join(missing)}" if missing else ""
    if not train.x.is_floating_point() and int(train.x.max()) <= 1:
        return Finding("warn", "data", f"{text}; no pixel of 0..255 is above 1", "save floats in 0..1 as np.rint(x * 255).astype('uint8')")
    if own and counted and missing:
        text += f"; {len(counts)} classes, as the largest label is {len(counts) - 1}"
        return Finding("warn", "data", text, LABELS)
    return Finding("ok", "data", text)


def smallest_batch(samples: int, settings: LocalTraining) -> Finding:
    """Check the smallest batch of a round. BatchNorm cannot train on one sample, and hardly on a few.

    Args:
        samples: The number of training samples.
        settings: How the client draws batches.
    """
    import numpy as np

    from fl_bn.data.batches import ClientTooSmall, epoch_batches

    size = settings.batch_size
    try:
        batches = epoch_batches(samples, size, np.random.default_rng(0), drop_last=settings.drop_last)
        drawn = [len(batch) for batch in batches][: settings.steps or None]
    except ClientTooSmall:
        least = settings.fewest(2)
        few = f"the only batch would have {samples or 'no'} training sample, which BatchNorm cannot train on: this client would refuse"
        what = few if least == 2 else f"{samples or 'no'} training samples, and drop-last leaves out a batch of fewer than {least}"
        return Finding("fail", "batches", what, f"give this site at least {least} training samples, or leave it out of the run")
    text = f"{samples} training samples in batches of {size}: the smallest that is drawn has {min(drawn)}"
    if samples > size and samples % size == 1 and not settings.drop_last:
        text += " (the last sample joins the batch before it: a batch of one could not be trained on)"
    if min(drawn) < FEW:
        what = f"choose another batch-size: at least {FEW} samples should be left for the last batch" if samples >= FEW else "add samples"
        return Finding("warn", "batches", f"{text}: the statistics of so few are noise", what)
    return Finding("ok", "batches", text)


def model_on_data(config: RunConfig, train: Samples) -> Finding:
    """Check that one batch passes through the model in training mode, on the CPU."""
    import numpy as np
    import torch

    from fl_bn.bn.copying import copied
    from fl_bn.bn.roles import inputs_like
    from fl_bn.run.assembly import source_model, task

    model, the_task = copied(source_model(config)).train(), task(config, train.y)
    x, _ = train.batch(np.arange(min(len(train), config.batch_size)), inputs_like(model))
    try:
        with torch.no_grad():
            out = the_task.predict(model, x)
    except (ValueError, RuntimeError) as error:
        what = f"the model {config.model} fails on a batch {tuple(x.shape)} of these data: {error}"
        return Finding("fail", "model on data", what, "choose a model that takes them, or check the data's shape")
    return Finding("ok", "model on data", f"a batch {tuple(x.shape)} gives {tuple(out.shape)}")


def _no_data(error: Exception, where: str) -> Finding:
    return Finding("fail", "data", reason(error), f"correct {where}, or put the data there")
