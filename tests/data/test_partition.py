"""Samples divided among clients, and a client's samples into batches: the laws that all divisions obey, and what each promises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_bn.data.batches import ClientTooSmall, distinct, draw_batches
from fl_bn.data.partition import classes_per_client, dirichlet, label_counts, partition, similarity
from tests.listed import listed
from tests.refusals import naming

Parts = list[NDArray[np.int64]]
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


def same(one: Parts, other: Parts) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "parameter"), DIVISIONS)
@settings(max_examples=10)
@given(clients=st.integers(3, 25), seed=st.integers(0, 2**40))
def test_every_sample_has_one_client(kind: str, parameter: Callable[[int], float], clients: int, seed: int) -> None:
    domains = np.arange(600) % 3
    parts, again, other = (partition(kind, BALANCED, domains, clients, parameter(clients), s) for s in (seed, seed, seed + 1))
    assert len(parts) == clients
    assert all(len(part) > 0 and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(600))
    assert same(parts, again)
    fixed = kind.startswith("domain") and clients == 3  # a whole domain each, whatever the seed
    assert same(parts, other) is fixed
    if kind.startswith("domain"):
        assert [np.unique(domains[part]).tolist() for part in parts] == [[client % 3] for client in range(clients)]


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
    drawn = dirichlet(BALANCED, 20, 1e-3, seed=0)
    assert sum(len(part) == 2 for part in drawn) >= 10  # ten classes, each to one client: the others were mended
    assert {len(part) for part in dirichlet(BALANCED, 300, 1e-3, seed=0)} == {2}
    first = dirichlet(np.arange(12) % 3, 3, 1.0, seed=11)  # the first draw, which suits, in every version
    assert [part.tolist() for part in first] == [[1, 2, 3], [0, 4, 6, 7, 11], [5, 8, 9, 10]]


@listed("share", [0.0, 0.25, 0.5, 1.0])
def test_similarity_mixes_sorted_chunks_with_a_pool(share: float) -> None:
    counts = label_counts(BALANCED, similarity(BALANCED, 10, share, seed=0), 10)
    assert (counts.sum(axis=1) == 60).all()
    # Ten clients and ten classes: a chunk is one class (two, where the pool took unequally), the pool a tenth of each.
    largest = counts.max(axis=1).mean() / 60
    assert abs(largest - (1 - share + share / 10)) < 0.12
    if share == 0:
        assert sorted(counts.flatten()) == [0] * 90 + [60] * 10


def test_clients_of_a_domain_divide_it_with_label_skew() -> None:
    domains, labels = np.arange(3000) % 3, np.random.default_rng(0).integers(0, 10, 3000)

    def largest(kind: str, parameter: float) -> float:
        parts = partition(kind, labels, domains, 9, parameter, 0)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest("domain-dirichlet", 0.05) > 0.3 > 0.2 > largest("domain", 0)  # control: without skew, classes in like numbers
    alike = partition("domain-dirichlet", np.arange(3000) // 3 % 10, domains, 9, 0.5, 0)  # the domains have the same labels
    assert not np.array_equal(alike[0] // 3, alike[1] // 3), "domains are divided independently"


TABLES = {
    2: ["01", "23", "45", "67", "89"],
    4: ["0123", "2345", "4567", "6789", "8901"],
    6: ["012345", "234567", "456789", "678901", "890123"],
    8: ["01234567", "23456789", "45678901", "67890123", "89012345"],
    10: ["0123456789"] * 5,
}


@listed("k", TABLES)
def test_the_class_tables(k: int) -> None:
    labels = np.concatenate([BALANCED, BALANCED])  # 120 of each class, which 1 to 5 clients share without remainder
    counts = label_counts(labels, partition("table", labels, None, 5, k, seed=3), 10)
    wanted = np.zeros((5, 10), dtype=int)
    for client, classes in enumerate(TABLES[k]):
        wanted[client, [int(c) for c in classes]] = 120 // (k // 2)
    assert counts.tolist() == wanted.tolist()


def test_one_client_per_group_and_nothing_drawn() -> None:
    groups = np.array([7, 3, 3, 9, 7, 7])
    for seed in (0, 1):
        assert [part.tolist() for part in partition("natural", groups * 0, groups, 3, 0, seed)] == [[1, 2], [0, 4, 5], [3]]


def test_masks_are_counted_by_pixel_and_divided_without_their_labels() -> None:
    masks = np.array([[[0, 255], [1, 1]], [[2, 2], [2, 255]], [[0, 0], [0, 0]]])
    assert label_counts(masks, [np.array([0, 1]), np.array([2])], 3).tolist() == [[1, 2, 3], [4, 0, 0]]
    for kind in ("iid", "domain", "natural"):
        assert sorted(np.concatenate(partition(kind, masks, np.arange(3), 3, 0, seed=0))) == [0, 1, 2]


@listed(
    ("arguments", "message"),
    [
        ({"kind": "random"}, "'random'"),
        ({"kind": "classes", "parameter": 11}, "11"),
        ({"kind": "dirichlet", "parameter": 0.5, "clients": 301}, "301 clients"),
        ({"kind": "domain"}, "domains"),
        ({"kind": "natural", "domains": np.arange(600) % 4}, "4"),
        ({"kind": "dirichlet", "labels": np.zeros((600, 2, 3), dtype=int)}, "(2, 3)"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    defaults = {"kind": "iid", "labels": BALANCED, "domains": None, "clients": 5, "parameter": 0.0, "seed": 0}
    with naming(message):
        partition(**(defaults | arguments))


def drawn(n: int, batch_size: int, **how: Any) -> list[NDArray[np.int64]]:
    return draw_batches(n, batch_size, np.random.default_rng(0), **how)


@given(n=st.integers(2, 200), batch_size=st.integers(2, 70), epochs=st.integers(1, 4), whole=st.booleans())
def test_passes_have_every_sample_once_in_batches_of_two_or_more(n: int, batch_size: int, epochs: int, whole: bool) -> None:
    whole = whole and n >= batch_size
    batches = drawn(n, batch_size, epochs=epochs, drop_last=whole)
    used = n - n % batch_size if whole else n
    passes = np.concatenate(batches).reshape(epochs, used)
    assert all(len(np.unique(samples)) == used for samples in passes)
    *sizes, last = (len(batch) for batch in batches[: len(batches) // epochs])
    assert all(size == batch_size for size in sizes)
    assert last == batch_size if whole else 2 <= last <= batch_size + 1
    assert len(sizes) == 0 or n > batch_size
    assert used < 20 or all((passes[0] != samples).any() for samples in passes[1:])  # each shuffled afresh
    assert distinct(n, batch_size, epochs=1, drop_last=whole) == used


@given(n=st.integers(2, 200), batch_size=st.integers(2, 70), steps=st.integers(1, 30))
def test_steps_run_on_over_passes(n: int, batch_size: int, steps: int) -> None:
    batches = drawn(n, batch_size, steps=steps)
    passes = drawn(n, batch_size, epochs=steps)  # a pass is at least one step
    assert len(batches) == steps
    assert same(batches, list(islice(passes, steps)))
    assert distinct(n, batch_size, steps=steps) == len(np.unique(np.concatenate(batches)))


def test_a_client_without_variance_is_refused() -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1):
        assert distinct(n, 4, epochs=1) == 0
        with naming(str(n), ClientTooSmall):
            draw_batches(n, 8, rng, epochs=1)
    with naming("drop-last", ClientTooSmall):
        draw_batches(3, 4, rng, epochs=1, drop_last=True)
