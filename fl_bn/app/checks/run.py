"""Check this machine, and a run on it: run config, normalisation layers, data and batches.

torch and Flower are imported inside the functions, so that ``fl-bn doctor`` works
without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_bn.app.checks import machine
from fl_bn.support.finding import Finding, failure, guard, guard_each

if TYPE_CHECKING:
    from fl_bn.app.config import RunConfig
    from fl_bn.federation.local import Samples
    from fl_bn.federation.settings import LocalTraining

FEW = 4  # the variance of fewer samples is mostly noise


def diagnose(overrides: str = "") -> Iterator[Finding]:
    """Check this machine, and a run with the ``overrides``, text or the path of a .toml file.

    Anything that is wrong is a finding; nothing is raised.
    """
    from fl_bn.app.overrides import parse_overrides

    yield guard("packages", machine.packages)
    yield from guard_each("run config", lambda: run(parse_overrides(overrides)))


def run(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check what a run's server needs: run config, GPU, data and model, or raise ``ConfigError``."""
    from fl_bn.app.config import RunConfig

    config = RunConfig.from_mapping(values)
    yield run_config(config)
    yield guard("gpu", lambda: machine.gpu(config.device, "run config"))
    yield guard("data", lambda: run_data(config))
    yield guard("model", lambda: model_layers(config))


def run_config(config: RunConfig) -> Finding:
    """Say what a run is, and which form the data of its sites have."""
    from fl_bn.app.config import SITES

    keys = ("method", "model", "dataset", "clients", "rounds")
    of_sites = ("classes", "channels", "image-size", "columns-digest") if config.dataset == SITES else ()
    return Finding("ok", "run config", " ".join(f"{key}={config[key]}" for key in (*keys, *of_sites)))


def model_layers(config: RunConfig) -> Finding:
    """Say which normalisation layers the model has, and what the method does with them."""
    from fl_bn.app.assembly import client_model, source_model
    from fl_bn.app.preflight import try_data
    from fl_bn.federation.composition import describe_layers, has_batch_norm, no_batch_norm

    source, method = source_model(config), config.build_method()
    try_data(config)
    text = "; ".join(describe_layers(source, client_model(config), method))
    if method.has_statistics and (why := no_batch_norm(source, method)):
        return Finding("fail", "model", f"{text}; {why}", "choose a model with BatchNorm, or method='fedavg'")
    if not has_batch_norm(source):
        do = f"choose a model with BatchNorm, or accept that {config.method} is plain averaging here"
        return Finding("warn", "model", f"{text}; this model has no BatchNorm layer", do)
    return Finding("ok", "model", text)


def run_data(config: RunConfig) -> Finding:
    """Load the data of a run, and say what they are."""
    from fl_bn.app.assembly import dataset
    from fl_bn.app.config import SITES
    from fl_bn.data.csv_files import TableData
    from fl_bn.data.record import describe, untrained_classes

    if config.dataset == SITES:
        return Finding("ok", "data", "every site has its own data, and the server has none")
    data = dataset(config)
    text = f"{config.dataset}: {len(data.y_train):,} + {len(data.y_test):,} samples {tuple(data.x_train.shape[1:])} of "
    text += describe(data.y_train, data.classes) + (f", domains {', '.join(data.domains)}" if data.domains else "")
    if isinstance(data, TableData):
        keys = f"classes={data.classes} channels={data.channels} image-size=1 columns-digest='{data.columns.digest}'"
        text += f"; a run of sites with such files has dataset='sites' {keys}"
    if data.notes:
        return Finding("warn", "data", f"{text}; {'; '.join(data.notes)}", "nothing to do, if this is on purpose")
    if missing := untrained_classes(data):
        return Finding("warn", "data", f"{text}; no training sample has label {missing}", "go on if the class is only rare")
    return Finding("ok", "data", text)


def own_form(node: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add classes, channels and image size of this site's own data, unless ``values`` name data."""
    if not node.get("dataset") or "dataset" in values:
        return dict(values)
    from fl_bn.app.config import SITES
    from fl_bn.data.csv_files import TableData
    from fl_bn.data.dataset import load

    data = load(str(node["dataset"]), str(node.get("data-path", "")), int(values.get("image-size", 0)))
    shape = {"classes": data.classes, "channels": data.channels, "image-size": data.image_size}
    if not isinstance(data, TableData):
        return {**values, "dataset": SITES, **shape}
    usual = {"model": "mlp", "task": "classification" if data.columns.classes else "regression"}  # the default network is for images
    return {**usual, **values, "dataset": SITES, **shape, "columns-digest": data.columns.digest}


def site_experiment(overrides: str, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Make all checks of a run on a site: run config, model, data and batches.

    Without ``dataset`` in ``overrides``, the data are the site's own. If they
    cannot be loaded, the checks that need them are left out. A wrong run config
    raises ``ConfigError``.
    """
    from fl_bn.app.assembly import allow_modules
    from fl_bn.app.config import RunConfig
    from fl_bn.app.overrides import parse_overrides

    values = parse_overrides(overrides)
    try:
        form = own_form(node, values)
    except (ValueError, FileNotFoundError) as error:
        yield failure("data", error)
        return
    config = RunConfig.from_mapping(form)
    yield run_config(config)
    allow_modules(Path(__file__).parents[3], node)  # as fl-bn's Flower app does at this site
    yield guard("model", lambda: model_layers(config))
    yield from guard_each("data", lambda: _with_data(config, node, counted="dataset" not in values))


def _with_data(config: RunConfig, node: Mapping[str, Any], counted: bool) -> Iterator[Finding]:
    from fl_bn.app.assembly import OwnData, client_samples, partition_of

    index = partition_of(node, config) if "partition-id" in node else 0
    train, test, counts = client_samples(config, index, OwnData.of(node, config))
    yield guard("data", lambda: site_data(train, test, counts, str(node.get("dataset", "")), counted))
    yield (finding := guard("batches", lambda: smallest_batch(len(train), config.local_training())))
    if finding.status != "fail":
        yield guard("model on data", lambda: model_on_data(config, train))


def site_data(train: Samples, test: Samples, counts: Sequence[int], own: str, counted: bool = False) -> Finding:
    """Check how many samples a site has, of what shape, and of which classes.

    ``own`` is the data set that the site names, if any. A class that is missing in
    ``counts`` (samples per class) is a warning if the number of classes was
    ``counted`` from these data.
    """
    missing = [str(label) for label, count in enumerate(counts) if not count]
    text = f"own data ({own})" if own else "no data of its own, so this checks a client's share of the run's"
    text += f"; {len(train)} training and {len(test)} test samples {tuple(train.x.shape[1:])}"
    text += f"; training samples per class: {', '.join(map(str, counts))}" if counts else ""
    if not train.x.is_floating_point() and int(train.x.max()) <= 1:
        return Finding("warn", "data", f"{text}; no pixel of 0..255 is above 1", "save floats in 0..1 as np.rint(x * 255).astype('uint8')")
    if own and counted and missing:
        do = "check that labels count from 0, and that the largest label is right; go on if a class is only rare"
        return Finding("warn", "data", f"{text}; none of {', '.join(missing)}", do)
    return Finding("ok", "data", text)


def smallest_batch(samples: int, settings: LocalTraining) -> Finding:
    """Check the smallest batch of a round. BatchNorm cannot train on one sample."""
    import numpy as np

    from fl_bn.data.batches import epoch_batches

    if samples < (least := settings.fewest(2)):
        text = f"{samples} training samples, but a batch that BatchNorm can train on has at least {least}"
        return Finding("fail", "batches", text, "add samples, or leave this site out of the run")
    batches = epoch_batches(samples, settings.batch_size, np.random.default_rng(0), drop_last=settings.drop_last)
    smallest = min(len(batch) for batch in batches[: settings.steps or None])
    text = f"{samples} training samples in batches of {settings.batch_size}: the smallest that is drawn has {smallest}"
    if smallest < FEW:
        return Finding("warn", "batches", f"{text}: the statistics of so few are noise", "choose another batch-size, or add samples")
    return Finding("ok", "batches", text)


def model_on_data(config: RunConfig, train: Samples) -> Finding:
    """Pass a batch of the site's data through the model, or raise ``ConfigError``."""
    import numpy as np

    from fl_bn.app.assembly import source_model
    from fl_bn.app.preflight import try_batch
    from fl_bn.bn.roles import inputs_like

    x, y = train.batch(np.arange(min(len(train), config.batch_size)), inputs_like(source_model(config)))
    try_batch(config, x, y)
    return Finding("ok", "model on data", f"the model takes a batch {tuple(x.shape)}")
