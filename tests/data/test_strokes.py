"""Changes of thickness and stroke: what they do to strokes whose thickness is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_bn.data.shift import SHIFTS
from fl_bn.data.strokes import Figure, fracture, swelling, thick, thin

CHANGES = ("thin", "thick", "swelling", "fracture")


def bar(width: int, copies: int = 1) -> Tensor:
    """Bars of this many columns, white on black: (copies, 1, 28, 28)."""
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    x[:, :, 4:24, 12 : 12 + width] = 255
    return x.repeat(copies, 1, 1, 1)


def widths(x: Tensor) -> Tensor:
    """Columns that are bright in the middle row of each image, as a sum of brightness."""
    return x[:, 0, 14].double().sum(-1) / 255


def test_the_thickness_of_a_bar_is_its_width() -> None:
    inside = np.zeros((80, 80), dtype=bool)
    inside[10:70, 30:50] = True
    figure = Figure.of(inside)
    assert figure.thickness == pytest.approx(20, abs=2)
    assert bool(figure.centre[40, 39:41].all())
    assert not figure.centre[40, 32]


def test_strokes_lose_seven_tenths_of_their_thickness_or_gain_as_much_again() -> None:
    rng = np.random.default_rng(0)
    assert float(widths(bar(8))) == 8
    assert float(widths(thin(bar(8), rng))) == pytest.approx(0.3 * 8, abs=0.8)
    assert float(widths(thick(bar(8), rng))) == pytest.approx(2 * 8, abs=0.8)


def test_a_swelling_is_in_one_place_and_a_fracture_cuts_across() -> None:
    before = bar(4, copies=50)
    swollen, broken = (change(before, np.random.default_rng(0)) for change in (swelling, fracture))
    rows = (swollen.double() / 255).sum(-1)[:, 0]
    assert bool((rows.max(1).values > 6).all())  # the bar is wider somewhere
    assert bool((rows[:, 4:24].min(1).values <= 4.1).all())  # and as wide as before somewhere
    cut = (broken.double() / 255).sum(-1)[:, 0, 4:24]
    assert bool((cut.min(1).values < 1).all())  # all of the stroke is gone in a row
    assert float((cut > 3).double().mean()) > 0.5  # and most rows are whole
    assert len({tuple(image.flatten().tolist()) for image in broken}) > 40  # each in a place of its own


@pytest.mark.parametrize("name", CHANGES)
def test_colours_change_alike_and_nothing_is_made_of_nothing(name: str) -> None:
    change = SHIFTS[name]
    grey, colour = (change(x, np.random.default_rng(0)) for x in (bar(5), bar(5).expand(-1, 3, -1, -1)))
    assert torch.equal(colour, grey.expand(-1, 3, -1, -1))
    plain = torch.full((2, 1, 28, 28), 7, dtype=torch.uint8)
    assert torch.equal(change(plain, np.random.default_rng(0)), plain)
    assert change(plain[:0], np.random.default_rng(0)).shape == (0, 1, 28, 28)
