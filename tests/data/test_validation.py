"""Validation samples: a share of each client's training data, in the place of the test split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.data.inner import Dataset, OwnData, RunConfig, client_samples, dataset, hold_out, partitions
from tests.experiment.small_data import small_config, small_npz
from tests.refusals import wrong_data

TEST = 99  # the value of every pixel of the test split


def numbered(samples: int = 40) -> Dataset:
    """Make a data set whose training images have their index as every pixel."""
    x = torch.arange(samples, dtype=torch.uint8)[:, None, None, None].expand(samples, 1, 2, 2).contiguous()
    domains = torch.arange(samples) % 2
    test = torch.full((5, 1, 2, 2), TEST, dtype=torch.uint8)
    zeros = torch.zeros(5, dtype=torch.int64)
    return Dataset("numbered", x, torch.arange(samples) % 4, test, zeros, 4, domains, zeros, ("even", "odd"))


def images(x: torch.Tensor) -> list[int]:
    return x[:, 0, 0, 0].tolist()


def test_every_client_gives_a_share_and_trains_on_the_rest() -> None:
    parts = [np.arange(10), np.arange(10, 30), np.arange(30, 40)]
    found = hold_out(numbered(), parts, 0.2, seed=3)
    kept = [images(found.data.x_train[part]) for part in found.parts]
    assert [len(part) for part in kept] == [8, 16, 8]
    held = images(found.data.x_test)
    assert sorted([*held, *sum(kept, [])]) == list(range(40))  # none twice, none lost
    assert [len({*held} & {*part.tolist()}) for part in parts] == [2, 4, 2]
    assert TEST not in held
    assert found.data.y_test.tolist() == [i % 4 for i in held]
    assert found.data.domain_test is not None
    assert found.data.domain_test.tolist() == [i % 2 for i in held]
    for client, part in enumerate(found.parts):
        assert found.data.y_train[part].tolist() == [i % 4 for i in kept[client]]


def test_a_client_keeps_two_samples() -> None:
    found = hold_out(numbered(), [np.arange(2), np.arange(2, 5), np.arange(5, 40)], 0.9, 0)
    assert [len(part) for part in found.parts] == [2, 2, 3]
    with wrong_data("numbered", "validation-share=0.9"):
        hold_out(numbered(), [np.arange(2), np.arange(2, 4)], 0.9, 0)


def test_a_run_is_divided_as_without(tmp_path: Path) -> None:
    plain = RunConfig.from_mapping({**small_config(tmp_path), "partition": "dirichlet", "clients": 3, "partition-parameter": 0.5})
    share = replace(plain, validation_share=0.25)
    before, after = dataset(plain), dataset(share)
    for client, (whole, part) in enumerate(zip(partitions(plain), partitions(share), strict=True)):
        mine = {row.numpy().tobytes() for row in before.x_train[whole]}
        assert {row.numpy().tobytes() for row in after.x_train[part]} <= mine
        assert len(part) == len(whole) - min(round(0.25 * len(whole) + 1e-9), len(whole) - 2)
        train, test, counts = client_samples(share, client)
        assert len(train) == len(part) == sum(counts)
        assert torch.equal(test.x, after.x_test)
    tested = {row.numpy().tobytes() for row in before.x_test}
    assert not tested & {row.numpy().tobytes() for row in after.x_test}


def test_a_byzantine_client_trains_on_what_is_left_of_anothers_part(tmp_path: Path) -> None:
    values = {**small_config(tmp_path), "partition": "iid", "clients": 4, "byzantine": 1, "attack": "sign-flip"}
    values |= {"setup": "experiments.papers:Papers", "validation-share": 0.25}
    parts = partitions(RunConfig.from_mapping(values))
    assert torch.equal(parts[3], parts[0])
    assert sum(map(len, parts[:3])) == 36


def test_a_sites_own_data_give_a_share_too(tmp_path: Path) -> None:
    sites = {"dataset": "sites", "classes": 4, "channels": 1, "image-size": 4, "model": "mlp"}
    own = OwnData("npz", str(small_npz(tmp_path)))
    train, test, _ = client_samples(RunConfig.from_mapping({**sites, "validation-share": 0.25}), 0, own)
    whole, tested, _ = client_samples(RunConfig.from_mapping(sites), 0, own)
    assert (len(train), len(test)) == (36, 12)
    assert (len(whole), len(tested)) == (48, 24)  # control
