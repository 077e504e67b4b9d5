"""Make the objects of a run, such as data and network, from its run config.

The server and every client make the same objects. Each process caches them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fl_bn.app.config import REGISTRIES, SITES, ConfigError, RunConfig
from fl_bn.app.errors import as_config_error
from fl_bn.app.memory_layout import memory_format
from fl_bn.app.run_keys import VALUES
from fl_bn.app.setup import allow, modules
from fl_bn.bn.conversion import convert
from fl_bn.bn.modules import copied
from fl_bn.bn.roles import parse_buffer_roles, set_buffer_roles
from fl_bn.data.csv_files import TableData
from fl_bn.data.dataset import Dataset, load
from fl_bn.data.partition import BY_DOMAIN, Indices, label_counts, partition
from fl_bn.data.record import DataError, describe, untrained_classes
from fl_bn.data.subsets import HeldOut, hold_out, without_domain
from fl_bn.federation.callbacks import Callback, EarlyStop, KeepBest
from fl_bn.federation.local import Samples
from fl_bn.federation.network import Network
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.compat import LOGGER
from fl_bn.models import build
from fl_bn.options import refuse
from fl_bn.support.client_names import nodes_of, sites_of
from fl_bn.support.names import names_of
from fl_bn.support.user_code import VARIABLE, Modules, function
from fl_bn.task import LABELS, MASKS, Classification, Task, find_task, kind_of

BEST = "best.safetensors"


@dataclass(frozen=True)
class OwnData:
    """Hold the names of a client's own data, from its node config.

    Attributes:
        dataset: As the run-config key; empty: the client takes its part of the
            run's data.
        path: As the run-config key ``data-path``.
    """

    dataset: str = ""
    path: str = ""

    @classmethod
    def of(cls, node: Mapping[str, Any], config: RunConfig) -> OwnData:
        """Read the names from a node config. ``ConfigError``: they are missing with ``dataset='sites'``."""
        own = cls(str(node.get("dataset", "")), str(node.get("data-path", "")))
        if config.dataset == SITES and not own.dataset:
            raise ConfigError("the run is for dataset='sites': give this client dataset='npz' data-path='/data/site.npz' in --node-config")
        return own


def known(values: Mapping[str, Any]) -> RunConfig:
    """Return the run config with these values, cached until a registry, such as ``METHODS``, changes."""
    entered = (owner for registry in REGISTRIES.values() for owner in registry.values())
    return _known(tuple(values), (*entered, *VALUES.values()), *values.values())


@lru_cache(maxsize=8, typed=True)  # typed: 1 and true are different values
def _known(names: tuple[str, ...], entered: tuple[object, ...], *values: Any) -> RunConfig:
    return RunConfig.from_mapping(dict(zip(names, values, strict=True)))


def allow_modules(app: Path | None, node: Mapping[str, Any]) -> None:
    """Set the modules whose functions run configs may name in this process.

    Allowed are the modules of the ``app`` in this folder, and those that the owner
    of this machine names by ``allow-modules`` in the node config and by
    FL_BN_ALLOW_MODULES in the environment. The name ``*`` allows all modules except
    those of Python and of installed packages. ``fl-bn run`` sets it, since its user
    owns the process.
    """
    allowed = _modules_of(app, str(node.get("allow-modules", "")), os.environ.get(VARIABLE, ""))
    if allowed != modules():
        allow(allowed)
        _known.cache_clear()
        forget()


@lru_cache(maxsize=16)
def _modules_of(app: Path | None, allowed: str, variable: str) -> Modules:  # cached, since it reads files, and is called for every message
    return Modules.of(app, allowed)


@as_config_error()
def dataset(config: RunConfig) -> Dataset:
    """Return the data of a run.

    The run's ``setup`` may change the data first. ``hold-out`` removes a domain.
    With ``validation-share``, the clients' validation samples replace the test
    samples.

    Raises:
        DataNotFound: A file of the data is missing.
        ConfigError: The data cannot be made as the keys describe.
    """
    return _validated(config).data if config.validation_share else _whole_dataset(config)


def _whole_dataset(config: RunConfig) -> Dataset:
    data = _dataset(config)
    task(config, data.y_train)
    return _without(data, config.hold_out) if config.hold_out else data


@lru_cache(maxsize=4)
def _dataset(config: RunConfig) -> Dataset:
    data = config.changes.dataset(config)
    check_labels(data, config.data_path)
    return data


_without = lru_cache(maxsize=2)(without_domain)


@as_config_error()
def task(config: RunConfig, targets: Tensor | None = None) -> Task:
    """Return the task of a run, or raise ``ConfigError`` if it does not exist or suit the targets.

    ``task='auto'`` depends on the ``targets`` of the data. None: they are not
    known; then only the names of the task's metrics may be used.
    """
    return find_task(config.task, None if targets is None else kind_of(targets), modules())


@as_config_error()
def callback_makers(config: RunConfig) -> list[Callable[..., Any]]:
    """Return the classes and functions that the run config names as callbacks.

    ``ConfigError``: one does not exist, is not allowed, or does not derive from
    ``Callback``.
    """
    makers = []
    for name in names_of(config.callbacks):
        maker = function("a callback", name, modules())
        if isinstance(maker, type) and not issubclass(maker, Callback):
            bases = ", ".join(base.__name__ for base in maker.__bases__)
            raise ConfigError(f"callbacks: {name} must derive from fl_bn.Callback, but derives from {bases}")
        makers.append(maker)
    return makers


@as_config_error()
def own_callbacks(config: RunConfig, folder: Path | None) -> list[Callback]:
    """Make the callbacks of the keys ``keep-best``, ``early-stop`` and ``callbacks``.

    Each maker gets run config and folder. None: the run writes nothing.
    ``ConfigError``: one makes no ``Callback``.
    """
    callbacks: list[Callback] = []
    if config.keep_best and folder is not None:
        callbacks.append(KeepBest(folder / BEST))
    if config.early_stop:
        callbacks.append(EarlyStop(config.early_stop))
    for name, maker in zip(names_of(config.callbacks), callback_makers(config), strict=True):
        callback = maker(config, folder)
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks: {name} must make a fl_bn.Callback, but made a {type(callback).__name__}")
        callbacks.append(callback)
    return callbacks


def shape(config: RunConfig) -> tuple[int, int, int]:
    """Return ``(classes, channels, image size)`` of the data for the run's network."""
    if config.dataset == SITES:
        return config.classes, config.channels, config.image_size
    data = dataset(config)
    return data.classes, data.channels, data.image_size


@lru_cache(maxsize=4)
@as_config_error()
def source_model(config: RunConfig) -> nn.Module:
    """Return the network before its conversion, with the run's initial weights. Copy it before a change.

    Raises:
        DataNotFound: A file of the data, which decide inputs and outputs, is
            missing.
        ConfigError: The network cannot be made as the keys describe.
    """
    classes, channels, size = shape(config)
    if classes < 2 and isinstance(task(config), Classification):
        raise ConfigError(f"classification needs at least 2 classes, but dataset={config.dataset!r} has {classes}")
    shaped: dict[str, Any] = {"classes": classes, "channels": channels, "image_size": size, "seed": config.seed}
    model = config.changes.network(config, partial(build, config.model, **shaped, weights=config.model_weights, modules=modules()))
    set_buffer_roles(model, parse_buffer_roles(config.buffers))
    return model


@lru_cache(maxsize=4)
@as_config_error()
def client_model(config: RunConfig) -> nn.Module:
    """Return the converted network with which every client starts. Copy it before a change.

    It raises the errors of ``source_model``, and ``ConfigError`` if it cannot be
    converted.
    """
    return convert(source_model(config), config.build_method())


@lru_cache(maxsize=2)
def network(config: RunConfig, device: torch.device) -> Network:
    """Return the network that all clients of this process train, one after the other."""
    return Network(laid_out(at_client(config), device), config.build_method(), device)


@lru_cache(maxsize=4)
def training(config: RunConfig) -> LocalTraining:
    """Return the settings of local training."""
    return config.local_training()


def laid_out(config: RunConfig, device: torch.device) -> nn.Module:
    """Return ``client_model(config)`` in the memory format of the run. Copy it before a change."""
    model = client_model(config)
    layout = memory_format(config.memory_format, source_model(config), shape(config)[1:], device)
    return model if layout is torch.contiguous_format else copied(model).to(memory_format=layout)


@lru_cache(maxsize=4)
def at_client(config: RunConfig) -> RunConfig:
    """Return the run config with which a client builds its network.

    ``model-weights`` is left out if the server sends all tensors of that file.
    """
    kept = "kept" in parse_buffer_roles(config.buffers).values()
    if not config.model_weights or kept or config.build_method().personal:
        return config
    return replace(config, model_weights="")


@lru_cache(maxsize=4)
@as_config_error()
def partitions(config: RunConfig) -> list[Tensor]:
    """Return every client's indices of training samples in ``dataset(config)``.

    The data are divided among the honest clients. Each attacker of the run's
    ``setup`` has a copy of one's part.
    """
    parts = _validated(config).parts if config.validation_share else _honest_parts(config)
    return [torch.from_numpy(parts[client % len(parts)]) for client in range(config.clients)]


@lru_cache(maxsize=2)
def _validated(config: RunConfig) -> HeldOut:
    return hold_out(_whole_dataset(config), _honest_parts(config), config.validation_share, config.seed)


def _honest_parts(config: RunConfig) -> list[Indices]:
    """Return every honest client's indices of samples, before validation samples are held out."""
    data = _whole_dataset(config)
    domains = None if data.domain_train is None else data.domain_train.numpy()
    honest = config.clients - config.changes.attackers
    return partition(config.partition, data.y_train.numpy(), domains, honest, config.partition_parameter, config.seed)


@lru_cache(maxsize=256)
def client_samples(config: RunConfig, client: int, own: OwnData = OwnData()) -> tuple[Samples, Samples, tuple[int, ...]]:  # noqa: B008
    """Return a client's training samples, test samples, and training samples per class.

    A client is tested on all test samples; in a partition by domain with
    ``test-on='own'``, on those of its domain, if there are any. The run's ``setup``
    may change the training samples. A client with data of its ``own`` uses all of
    them. There are no counts if samples have no class.
    """
    data = site_dataset(config, own) if own.dataset else dataset(config)
    part = torch.arange(len(data.y_train)) if own.dataset else partitions(config)[client]
    train = config.changes.samples(config, client, Samples(data.x_train[part], data.y_train[part]))
    counts = label_counts(data.y_train.numpy(), [part.numpy()], shape(config)[0])[0]
    test = Samples(data.x_test, data.y_test)
    by_domain = config.partition in BY_DOMAIN and config.test_on == "own"
    if not own.dataset and by_domain and data.domain_train is not None and data.domain_test is not None:
        mine = data.domain_test == (domain := data.domain_train[part[0]])
        if bool(torch.isin(data.domain_test, data.domain_train).any()):  # Cityscapes is tested on other cities than those of the training
            refuse((not mine.any(), f"{data.domains[domain]} has no test samples: give it some, leave it out, or set test-on='all'"))
            test = Samples(data.x_test[mine], data.y_test[mine])
    return train, test, tuple(int(n) for n in counts)


@as_config_error()
def site_dataset(config: RunConfig, own: OwnData) -> Dataset:
    """Load a client's own data, and check that they have the form of the run's data.

    Raises:
        DataNotFound: A file of the data is missing.
        ConfigError: The data are malformed, or do not suit the model or the task of
            the run.
    """
    try:
        data = load(own.dataset, own.path, config.image_size)
    except DataError as error:  # its text may contain a part of the data, and a client's errors are sent to the server
        LOGGER.error("%s", error)
        where = f"{Path(error.source).name}{', ' * bool(error.part)}{error.part}"
        raise ConfigError(f"this client's own data, {where}, cannot be used: see the client's log for the reason") from None
    _check_columns(config, data)
    if config.validation_share:
        data = hold_out(data, [np.arange(len(data.y_train))], config.validation_share, config.seed).data
    task(config, data.y_train)
    classes, channels, size = shape(config)
    source = f"this client's own {own.dataset!r} ({own.path or 'default path'})"
    if (data.channels, data.image_size) != (channels, size):
        got = f"{data.channels} of {data.image_size} x {data.image_size}"
        raise ConfigError(f"{source}: expected {channels} channels of {size} x {size} pixels, but got {got}")
    if kind_of(data.y_train) not in (LABELS, MASKS) and data.classes != classes:
        raise ConfigError(f"{source}: expected {classes} values or labels per sample, but got {describe(data.y_train, data.classes)}")
    if data.classes > classes:
        raise ConfigError(f"{source}: expected labels 0..{classes - 1}, as the run has classes={classes}, but got up to {data.classes - 1}")
    return data


def _check_columns(config: RunConfig, data: Dataset) -> None:
    """Check that this site reads its CSV files by the same columns.toml as all other sites.

    Raises:
        ConfigError: The site has no columns.toml, or another one than the run's
            columns-digest says.
    """
    digest = data.columns.digest if isinstance(data, TableData) else ""
    wanted = config.columns_digest
    if config.dataset != SITES:
        run = dataset(config)
        wanted = run.columns.digest if isinstance(run, TableData) else digest
    if digest != wanted:
        got = f"expected a columns.toml with the digest {wanted!r}, but this client's data have {digest!r} (empty: none)"
        raise ConfigError(f"{got}: give all sites one columns.toml, and the run columns-digest='{digest}'")
    say_notes(data)


def forget() -> None:
    """Clear this module's caches of data, partitions and networks."""
    for cached in (_dataset, check_labels, _without, _validated, source_model, client_model, network, training, partitions, client_samples):
        cached.cache_clear()


def limit_threads(threads: int) -> None:
    """Set how many CPU threads torch and NumPy's linear algebra have in this process."""
    torch.set_num_threads(threads)
    _limit_blas(threads)


@lru_cache(maxsize=1)
def _limit_blas(threads: int) -> None:  # cached, since finding the library takes milliseconds
    threadpool_limits(threads, user_api="blas")


def partition_of(node: Mapping[str, Any], config: RunConfig, node_id: int = 0) -> int:
    """Return the index of a client, which is its place among the clients of the run.

    It is the node config's ``partition-id``, or the position of ``node_id`` in
    ``client-nodes``. If the site's key was renewed after the run was submitted, it
    is that of the site's name in ``client-names``.

    Raises:
        ConfigError: There is no such index, it is out of range, or
            ``num-partitions`` in the node config is not the run's number of
            clients.
    """
    nodes, names = nodes_of(config.client_nodes), sites_of(config.client_names)
    if "partition-id" not in node and nodes:
        if node_id in nodes:
            return nodes.index(node_id)
        if (site := str(node.get("site", ""))) in names:  # its key was renewed; the server knows whose key this node has
            return names.index(site)
        raise ConfigError(f"site {site or '(without a name)'} takes no part in this run, which is for {', '.join(names) or 'other nodes'}")
    if "partition-id" not in node or "num-partitions" not in node:
        raise ConfigError("expected partition-id and num-partitions in this client's node config, or a run made by `fl-bn submit`")
    try:
        index, clients = (int(node[key]) for key in ("partition-id", "num-partitions"))
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"partition-id and num-partitions in this client's node config must be whole numbers: {error!s:.200}") from error
    if clients != config.clients or not 0 <= index < clients:
        got = f"partition-id={index} and num-partitions={clients} in this client's node config"
        raise ConfigError(f"the run is for clients={config.clients}, numbered from 0, but got {got}: set both to fit")
    return index


@lru_cache(maxsize=4)  # several run configs share data, and a warning is logged once
def check_labels(data: Dataset, path: str) -> None:
    """Check that the data of a run, but not those of a site, have training samples of every class.

    A missing class raises ``ConfigError``, or is a warning if the number of classes
    was stated, as by folders.
    """
    say_notes(data)
    if not (missing := untrained_classes(data)):
        return
    problem = f"dataset={data.name!r} data-path={path!r}: no training sample has label {missing}, but labels are 0..{data.classes - 1}"
    if data.counted:
        raise ConfigError(f"{problem}: labels, also of test samples, count from 0, and each needs training samples; correct the labels")
    LOGGER.warning("%s: if that is a mistake, correct the labels", problem)


def say_notes(data: Dataset) -> None:
    """Warn of rows that were left out, and of missing or unknown cells that were replaced."""
    for note in data.notes:
        LOGGER.warning("dataset %r: %s", data.name, note)
