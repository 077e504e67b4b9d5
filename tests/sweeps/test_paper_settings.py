"""Every file of the five papers has the paper's settings, key by key, beside tables that were made from the papers by hand.

What no row of a table names must have the default: so a file cannot set a key that the paper does not ask for.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import FOLDER, find
from fl_bn.methods import Phase
from tests.listed import listed
from tests.sweeps.fbn_settings import FBN_PAPER
from tests.sweeps.fedbn_settings import FEDBN_PAPER
from tests.sweeps.fedtan_settings import FEDTAN_PAPER
from tests.sweeps.fixbn_settings import FIXBN_PAPER
from tests.sweeps.hbn_settings import HBN_PAPER
from tests.sweeps.inner import Cell, read
from tests.sweeps.paper_setting import DEFAULTS, Keys

PAPERS = {**FIXBN_PAPER, **FEDBN_PAPER, **HBN_PAPER, **FBN_PAPER, **FEDTAN_PAPER}
PROGRAMS = {"001-F1", "001-F2", "001-F9", "003-F1", "003-F2"}  # without a run config: tests/experiment/test_studies.py
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


def test_every_file_has_its_table() -> None:
    assert {one.name for one in find() if one.name[:2] == "00"} == PAPERS.keys() | PROGRAMS


@pytest.mark.slow
@listed("name", PAPERS)
def test_the_paper_s_variant_is_the_paper_key_by_key(name: str) -> None:
    setting, found = PAPERS[name], cells(name)
    assert {cell.config.name: wrong for cell in found if (wrong := differing(cell, setting.expected(cell.axes)))} == {}, setting.where
    there = {tuple(str(cell.axes[axis]) for axis in setting.by) for cell in found}
    assert there == {*setting.combinations()}  # no more rows and columns, and no fewer
    assert len(found) == len(there) * setting.seeds == len(there) * len({cell.config.seed for cell in found})
    for cell in found:
        config, method = cell.config, cell.config.build_method()
        assert cell.centralised == (name[:3] in ("003", "004") and str(cell.axes.get("method")).startswith("centralised"))
        assert cell.centralised or not any(method.centres(method.phase(at, config.rounds)) for at in (1, config.rounds))  # as papers do


@listed(("key", "value"), [("learning-rate-schedule", "cosine"), ("augment", "none"), ("standardise", "none"), ("clip", "norm")])
def test_control_another_value_of_any_key_is_seen(key: str, value: str) -> None:
    for cell in cells("000-F3", **{key: value}):
        assert list(differing(cell, PAPERS["000-F3"].expected(cell.axes))) == [key]


# Other variants: the paper's keys in all but what is named here

OURS = {"memory-format": "channels-last", "dataset": "npz", "data-path": "data/cifar10_full.npz"}
THIRD = {**OURS, "rounds": 167, "checkpoint-every": 50}
LENET = {**OURS, "memory-format": "auto", "model": "lenet-cnn-bn", "rounds": 216, "checkpoint-every": 36}  # as in Figure D
SMALL = {**OURS, "data-path": "data/cifar10.npz", "rounds": 150}


@listed(
    ("name", "variant", "own"),
    [("000-F3", "evidence", LENET), ("002-T1", "third", THIRD), ("002-T3", "third", THIRD), ("002-T6", "evidence", SMALL)],
)
def test_a_smaller_variant_is_the_paper_s_in_all_but_size_and_data(name: str, variant: str, own: Keys) -> None:
    setting = PAPERS[name]
    for cell in cells(name, variant):
        if all(str(cell.axes.get(axis, "0.6")) in values for axis, values in setting.by.items()):  # there are further rows of ours
            assert differing(cell, setting.expected({"partition-parameter": 0.6, **cell.axes}) | own) == {}, cell.config.name


@listed("name", HBN_PAPER)
def test_the_authors_recipe_of_hbn_differs_where_it_says(name: str) -> None:
    """Every round is evaluated, the last batch left out, lambda is 0.002, and a pass over all samples takes 64 images."""
    found = cells(name, "authors")
    assert len(found) == len(cells(name))
    for cell in found:
        keys = HBN_PAPER[name].expected(cell.axes)
        own: Keys = {"drop-last": True, "evaluate-every": 1}
        if keys["method"] == "hbn":
            own |= {} if name == "002-F5" else {"hbn-lam": 0.002}  # whose axis it is
            own |= {"hbn-stat-samples": 64} if keys["hbn-stat-samples"] == 0 else {}
        assert differing(cell, keys | own) == {}, cell.config.name


# What the keys make


@listed(
    ("name", "at", "rates"),
    [
        ("000-F3", {"method": "FixBN"}, {1: 0.02, 320: 0.02, 321: 0.002, 480: 0.002, 481: 0.0002, 640: 0.0002}),  # l. 217
        ("003-F3", {}, {1: 0.1, 1000: 0.1, 1001: 0.05, 2000: 0.05, 2001: 0.033, 3000: 0.033}),  # l. 304
        ("004-T1", {}, {1: 0.5, 6000: 0.5, 6001: 0.05, 8000: 0.05, 8001: 0.005, 10000: 0.005}),  # l. 466
        ("004-F4", {}, {1: 0.5, 6000: 0.5, 6001: 0.05, 10000: 0.05}),
        ("004-F11", {"scheme": "M = 1,000"}, {1: 0.5, 1001: 0.01, 6000: 0.01, 6001: 0.001, 10000: 0.001}),  # l. 553
        ("004-F11", {"scheme": "M = 4,000, momentum"}, {4000: 0.5, 4001: 0.01, 6000: 0.01, 6001: 0.001, 8001: 0.0001}),
    ],
)
def test_the_rates_and_phases_are_the_paper_s(name: str, at: dict[str, str], rates: dict[int, float]) -> None:
    """FixBN freezes after half of the rounds, and the rate goes on by the paper's calendar."""
    for cell in cells(name):
        if at.items() <= cell.axes.items():
            config, method = cell.config, cell.config.build_method()
            assert {n: method.learning_rate(config.schedule(), n, config.rounds) for n in rates} == pytest.approx(rates)
            if config.method == "fixbn":
                assert [method.phase(config.rounds // 2 + n, config.rounds) for n in (0, 1)] == [Phase.TRAIN, Phase.FROZEN]
