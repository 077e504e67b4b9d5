"""The record every data set is checked against, and parts of a set: domains, validation samples, the digits that come with scikit-learn."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fl_bn.app.assembly import OwnData, client_samples, partitions
from fl_bn.app.config import RunConfig
from fl_bn.data.dataset import load, to_input
from fl_bn.data.digits import SPLIT
from fl_bn.data.images import resize
from fl_bn.data.record import Dataset
from fl_bn.data.subsets import hold_out
from tests.experiment.small_data import small_config, small_npz
from tests.listed import listed
from tests.refusals import wrong_data

MASKS = torch.tensor([0, 1, 2, 255, -100, 0, 1, 2]).expand(4, 8, 8)


def small(**changes: Any) -> Dataset:
    """Four training and two test images of 8 x 8 pixels."""
    x, y = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 1])
    return Dataset(**({"name": "made-up", "x_train": x, "y_train": y, "x_test": x[:2], "y_test": y[:2], "classes": 3} | changes))


@listed(
    ("changes", "part"),
    [
        ({"x_test": torch.zeros(0, 3, 8, 8, dtype=torch.uint8), "y_test": torch.zeros(0).long()}, "x_test"),
        ({"x_test": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}, "x_train and x_test"),
        ({"x_train": torch.tensor([[1.0], [2.0], [torch.nan], [1.0]])}, "x_train"),
        ({"y_train": torch.tensor([0, 1, 3, 1])}, "y_train"),
        ({"y_train": torch.tensor([[0, 1], [1, 1], [2, 1], [0, 0]]), "classes": 2}, "y_train"),
        ({"y_train": MASKS + 3, "y_test": MASKS[:2]}, "y_train"),
        ({"y_train": MASKS[:, 0], "y_test": MASKS[:2]}, "y_train"),
        ({"domains": ("a",)}, "domain_train"),
        ({"domain_train": torch.full((4,), 1), "domain_test": torch.zeros(2).long(), "domains": ("a",)}, "domain_train"),
    ],
)
def test_a_wrong_record_is_refused(changes: dict[str, Any], part: str) -> None:
    with wrong_data("made-up", part):
        small(**changes)
    small(y_train=MASKS, y_test=MASKS[:2])  # control: 255 and labels below 0 are left out


# From bytes to input


def test_input_spans_minus_one_to_one() -> None:
    x = to_input(torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16), torch.float64)
    torch.testing.assert_close(x.flatten(), torch.linspace(-1, 1, 256, dtype=torch.float64), rtol=0, atol=1e-6)


def test_resize_averages_what_it_drops_and_keeps_flat_images() -> None:
    stripes = (torch.arange(32) % 2 * 255).to(torch.uint8).expand(2, 3, 32, 32)
    inner = resize(stripes, 16)[..., 2:-2].float()
    assert (inner - 127.5).abs().max() < 32
    assert (stripes[..., ::2].float() - 127.5).abs().min() > 127  # control: without antialiasing only every other column counts
    flat = torch.full((3, 1, 7, 7), 200, dtype=torch.uint8)
    assert torch.equal(resize(flat, 20), torch.full((3, 1, 20, 20), 200, dtype=torch.uint8))
    assert resize(flat, 0) is resize(flat, 7) is flat


# Parts of a set


def numbered() -> Dataset:
    """Make a set in which every pixel of an image is its number; labels and domains follow from the numbers."""
    n = torch.arange(48)
    x, y, domain = n.to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2), n % 4, n % 3
    return Dataset("made-up", x[:42], y[:42], x[42:], y[42:], 4, domain[:42], domain[42:], ("a", "b", "c"))


def numbers(data: Dataset, split: str) -> list[int]:
    """Return the numbers of a split's images, whose labels must be those of the numbers."""
    found = getattr(data, f"x_{split}")[:, 0, 0, 0].tolist()
    assert getattr(data, f"y_{split}").tolist() == [n % 4 for n in found]
    return found  # type: ignore[no-any-return]


def test_every_client_gives_a_share_and_trains_on_the_rest() -> None:
    data, parts = numbered(), [np.arange(10), np.arange(10, 30), np.arange(30, 42)]
    found = hold_out(data, parts, 0.2, seed=3)
    trained, held = numbers(found.data, "train"), numbers(found.data, "test")
    kept = [[trained[i] for i in part] for part in found.parts]
    assert [len(part) for part in kept] == [8, 16, 10]
    assert sorted([*held, *sum(kept, [])]) == list(range(42))  # none twice, none lost, and none of the test split
    assert [len({*held} & {*part.tolist()}) for part in parts] == [2, 4, 2]
    assert found.data.domain_test.tolist() == [n % 3 for n in held]
    least = hold_out(data, [np.arange(2), np.arange(2, 5), np.arange(5, 42)], 0.95, 0)
    assert [len(part) for part in least.parts] == [2, 2, 2]  # a client keeps two samples
    pairs = hold_out(replace(data, group_train=torch.arange(42) // 2), [np.arange(42)], 0.2, 0).data
    trained, held = ({n // 2 for n in numbers(pairs, split)} for split in ("train", "test"))
    assert (len(trained), len(held), trained & held) == (17, 4, set())  # pairs stay together
    few = hold_out(replace(data, group_train=torch.arange(42) // 21), [np.arange(21), np.arange(20, 42)], 0.2, 0)
    assert ([len(part) for part in few.parts], len(few.data.y_test)) == ([21, 21], 1)  # one of two groups, and not a client's only one
    alone = hold_out(replace(data, group_train=torch.arange(42)), [np.arange(2), np.arange(2, 42)], 0.2, 0)
    assert [len(part) for part in alone.parts] == [2, 32]  # a row alone has no variance
    with wrong_data("made-up", "validation-share=0.9"):
        hold_out(data, [np.arange(2), np.arange(2, 4)], 0.9, 0)


def test_runs_and_sites_do_so(tmp_path: Path) -> None:
    sites = {"dataset": "sites", "classes": 4, "channels": 1, "image-size": 4, "model": "mlp", "validation-share": 0.25}
    run = {**small_config(tmp_path), "partition": "iid", "clients": 4, "validation-share": 0.25}
    assert [len(part) for part in partitions(RunConfig.from_mapping(run))] == [9] * 4
    train, test, _ = client_samples(RunConfig.from_mapping(sites), 0, OwnData("npz", str(small_npz(tmp_path))))
    assert (len(train), len(test)) == (36, 12)


# The digits that work offline


def test_the_split_is_scikit_learns_and_half_of_it_lies_in_each_photograph() -> None:
    labels = load_digits().target
    train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=20)
    assert tomllib.loads(SPLIT.read_text()) == {"train": train.tolist(), "test": test.tolist()}
    data = load("digits")
    assert data.domains == ("china", "flower")
    assert (data.domain_train.bincount().tolist(), data.domain_test.bincount().tolist()) == ([719, 718], [180, 180])
