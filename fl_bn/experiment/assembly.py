"""From a run config to the objects of a run: the same on the server and at every client, cached per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.data.dataset import Dataset, load
from fl_bn.data.partition import label_counts, partition
from fl_bn.experiment.config import ConfigError, RunConfig
from fl_bn.models import build
from fl_bn.robust.attacks import LABEL_FLIP, flip_labels
from fl_bn.training.local import Samples


@contextmanager
def _as_config_error() -> Iterator[None]:
    """Data, model and partition come from the config's keys, so what is wrong with them is wrong there."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


@_as_config_error()
def dataset(config: RunConfig) -> Dataset:
    return load(config.dataset, config.data_path, config.image_size)


@lru_cache(maxsize=4)
@_as_config_error()
def source_model(config: RunConfig) -> nn.Module:
    """The network as the user wrote it, with the run's initial weights. Do not change it."""
    data = dataset(config)
    return build(config.model, classes=data.classes, channels=data.channels, image_size=data.image_size, seed=config.seed)


@lru_cache(maxsize=4)
@_as_config_error()
def client_model(config: RunConfig) -> nn.Module:
    """The converted network every client starts from. Do not change it: copy it."""
    return convert(source_model(config), config.build_method())


@lru_cache(maxsize=4)
@_as_config_error()
def partitions(config: RunConfig) -> list[Tensor]:
    """Training indices of every client. The data are the honest clients'; a Byzantine one trains on a copy of one of their parts."""
    data = dataset(config)
    domains = None if data.domain_train is None else data.domain_train.numpy()
    if config.partition == "domain" and domains is None:
        needed = "give several npz files, or dataset=digits"
        raise ConfigError(f"partition=domain needs data with domains, but {config.dataset} has none: {needed}")
    honest = config.clients - config.byzantine
    parts = partition(config.partition, data.y_train.numpy(), domains, honest, config.partition_parameter, config.seed)
    return [torch.from_numpy(parts[client % honest]) for client in range(config.clients)]


@lru_cache(maxsize=256)
def client_samples(config: RunConfig, client: int) -> tuple[Samples, Samples, tuple[int, ...]]:
    """A client's training samples, its test samples and its label counts.

    Tested on the whole test set, except under partition=domain: there on the test samples of its own domain.
    """
    data, part = dataset(config), partitions(config)[client]
    train = Samples(data.x_train[part], data.y_train[part])
    if config.attack == LABEL_FLIP and client >= config.clients - config.byzantine:
        train = Samples(train.x, flip_labels(train.y, data.classes))
    counts = label_counts(data.y_train.numpy(), [part.numpy()], data.classes)[0]
    test = Samples(data.x_test, data.y_test)
    if config.partition == "domain" and data.domain_train is not None and data.domain_test is not None:
        own = data.domain_test == data.domain_train[part[0]]
        test = Samples(data.x_test[own], data.y_test[own])
    return train, test, tuple(int(n) for n in counts)


def limit_threads(threads: int) -> None:
    """CPU threads of this process: torch's, and those of the linear algebra under NumPy (robust rules)."""
    torch.set_num_threads(threads)
    _limit_blas(threads)


@lru_cache(maxsize=1)
def _limit_blas(threads: int) -> None:  # takes milliseconds to find the library
    threadpool_limits(threads, user_api="blas")


def device(config: RunConfig) -> torch.device:
    """Raises ConfigError where a GPU is asked for and torch sees none."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(config.device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={config.device}, but torch sees no GPU in this process. In simulation give clients a share of it: the profile "
            "local-simulation-gpu, or --federation-config 'options.backend.client-resources.num-gpus=0.2'"
        )
    return chosen


def partition_of(node: Mapping[str, Any], config: RunConfig) -> int:
    """The client's index, from its node config ``node``.

    Raises:
        ConfigError: the node names none, or counts another number of clients than the run.
    """
    if "partition-id" not in node or "num-partitions" not in node:
        raise ConfigError('this client\'s node config names no partition: start it with --node-config "partition-id=0 num-partitions=5"')
    index, clients = int(node["partition-id"]), int(node["num-partitions"])
    if clients != config.clients:
        raise ConfigError(
            f"the run is for clients={config.clients}, but this client's node config has num-partitions={clients}: set both alike, "
            f'e.g. --run-config "clients={clients}" or --federation-config "options.num-supernodes={config.clients}"'
        )
    if not 0 <= index < clients:
        raise ConfigError(f"partition-id must be 0..{clients - 1}, but got {index}")
    return index
