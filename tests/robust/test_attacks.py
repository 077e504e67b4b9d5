"""Every attack against its formula, worked out here by other means; the search for the worst strength; and who attacks what."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fl_bn.robust.attacks import GRID, Adversary, Attack, Damage, alie, foe, mimic, optimised, sign_flip, z_max
from tests.listed import listed
from tests.refusals import naming

HONEST = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 5.0], [6.0, 2.0, -1.0]])
MEAN = np.array([3.0, 2.0, 2.0])
DEVIATION = np.array([math.sqrt((4 + 0 + 1 + 9) / 4), 0.0, math.sqrt((1 + 1 + 9 + 9) / 4)])  # of all h rows: not h - 1


def no_damage(row: np.ndarray) -> float:
    raise AssertionError("this attack looks for no damage")


@listed("f", [1, 3])
@listed(
    ("attack", "row"),
    [
        (sign_flip, [-3, -2, -2]),
        (foe(0.5), [-1.5, -1, -1]),
        (alie(1.5), MEAN - 1.5 * DEVIATION),
        (alie(-4.0), MEAN + 4 * DEVIATION),
        (mimic(2), [2, 2, 5]),
    ],
)
def test_an_attack_is_its_formula_f_times(attack: Attack, row: list[float], f: int) -> None:
    before = HONEST.copy()
    rows = attack(HONEST, f)
    assert rows.shape == (f, 3)
    for got in rows:
        np.testing.assert_allclose(got, row, rtol=1e-15, equal_nan=True)
    assert np.array_equal(HONEST, before)


def test_the_textbooks_z() -> None:
    for n, f, share in ((50, 24, 24 / 26), (10, 3, 4 / 7), (10, 5, 4 / 5)):  # the paper's example: s = 26 - 24 = 2 honest ones needed
        assert (1 + math.erf(z_max(n, f) / math.sqrt(2))) / 2 == pytest.approx(share, abs=1e-9)
    assert z_max(10, 1) == 0.0  # below one half the quantile is negative: hidden at the mean only
    assert z_max(3, 2) == z_max(5, 4) == 0.0  # where the attackers are a majority


FINE = np.geomspace(GRID[0], GRID[-1], 300)
ROWS = np.random.default_rng(4).normal(0.3, 1.0, (7, 20))


@listed("family", [foe, alie])
@listed("damage", [lambda row: float(np.linalg.norm(row - ROWS.mean(0))), lambda row: float(np.abs(row - 1).max())])
def test_no_strength_of_a_fine_grid_does_more_damage(family: Callable[[float], Attack], damage: Damage) -> None:
    """Damages that grow with the strength on either side."""
    found = optimised(family, damage)(ROWS, 3)
    assert found.shape == (3, 20)
    assert (found == found[0]).all()
    assert damage(found[0]) >= max(damage(family(strength)(ROWS, 1)[0]) for strength in (*FINE, *-FINE)) * (1 - 1e-12)


def test_sign_flipping_leaves_the_variances() -> None:
    rows = Adversary("sign-flip", 2).statistics_rows(ROWS, 2, no_damage)
    np.testing.assert_array_equal(rows[:, :10], np.repeat(-ROWS[:, :10].mean(0)[None], 2, 0))
    np.testing.assert_array_equal(rows[:, 10:], np.repeat(ROWS[:, 10:].mean(0)[None], 2, 0))
    others = Adversary("foe", 2, strength=1.0).statistics_rows(ROWS, 2, no_damage)  # control: the same formula under another name
    np.testing.assert_array_equal(others[:, 10:], np.repeat(-ROWS[:, 10:].mean(0)[None], 2, 0))


@listed(("arguments", "word"), [(("signflip", 1), "'signflip'"), (("foe", 0), "f=0"), (("foe", 1, "weights"), "'weights'")])
def test_what_makes_no_adversary(arguments: tuple[Any, ...], word: str) -> None:
    with naming(word):
        Adversary(*arguments)
