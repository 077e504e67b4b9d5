"""Each paper's main table or figure has the paper's settings, key by key, beside tables that were made from the papers by hand.

What no row of a table names must have the default: so a file cannot set a key that the paper does not ask for.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import FOLDER
from fl_bn.app.sweep.cells import Cell
from fl_bn.app.sweep.file import read
from fl_bn.methods import Phase
from tests.listed import listed
from tests.sweeps.papers import DEFAULTS, PAPERS, Keys

DECIDED = {"output", "name", "pictures", "setup", "seed"}  # by the sweep; the keys of the setup count
FREELY_CHOSEN = {"evaluate-every"}  # some papers do not say how often they test


@cache
def cells(name: str, variant: str = "paper", **overrides: Any) -> list[Cell]:
    return read(FOLDER / f"{name}.toml", variant, "data", overrides).cells(Path("nowhere"))


def differing(cell: Cell, wanted: Keys) -> dict[str, tuple[Any, Any]]:
    """Return the keys, among those that the run uses, whose values are not the wanted ones: the cell's value, and the wanted value."""
    free = DECIDED | (FREELY_CHOSEN - wanted.keys()) | cell.config.without_effect
    whole, config = {**DEFAULTS, **wanted}, cell.config.to_mapping()
    return {key: (value, whole[key]) for key, value in config.items() if key not in free and whole[key] != pytest.approx(value)}


@pytest.mark.slow
@listed("name", PAPERS)
def test_the_paper_s_variant_is_the_paper_key_by_key(name: str) -> None:
    setting, found = PAPERS[name], cells(name)
    assert {cell.config.name: wrong for cell in found if (wrong := differing(cell, setting.expected(cell.axes)))} == {}
    assert {tuple(str(cell.axes[axis]) for axis in setting.by) for cell in found} == setting.combinations()
    assert len(found) == len(setting.combinations()) * setting.seeds
    for cell in found:
        config, method = cell.config, cell.config.build_method()
        assert cell.centralised == str(cell.axes["method"]).startswith("centralised")
        assert cell.centralised or not any(method.centres(method.phase(at, config.rounds)) for at in (1, config.rounds))  # as papers do


@listed(("key", "value"), [("augment", "none"), ("clip", "norm")])
def test_control_another_value_of_any_key_is_seen(key: str, value: str) -> None:
    for cell in cells("000-F3", **{key: value}):
        assert list(differing(cell, PAPERS["000-F3"].expected(cell.axes))) == [key]


OURS = {"dataset": "npz", "data-path": "data/cifar10_full.npz"}
THIRD = {**OURS, "memory-format": "channels-last", "rounds": 167, "checkpoint-every": 50}
LENET = {**OURS, "model": "lenet-cnn-bn", "rounds": 216, "checkpoint-every": 36}  # as in Figure D


@listed(("name", "variant", "own"), [("000-F3", "evidence", LENET), ("002-T1", "third", THIRD), ("002-T1", "authors", {"drop-last": True})])
def test_other_variants_are_the_paper_s_in_all_but_what_they_say(name: str, variant: str, own: Keys) -> None:
    """The authors' recipe of HBN has a lambda of 0.002, and a pass over 64 images."""
    setting = PAPERS[name]
    for cell in cells(name, variant):
        if all(str(cell.axes.get(axis, "0.6")) in values for axis, values in setting.by.items()):  # there are further rows of ours
            hbn = {"hbn-lam": 0.002, "hbn-stat-samples": 64} if (variant, cell.config.method) == ("authors", "hbn") else {}
            assert differing(cell, setting.expected({"partition-parameter": 0.6, **cell.axes}) | own | hbn) == {}, cell.config.name


@listed(
    ("name", "rates"),
    [
        ("000-F3", {1: 0.02, 320: 0.02, 321: 0.002, 480: 0.002, 481: 0.0002, 640: 0.0002}),  # l. 217
        ("003-F3", {1: 0.1, 1000: 0.1, 1001: 0.05, 2000: 0.05, 2001: 0.033, 3000: 0.033}),  # l. 304
        ("004-T1", {1: 0.5, 6000: 0.5, 6001: 0.05, 8000: 0.05, 8001: 0.005, 10000: 0.005}),  # l. 466
    ],
)
def test_the_rates_and_phases_are_the_paper_s(name: str, rates: dict[int, float]) -> None:
    """FixBN freezes after half of the rounds, and the rate goes on by the paper's calendar."""
    for cell in cells(name):
        config, method = cell.config, cell.config.build_method()
        assert {n: method.learning_rate(config.schedule(), n, config.rounds) for n in rates} == pytest.approx(rates)
        if config.method == "fixbn":
            assert [method.phase(config.rounds // 2 + n, config.rounds) for n in (0, 1)] == [Phase.TRAIN, Phase.FROZEN]
