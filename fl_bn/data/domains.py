"""Separate one domain from a data set. A run trains without this domain. Afterwards the model of the run is adapted to the domain."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fl_bn.data.record import Dataset


def without_domain(dataset: Dataset, name: str) -> Dataset:
    """Remove the training and test samples of domain ``name``. The other domains keep their order.

    Raises:
        ValueError: there is no such domain, or it is the only one.
    """
    left_out = index_of(dataset, name)
    if len(dataset.domains) == 1:
        raise ValueError(
            f"dataset {dataset.name!r}: {name} is its only domain, so no samples would remain without it: give data of several domains"
        )
    train, test = (_domains(dataset, split) != left_out for split in ("train", "test"))
    domain_train, domain_test = (_domains(dataset, split) for split in ("train", "test"))
    return replace(
        dataset,
        x_train=dataset.x_train[train],
        y_train=dataset.y_train[train],
        x_test=dataset.x_test[test],
        y_test=dataset.y_test[test],
        domain_train=_closed_up(domain_train[train], left_out),
        domain_test=_closed_up(domain_test[test], left_out),
        domains=tuple(domain for domain in dataset.domains if domain != name),
    )


def only_domain(dataset: Dataset, name: str) -> Dataset:
    """Select the samples of domain ``name``, as a data set without domains.

    Raises:
        ValueError: there is no such domain, or it has no training or no test samples.
    """
    index = index_of(dataset, name)
    chosen = {split: _domains(dataset, split) == index for split in ("train", "test")}
    for split, mine in chosen.items():
        if not bool(mine.any()):
            raise ValueError(f"dataset {dataset.name!r}: domain {name} has no {split} samples, and both splits are needed")
    return replace(
        dataset,
        x_train=dataset.x_train[chosen["train"]],
        y_train=dataset.y_train[chosen["train"]],
        x_test=dataset.x_test[chosen["test"]],
        y_test=dataset.y_test[chosen["test"]],
        domain_train=None,
        domain_test=None,
        domains=(),
    )


def index_of(dataset: Dataset, name: str) -> int:
    """Return the position of ``name`` among the domains.

    Raises:
        ValueError: there is no such domain. The message lists the domains.
    """
    if not dataset.domains:
        raise ValueError(
            f"dataset {dataset.name!r} has no domains, so there is no domain {name!r}: give several npz or CSV files or folders, "
            "or dataset='digits'"
        )
    if name not in dataset.domains:
        raise ValueError(f"dataset {dataset.name!r} has no domain {name!r}; it has: {', '.join(dataset.domains)}")
    return dataset.domains.index(name)


def _domains(dataset: Dataset, split: str) -> Tensor:
    indices: Tensor = getattr(dataset, f"domain_{split}")
    return indices


def _closed_up(indices: Tensor, left_out: int) -> Tensor:
    return indices - (indices > left_out).long()
