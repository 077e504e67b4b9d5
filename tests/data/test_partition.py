"""Partitions: the laws all of them obey, and what each one promises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.data.inner import by_domain, classes_per_client, dirichlet, iid, label_counts, partition, similarity
from tests.listed import listed
from tests.refusals import naming

laws = settings(deadline=None, derandomize=True)
BALANCED = np.repeat(np.arange(10), 60)[np.random.default_rng(0).permutation(600)]
DIVISIONS: list[tuple[str, Callable[[int], float]]] = [  # the kind, and a parameter that lets every class find a client
    ("iid", lambda _: 0),
    ("classes", lambda clients: max(2, -(-10 // clients))),
    ("dirichlet", lambda _: 0.3),
    ("dirichlet", lambda _: 0.01),
    ("similarity", lambda _: 0.4),
    ("domain", lambda _: 0),
    ("domain-dirichlet", lambda _: 0.5),
]


@pytest.mark.parametrize(("kind", "parameter"), DIVISIONS)
@settings(laws, max_examples=10)
@given(clients=st.integers(3, 25), seed=st.integers(0, 2**40))
def test_every_sample_has_one_client(kind: str, parameter: Callable[[int], float], clients: int, seed: int) -> None:
    domains = np.arange(600) % 3
    parts = partition(kind, BALANCED, domains, clients, parameter(clients), seed)
    assert len(parts) == clients
    assert all(len(part) > 0 and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(600))
    again = partition(kind, BALANCED, domains, clients, parameter(clients), seed)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    other = partition(kind, BALANCED, domains, clients, parameter(clients), seed + 1)
    fixed = kind.startswith("domain") and clients == 3  # a whole domain each, whatever the seed
    assert fixed or any(len(a) != len(b) or (a != b).any() for a, b in zip(parts, other, strict=True))  # control


def test_another_process_computes_the_same_partition() -> None:
    code = (
        "import numpy as np; from fl_bn.data.partition import dirichlet; np.random.seed(1);"
        "print([p.tolist() for p in dirichlet(np.arange(60) % 3, 4, 0.5, 11)])"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str([part.tolist() for part in dirichlet(np.arange(60) % 3, 4, 0.5, 11)])


def test_iid_is_even_in_size_and_nearly_in_classes() -> None:
    parts = iid(BALANCED, 7, seed=0)
    assert {len(part) for part in parts} == {85, 86}
    assert label_counts(BALANCED, iid(BALANCED, 2, seed=0), 10).min() > 15


@laws
@given(clients=st.integers(1, 15), k=st.integers(1, 10), seed=st.integers(0, 1000))
def test_class_shards_are_even(clients: int, k: int, seed: int) -> None:
    counts = label_counts(BALANCED, classes_per_client(BALANCED, clients, k, seed), 10)
    holders = (counts > 0).sum(axis=0)
    assert ((counts > 0).sum(axis=1) == k).all()  # k different classes each
    assert holders.max() - holders.min() <= (clients * k % 10 > 0)
    for label in np.flatnonzero(holders):
        shares = counts[counts[:, label] > 0, label]
        assert shares.sum() == 60
        assert shares.max() - shares.min() <= 1


def test_mending_reaches_any_feasible_minimum_and_moves_no_more_than_it_must() -> None:
    drawn = dirichlet(BALANCED, 20, 1e-3, seed=0, min_samples=1)
    assert sum(len(part) == 1 for part in drawn) >= 10  # ten classes, each to one client: the others were mended
    assert {len(part) for part in dirichlet(BALANCED, 20, 1e-3, seed=0, min_samples=30)} == {30}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_similarity_mixes_sorted_chunks_with_a_pool(share: float) -> None:
    counts = label_counts(BALANCED, similarity(BALANCED, 10, share, seed=0), 10)
    assert (counts.sum(axis=1) == 60).all()
    # Ten clients and ten classes: a chunk is one class (two, where the pool took unequally), the pool a tenth of each.
    largest = counts.max(axis=1).mean() / 60
    assert abs(largest - (1 - share + share / 10)) < 0.12
    if share == 0:
        assert sorted(counts.flatten()) == [0] * 90 + [60] * 10


@laws
@given(clients=st.integers(3, 20))
def test_each_client_has_one_domain_and_domains_have_clients_alike(clients: int) -> None:
    domains = np.array([2, 5, 9])[np.arange(90) % 3]
    parts = by_domain(domains, clients, seed=0)
    owned = [np.unique(domains[part]) for part in parts]
    assert all(len(names) == 1 for names in owned)
    per_domain = np.unique(np.concatenate(owned), return_counts=True)[1]
    assert per_domain.max() - per_domain.min() <= 1
    assert len(per_domain) == 3
    assert max(len(np.unique(domains[part])) for part in iid(domains, clients, 0)) > 1  # control


def test_clients_of_a_domain_divide_it_with_label_skew() -> None:
    domains, labels = np.arange(3000) % 3, np.random.default_rng(0).integers(0, 10, 3000)
    skewed = partition("domain-dirichlet", labels, domains, 9, 0.05, 0)
    assert [np.unique(domains[part]).tolist() for part in skewed] == [[n % 3] for n in range(9)]
    even = partition("domain", labels, domains, 9, 0, 0)  # control: without skew a client has its domain's classes in like numbers

    def largest(parts: list[NDArray[np.int64]]) -> float:
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest(skewed) > 0.3 > 0.2 > largest(even)


TABLES = {
    2: ["01", "23", "45", "67", "89"],
    4: ["0123", "2345", "4567", "6789", "8901"],
    6: ["012345", "234567", "456789", "678901", "890123"],
    8: ["01234567", "23456789", "45678901", "67890123", "89012345"],
    10: ["0123456789"] * 5,
}


@pytest.mark.parametrize("k", TABLES)
def test_the_class_tables(k: int) -> None:
    labels = np.concatenate([BALANCED, BALANCED])  # 120 of each class, which 1 to 5 clients share without remainder
    counts = label_counts(labels, partition("table", labels, None, 5, k, seed=3), 10)
    wanted = np.zeros((5, 10), dtype=int)
    for client, classes in enumerate(TABLES[k]):
        wanted[client, [int(c) for c in classes]] = 120 // (k // 2)
    assert counts.tolist() == wanted.tolist()
    drawn = label_counts(labels, partition("classes", labels, None, 5, k, seed=3), 10)
    assert (drawn > 0).tolist() != (wanted > 0).tolist() or k == 10  # control: classes given out by lot


def test_one_client_per_group_and_nothing_drawn() -> None:
    groups = np.array([7, 3, 3, 9, 7, 7])
    assert [part.tolist() for part in partition("natural", groups * 0, groups, 3, 0, seed=0)] == [[1, 2], [0, 4, 5], [3]]
    assert [part.tolist() for part in partition("natural", groups * 0, groups, 3, 0, seed=1)] == [[1, 2], [0, 4, 5], [3]]


def test_equal_sizes_are_those_of_the_smallest_drawn_at_random_from_each_clients_own() -> None:
    groups = np.repeat([0, 1, 2], [300, 100, 200])
    whole = partition("natural", BALANCED, groups, 3, 0, seed=0)
    parts = partition("natural", BALANCED, groups, 3, 0, seed=0, sizes="equal")
    assert [len(part) for part in parts] == [100, 100, 100] != [len(part) for part in whole]
    assert all(set(part) <= set(own) and (np.diff(part) > 0).all() for part, own in zip(parts, whole, strict=True))
    assert parts[0].tolist() != whole[0][:100].tolist()  # control: the first of a list that is sorted by label would be of one class
    assert parts[0].max() > 200
    again, other = (partition("natural", BALANCED, groups, 3, 0, seed=seed, sizes="equal") for seed in (0, 1))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    assert any((a != b).any() for a, b in zip(parts, other, strict=True))


def test_masks_are_counted_by_pixel_and_divided_without_their_labels() -> None:
    masks = np.array([[[0, 255], [1, 1]], [[2, 2], [2, 255]], [[0, 0], [0, 0]]])
    assert label_counts(masks, [np.array([0, 1]), np.array([2])], 3).tolist() == [[1, 2, 3], [4, 0, 0]]
    for kind in ("iid", "domain", "natural"):
        assert sorted(np.concatenate(partition(kind, masks, np.arange(3), 3, 0, seed=0))) == [0, 1, 2]


@listed(
    ("arguments", "message"),
    [
        ({"kind": "random"}, "'random'"),
        ({"clients": 601}, "601"),
        ({"seed": -1}, "negative"),
        ({"kind": "classes", "parameter": 1.5}, "1.5"),
        ({"kind": "classes", "parameter": 0}, "10"),
        ({"kind": "classes", "parameter": 11}, "11"),
        ({"kind": "classes", "parameter": 2, "clients": 500}, "clients"),
        ({"kind": "dirichlet", "parameter": 0}, "positive"),
        ({"kind": "dirichlet", "parameter": 0.5, "clients": 301}, "301 clients"),
        ({"kind": "similarity", "parameter": 1.1}, "1.1"),
        ({"kind": "similarity", "parameter": float("nan")}, "nan"),
        ({"kind": "table", "parameter": 4, "clients": 6}, "5 clients"),
        ({"kind": "table", "parameter": 4, "labels": BALANCED % 9}, "of 9"),
        ({"kind": "domain"}, "domains"),
        ({"kind": "natural", "domains": np.arange(600) % 4}, "4"),
        ({"sizes": "similar"}, "'similar'"),
        ({"kind": "dirichlet", "labels": np.zeros((600, 2, 3), dtype=int)}, "(2, 3)"),
        ({"kind": "domain", "domains": np.arange(600) % 6}, "6 domains"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    defaults = {"kind": "iid", "labels": BALANCED, "domains": None, "clients": 5, "parameter": 0.0, "seed": 0}
    with naming(message):
        partition(**(defaults | arguments))
