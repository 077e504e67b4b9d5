"""Every file of papers 000 (FixBN) and 001 (FedBN), as the paper has it, beside a table of the papers' settings written by hand.

What no row of a table names must have the default: so a file cannot set a key that the paper does not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import FOLDER, find
from fl_bn.methods import Phase
from tests.listed import listed
from tests.sweeps.fedbn_settings import FEDBN_PAPER
from tests.sweeps.fixbn_settings import CIFAR, FIXBN_PAPER
from tests.sweeps.inner import Cell, RunConfig, read
from tests.sweeps.paper_setting import DEFAULTS, At, Keys, Setting

DECIDED = {"output", "name", "pictures", "setup"}  # by the sweep; the keys of the setup count
PAPERS = {**FIXBN_PAPER, **FEDBN_PAPER}
PROGRAMS = {"001-F1", "001-F2", "001-F9"}  # without a run config: tests/experiment has their settings
FREELY_CHOSEN = {"evaluate-every", "seed"}  # the papers do not say how often they test; seeds: below
RUNS = {"000-T4": 5, "000-FE": 5, "000-T1": 5, "000-TI": 5}  # FedTAN, section 6.1; of claims that are to be decided
USUAL = {"000": 3, "001": 5}  # FedBN, 5.1 and 5.2: five trials; FixBN does not say


@cache
def paper(name: str) -> list[Cell]:
    return read(FOLDER / f"{name}.toml", "paper", "data").cells(Path("nowhere"))


def expected(setting: Setting, at: At) -> Keys:
    """Return what the papers' table says of the run that stands at ``at``."""
    keys = dict(setting.keys)
    for axis, values in setting.by.items():
        keys |= values[str(at[axis])]
    return keys


def differing(config: Mapping[str, Any], wanted: Keys) -> dict[str, tuple[Any, Any]]:
    free = DECIDED | (FREELY_CHOSEN - wanted.keys())
    whole = {**DEFAULTS, **wanted}
    return {key: (value, whole[key]) for key, value in config.items() if key not in free and value != whole[key]}


def test_every_file_of_both_papers_is_here() -> None:
    names = {experiment.name for paper in ("000", "001") for experiment in find([paper])}
    assert names == PAPERS.keys() | PROGRAMS


@pytest.mark.slow
@listed("name", PAPERS)
def test_the_paper_s_variant_is_the_paper_key_by_key(name: str) -> None:
    setting, cells = PAPERS[name], paper(name)
    found = {cell.config.name: wrong for cell in cells if (wrong := differing(cell.config.to_mapping(), expected(setting, cell.axes)))}
    assert found == {}, setting.where
    methods = [(cell.config.build_method(), cell.config.rounds) for cell in cells if not cell.centralised]
    assert not any(method.centres(method.phase(at, rounds)) for method, rounds in methods for at in (1, rounds))  # the papers' gradients
    seeds = RUNS.get(name, USUAL[name[:3]])
    combinations: list[dict[str, str]] = [{}]
    for axis, values in setting.by.items():
        combinations = [{**at, axis: value} for at in combinations for value in values]
    there = {tuple(str(cell.axes[axis]) for axis in setting.by) for cell in cells}
    assert there == {tuple(at.values()) for at in combinations if not setting.without(at)}  # no more rows and columns, and no fewer
    assert len(cells) == seeds * len(there)


def test_another_value_of_any_key_is_seen() -> None:
    """Control of the test above."""
    (cell, *_), setting = paper("000-F3"), PAPERS["000-F3"]
    config, wanted = cell.config.to_mapping(), expected(PAPERS["000-F3"], cell.axes)
    assert differing(config, wanted) == {}
    for key, other in {"learning-rate-schedule": "cosine", "augment": "crop-flip", "standardise": "none", "unit-scale": False}.items():
        assert list(differing({**config, key: other}, wanted)) == [key]
    assert setting.by["method"]["FixBN"]["frozen-rate"] == 1.0


def test_the_budget_is_128_epochs_of_all_clients_and_rounds() -> None:
    """l. 218. One exception: E = 2,500 does not divide it."""
    for name in ("000-T1", "000-T5", "000-F1", "000-F2", "000-F3", "000-FD", "000-FG", "000-FH", "000-FI", "000-FJ", "000-FK"):
        for cell in paper(name):
            config = cell.config
            drawn = config.rounds * config.local_steps * config.batch_size * round(config.clients * config.fraction)
            assert drawn == (6_500_000 if config.local_steps == 2500 else 128 * 50_000), config.name
    for cell in paper("000-F3-TinyImageNet"):
        config = cell.config
        assert config.rounds * config.local_steps * config.batch_size * round(config.clients * config.fraction) == 128 * 100_000


def test_fixbn_freezes_at_half_just_when_the_rate_falls_tenfold() -> None:
    """l. 210-211 and l. 217. Control: under the schedule of before, a cosine, the rate is half there."""
    fixed = [cell.config for cell in paper("000-F3") if cell.axes["method"] == "FixBN"]
    assert len(fixed) == 15
    for config in fixed:
        method, rate = config.build_method(), config.schedule()
        assert [method.phase(n, 640) for n in (320, 321)] == [Phase.TRAIN, Phase.FROZEN]
        rates = [method.learning_rate(rate, n, 640) for n in (1, 320, 321, 480, 481, 640)]
        assert rates == pytest.approx([0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002])
        assert config.local_training().clip == "none"
    cosine = RunConfig.from_mapping({"method": "fixbn", "rounds": 640, "learning-rate": 0.02}).schedule()
    assert cosine(321, 640) == pytest.approx(0.01)


def test_the_decisive_run_is_the_paper_s_in_all_but_the_network() -> None:
    """Figure D has LeNet-CNN. A third of its rounds, and Table H's rows. Control: the variant of before differs in the calendar, too."""
    setting = PAPERS["000-F3"]
    more = {"FixBN, affine too": "statistics and affine", "FixBN, affine alone": "affine"}
    frozen = {row: PAPERS["000-TH"].by["method"][name] for row, name in more.items()}
    setting = replace(setting, by={**setting.by, "method": {**setting.by["method"], **frozen}})
    own = {"model": "lenet-cnn-bn", "dataset": "npz", "data-path": "data/cifar10_full.npz", "rounds": 216, "checkpoint-every": 36}
    cells = read(FOLDER / "000-F3.toml", "evidence", "data").cells(Path("nowhere"))
    for cell in cells:
        assert differing(cell.config.to_mapping(), {**expected(setting, cell.axes), **own}) == {}
    before = read(FOLDER / "000-FD.toml", "evidence", "data").cells(Path("nowhere"))[0].config
    assert "learning-rate-schedule" in differing(before.to_mapping(), {**CIFAR, "model": "lenet-cnn-bn"})
