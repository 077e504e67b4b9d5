"""Domains made by shifts: what is divided and what is kept, what each shift does, and the limit per domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments.data.shift import SHIFTS, Limit, limited, shifted
from fl_bn.data.csv_files import TableData
from fl_bn.data.record import Dataset
from tests.listed import listed
from tests.refusals import naming

NAMES = [name for name in SHIFTS if name != "none"]


def made_up(train: int = 20, test: int = 6, channels: int = 3, size: int = 8) -> Dataset:
    """Images whose first pixel counts them."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (train + test, channels, size, size), generator=rng, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(train + test)
    y = torch.arange(train + test) % 3
    return Dataset("made-up", x[:train], y[:train], x[train:], y[train:], classes=3)


@given(train=st.integers(4, 40), domains=st.integers(1, 3), seed=st.integers(0, 99))
def test_training_samples_are_divided_equally_and_test_samples_repeated(train: int, domains: int, seed: int) -> None:
    data = made_up(train)
    names = ["none", "invert", "pixels"][:domains]
    found = shifted(data, names, seed)
    assert found.domains == tuple(names)
    sizes = found.domain_train.bincount()
    assert sizes.max() - sizes.min() <= 1
    first = found.x_train[:, 0, 0, 0].long()
    numbers = torch.where(found.domain_train == 1, 255 - first, first)
    assert sorted(numbers.tolist()) == list(range(train))  # disjoint, and all of them
    assert torch.equal(found.y_train, numbers % 3)
    assert torch.equal(found.y_test, data.y_test.repeat(domains))
    assert torch.equal(found.x_test[: len(data.x_test)], data.x_test)


@listed("name", NAMES)
def test_the_same_arguments_give_the_same_images_and_others_do_not(name: str) -> None:
    data = made_up()
    one = shifted(data, ["none", name], 3)
    assert torch.equal(one.x_train, shifted(data, ["none", name], 3).x_train)
    assert not torch.equal(one.x_train, shifted(data, ["none", name], 4).x_train)
    assert not torch.equal(one.x_test[:6], one.x_test[6:])  # it changes something
    assert torch.equal(one.x_test[6:], shifted(data, [name, "none"], 3).x_test[:6])  # wherever it stands
    assert (one.x_train.dtype, one.x_train.shape[1:]) == (torch.uint8, data.x_train.shape[1:])


def only(name: str, x: Tensor) -> Tensor:
    data = Dataset("x", x, torch.zeros(len(x), dtype=torch.int64), x, torch.zeros(len(x), dtype=torch.int64), classes=1)
    return shifted(data, [name], 0).x_test


def test_what_each_shift_does() -> None:
    x = made_up(16).x_train
    assert torch.equal(only("invert", x), 255 - x)
    assert torch.equal(only("dark", x), x // 4)
    fog = only("contrast", x)
    assert (int(fog.min()), int(fog.max())) == (127, 212)
    assert abs(float((only("noise", torch.full_like(x, 128)).float() - 128).std()) - 40) < 1.5
    flat = torch.full((2, 3, 9, 9), 77, dtype=torch.uint8)
    assert torch.equal(only("blur", flat), flat)
    assert torch.equal(only("edges", flat), torch.full_like(flat, 255))
    assert only("blur", x).float().std() < 0.5 * x.float().std()
    coarse = only("pixels", x)
    assert torch.equal(coarse[..., ::2, ::2], coarse[..., 1::2, 1::2])
    red, green, blue = only("colour", torch.full_like(x, 200)).float().mean((0, 2, 3)).tolist()
    assert red > green > blue
    black = torch.zeros_like(x)
    assert only("background", black).float().std() > 20  # a black image is all photograph
    assert torch.equal(255 - only("background", 255 - black), only("background", black))


TABLE = TableData("t", torch.rand(4, 3), torch.zeros(4, dtype=torch.int64), torch.rand(2, 3), torch.zeros(2, dtype=torch.int64), 1)


@listed(
    ("data", "names", "seed", "word"),
    [
        (made_up(), [], 0, "shifts"),
        (made_up(), ["invert", "invert"], 0, "shifts"),
        (made_up(), ["sepia"], 0, "shifts"),
        (made_up(1), ["none", "blur"], 0, "2"),
        (made_up(), ["blur"], -1, "negative"),
        (TABLE, ["blur"], 0, "x_train"),
        (made_up(2, 2, size=430), ["background"], 0, "427"),
    ],
)
def test_wrong_shifts_are_refused(data: Dataset, names: list[str], seed: int, word: str) -> None:
    with naming(word):
        shifted(data, names, seed)


@given(per_domain=st.integers(0, 30), seed=st.integers(0, 9))
def test_limited_keeps_so_many_of_each_domain(per_domain: int, seed: int) -> None:
    data = shifted(made_up(30), ["none", "dark"], 0)
    found = limited(data, Limit(per_domain), seed)
    assert found.domain_train.bincount().tolist() == [min(per_domain or 15, 15)] * 2
    assert found.x_test is data.x_test
    pairs = {(*x.flatten().tolist(), y) for x, y in zip(data.x_train, data.y_train.tolist(), strict=True)}
    kept = [(*x.flatten().tolist(), y) for x, y in zip(found.x_train, found.y_train.tolist(), strict=True)]
    assert set(kept) <= pairs
    assert len(set(kept)) == len(kept)
    again = limited(data, Limit(per_domain), seed)
    assert torch.equal(found.x_train, again.x_train)


def test_a_share_of_each_domain_is_kept_whatever_its_size() -> None:
    domains = torch.tensor([0] * 20 + [1] * 10)
    uneven = replace(made_up(30), domains=("a", "b"), domain_train=domains, domain_test=torch.zeros(6, dtype=torch.int64))
    for limit, sizes in ((Limit(share=0.3), [6, 3]), (Limit(5), [5, 5]), (Limit(5, share=0.3), [5, 3])):
        assert limited(uneven, limit, 0).domain_train.bincount().tolist() == sizes
    assert [Limit(share=0.1).of(n) for n in (79431, 7438, 391162, 56000)] == [7943, 743, 39116, 5600]  # FedBN, Table 15
    assert Limit(share=0.29).of(100) == 29  # in floating point 28.999...
    with naming("samples"):
        Limit(share=0.0)


def bar(width: int, copies: int = 1) -> Tensor:
    """Bars of this many columns, white on black: (copies, 1, 28, 28)."""
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    x[:, :, 4:24, 12 : 12 + width] = 255
    return x.repeat(copies, 1, 1, 1)


def widths(x: Tensor) -> Tensor:
    """Columns that are bright in the middle row of each image, as a sum of brightness."""
    return x[:, 0, 14].double().sum(-1) / 255


def test_strokes_lose_seven_tenths_of_their_thickness_or_gain_as_much_again() -> None:
    rng = np.random.default_rng(0)
    assert float(widths(bar(8))) == 8
    assert float(widths(SHIFTS["thin"](bar(8), rng))) == pytest.approx(0.3 * 8, abs=0.8)
    assert float(widths(SHIFTS["thick"](bar(8), rng))) == pytest.approx(2 * 8, abs=0.8)


def test_a_swelling_is_in_one_place_and_a_fracture_cuts_across() -> None:
    before = bar(4, copies=50)
    swollen, broken = (change(before, np.random.default_rng(0)) for change in (SHIFTS["swelling"], SHIFTS["fracture"]))
    rows = (swollen.double() / 255).sum(-1)[:, 0]
    assert bool((rows.max(1).values > 6).all())  # the bar is wider somewhere
    assert bool((rows[:, 4:24].min(1).values <= 4.1).all())  # and as wide as before somewhere
    cut = (broken.double() / 255).sum(-1)[:, 0, 4:24]
    assert bool((cut.min(1).values < 1).all())  # all of the stroke is gone in a row
    assert float((cut > 3).double().mean()) > 0.5  # and most rows are whole
    assert len({tuple(image.flatten().tolist()) for image in broken}) > 40  # each in a place of its own
