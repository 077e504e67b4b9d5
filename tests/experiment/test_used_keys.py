"""A key that the run ignores is refused: when, by name, and what stays as it was for runs of before."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fl_bn.methods import METHODS
from fl_bn.options import options_by_key
from fl_bn.run import config as config_module
from fl_bn.run.checkpoints import config_to_resume, run_to_resume
from fl_bn.run.config import REGISTRIES
from fl_bn.run.former import IN_PAPERS
from fl_bn.run.run_keys import general_options
from fl_bn.run.used import HasNoEffect, conditions
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.compare import comparison
from fl_bn.sweep.file import Sweep, parse
from tests.experiment.inside import RunConfig, config, ends_with_a_sentence, partitions, refusing
from tests.experiment.resuming import Values, small_run, stopped
from tests.experiment.small_data import small_config
from tests.listed import listed

KEYS = RunConfig.keys()
GENERAL = general_options()
SITES = {"dataset": "sites", "classes": 2, "channels": 1, "image-size": 4}
SECURE = {"secure-aggregation": True}
NOISY = {**SECURE, "client-weights": "uniform", "dp-noise": 1.0}
UNDER_ATTACK = {"byzantine": 2, "attack": "foe"}

CONDITIONS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"freeze-after": 100}, {"method": "fedavg"}, {"method": "fixbn"}),
    ({"freeze-after": 9}, {"method": "fedavg", "rounds": 9}, {"method": "fedavg", "rounds": 10}),
    ({"frozen-rate": 0.5}, {"method": "fedavg"}, {"method": "fedavg", "freeze-after": 5}),
    ({"frozen-rate": 0.5}, {"method": "fedavg", "freeze-after": 0}, {"method": "fedtan2"}),
    ({"classes": 2}, {}, SITES),
    ({"data-path": "x"}, SITES, {"dataset": "npz"}),
    ({"partition": "iid", "sizes": "equal"}, SITES, {}),
    ({"test-on": "all"}, {"partition": "iid"}, {"partition": "natural"}),
    ({"partition-parameter": 2.0}, {"partition": "iid"}, {"partition": "classes"}),
    ({"partition-parameter": 0.1}, {"partition": "natural"}, {"partition": "similarity"}),
    ({"unseen-client": True}, {"method": "fbn"}, {"method": "fedbn"}),
    ({"recalibration": "passes"}, {"method": "fedavg"}, {"method": "fbn"}),
    ({"recalibration": "passes"}, {"method": "hbn", **SECURE}, {"method": "fedavg", "calibrate": -1}),
    ({"unit-scale": False}, {"method": "fedavg"}, {"method": "fedavg", "freeze-after": 0}),
    ({"unit-scale": False}, {"method": "hbn", "calibrate": 0}, {"method": "hbn"}),
    ({"exchange": "replay"}, {"method": "gn"}, {"method": "fedavg", "calibrate": -1}),
    ({"exchange": "local"}, {"method": "fbn", **UNDER_ATTACK}, {"method": "fbn"}),
    ({"exchange": "local"}, {"method": "fedavg"}, {"method": "fedtan"}),
    ({"attack": "foe"}, {}, {"byzantine": 1}),
    ({"client-weights": "data"}, {"byzantine": 1}, {}),
    ({"client-weights": "data"}, {"update-rule": "median"}, {"update-rule": "mean"}),
    ({"attack-on": "updates"}, {"byzantine": 1, "attack": "label-flip"}, {"byzantine": 1, "attack": "nan"}),
    ({"attack-on": "statistics"}, {**UNDER_ATTACK, "method": "gn"}, {**UNDER_ATTACK, "method": "static-bn"}),
    ({"attack-on": "statistics"}, {**UNDER_ATTACK, "method": "fedbn"}, {**UNDER_ATTACK, "method": "fedavg"}),
    ({"statistics-rule": "median"}, {"method": "gn"}, {"method": "static-bn"}),
    ({"statistics-rule": "median"}, {"method": "silobn"}, {"method": "fbn"}),
    ({"update-rule": "median", "server-optimizer": "fedadam"}, {"method": "single"}, {"method": "fedbn"}),
    ({"keep-best": True}, {"method": "single"}, {"method": "fedbn"}),
    ({"attack-strength": 2.0}, {"byzantine": 1}, UNDER_ATTACK),
    ({"attack-strength": 2.0}, {"byzantine": 1, "attack": "foe-optimised"}, {"byzantine": 1, "attack": "alie"}),
    ({"secagg-shares": 5}, {}, SECURE),
    ({"dp-noise": 1.0}, {"client-weights": "uniform"}, {"client-weights": "uniform", **SECURE}),
    ({"dp-clip": 2.0, "dp-statistics-clip": 2.0, "dp-delta": 1e-6}, SECURE, NOISY),
    ({"learning-rate-decay": 0.1}, {}, {"learning-rate-schedule": "step"}),
    ({"learning-rate-milestones": "0.5:0.1"}, {}, {"learning-rate-schedule": "milestones"}),
    ({"clip-limit": 2.0}, {}, {"clip": "norm"}),
    ({"clip-limit": 2.0}, {"clip": "none"}, {"clip": "adaptive"}),
    ({"name": "mine", "keep-best": True}, {"output": ""}, {}),
]
"""Keys with values, keys with which the run ignores them, and keys with which it does not."""
CASES = [(key, value, ignored, used) for keys, ignored, used in CONDITIONS for key, value in keys.items()]
WITH_ANOTHER = {"channels", "columns-digest", "evaluate-clients"}  # under the condition of ``classes``; asked by tests of the server
OWNERS = {
    key: (registry, [name for name, make in entries.items() if key in options_by_key(make)])
    for registry, entries in REGISTRIES.items()
    for make in entries.values()
    for key in options_by_key(make)
    if key not in GENERAL
}
"""Option of methods, objectives or server optimisers -> the key that chooses one, and the names of those that have the option."""
FITTING: dict[str, dict[str, Any]] = {
    "scaffold": {"momentum": 0.0, "clip": "none", "method": "fedavg"},
}
"""What an owner or an option needs beside it."""


@listed(("key", "value", "ignored", "used"), CASES, ids=lambda value: str(value) if not isinstance(value, dict) else [*value.values()])
def test_a_key_is_refused_where_the_run_ignores_it_and_only_there(
    key: str, value: Any, ignored: dict[str, Any], used: dict[str, Any]
) -> None:
    with refusing(f"{key}=", by=HasNoEffect) as told:
        config({**ignored, key: value})
    assert list(told.value.by_key) == [key]  # type: ignore[attr-defined]
    by_value = key in ("freeze-after", "attack-on")  # the value decides whether they count
    assert by_value or key in IN_PAPERS or key in config(ignored).without_effect
    assert key not in config({key: value, **used}).without_effect


@listed("key", [key for key, (chosen_by, owners) in OWNERS.items() if len(owners) < len(REGISTRIES[chosen_by])])
def test_an_option_counts_with_its_owners_alone(key: str) -> None:
    """Of every method, objective and server optimiser; one beside its owners is asked."""
    (chosen_by, owners), default = OWNERS[key], KEYS[key].default
    numbers = [not default] if isinstance(default, bool) else [] if isinstance(default, str) else [default + 3, default - 1, 0.25]
    near = numbers or [*KEYS[key].values]
    value = next(value for value in near if value != default and KEYS[key].allows(value) and type(value) is type(default))
    if stranger := next((name for name in REGISTRIES[chosen_by] if name not in (*owners, *FITTING, "fedavg", "none")), ""):
        with refusing(f"{key}=", chosen_by, by=HasNoEffect):
            config({key: value, chosen_by: stranger})
    for owner in owners:
        assert config({key: value, chosen_by: owner, **FITTING.get(owner, {}), **FITTING.get(key, {})})[key] == value


def test_a_key_of_a_setup_counts_with_the_owner_of_its_argument_alone() -> None:
    for key, value, stranger, owner in (("hbn-mixing", "half", "fedavg", "hbn"), ("freeze-what", "both", "fedavg", "fixbn")):
        with refusing(f"{key}=", "method", by=HasNoEffect):
            config({"method": stranger, key: value})
        argument = key.removeprefix("hbn-").replace("-", "_")
        assert config({"method": owner, key: value}).changes.arguments(METHODS[owner])[argument] == value


def test_every_key_with_a_condition_has_a_case() -> None:
    tried = {key for key, *_ in CASES} | OWNERS.keys()
    assert {*OWNERS, *conditions(RunConfig(), REGISTRIES, GENERAL)} == (tried - IN_PAPERS.keys()) | WITH_ANOTHER


def test_all_that_a_key_belongs_to_is_named(tmp_path: Path) -> None:
    with refusing("dp-clip=2", "dp-noise", by=HasNoEffect):
        config({**SECURE, "dp-clip": 2.0})
    with refusing("dp-clip=2", "secure-aggregation=true", by=HasNoEffect):
        config({"dp-clip": 2.0})
    ends_with_a_sentence("run", "--run-config", f"output='{tmp_path}' method='fbn' groups=4", about="groups=4")


@listed("method", METHODS)
def test_a_default_is_never_refused(method: str) -> None:
    """Flower passes every key of pyproject.toml to a run."""
    everything = {key: spec.default for key, spec in KEYS.items()}
    assert config({**everything, "method": method}) == config(method=method)


def test_what_is_refused_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken as it is, an ignored key changes nothing that a run is made of."""
    monkeypatch.setattr(config_module, "unused", lambda *arguments: {})
    own = {**small_config(tmp_path), "partition": "iid", "rounds": 10}
    ignored = {"learning-rate-decay": 0.1, "secagg-shares": 5, "partition-parameter": 2.0, "groups": 4}
    plain, made = config(own), config({**own, **ignored})
    assert [part.tolist() for part in partitions(plain)] == [part.tolist() for part in partitions(made)]
    assert made.local_training() == plain.local_training()
    assert made.secure() is plain.secure() is None
    assert made.schedule()(9, 10) == plain.schedule()(9, 10)
    stepped = {**own, "learning-rate-schedule": "step"}
    assert config({**stepped, **ignored}).schedule()(9, 10) != config(stepped).schedule()(9, 10), "control"
    monkeypatch.undo()
    assert {*ignored} <= made.without_effect


# Keys that several runs share


SWEEP = """
title = "t"
[run]
rounds = 4
groups = 4
[axes.method]
"BN" = { method = "fedavg" }
"GN" = { method = "gn" }
[variants.small.axes]
method = ["BN"]
[variants.other.run]
method = "fbn"
fbn-momentum = 0.5
[variants.other.axes.method]
"FixBN" = { method = "fixbn" }
"""


def sweep(text: str = SWEEP, variant: str = "", **overrides: Any) -> Sweep:
    return parse(tomllib.loads(text), "file", variant, "", overrides)


def compared(*variants: str, **base: Any) -> Sweep:
    return comparison(variants, [0], {"rounds": 2, **base}, "")


def test_a_run_of_several_leaves_out_what_it_ignores(tmp_path: Path) -> None:
    default = RunConfig()["groups"]
    assert {cell.config.method: cell.config["groups"] for cell in sweep().cells(tmp_path)} == {"fedavg": default, "gn": 4}
    assert [cell.config["groups"] for cell in sweep(variant="small").cells(tmp_path)] == [default]
    assert [cell.config["groups"] for cell in compared("fbn", "gn", groups=4).cells(tmp_path)] == [default, 4]
    sweep(**{"clip-limit": 2.0, "clip": "norm"}).cells(tmp_path)  # control of the next test


def test_a_key_that_none_of_several_runs_uses_is_refused(tmp_path: Path) -> None:
    for made, key in (
        (sweep(SWEEP.replace('"GN" = { method = "gn" }', "")), "groups=4"),
        (sweep(**{"clip-limit": 2.0}), "clip-limit=2"),
        (sweep(variant="other"), "fbn-momentum=0.5"),  # a variant must use its own keys
        (compared("fbn", "fedavg", groups=4), "groups=4"),
        (compared("fbn:groups=8", "gn"), "groups=8"),
    ):
        with refusing(key):
            made.cells(tmp_path)


# Runs of before


def test_a_run_that_was_made_with_an_ignored_key_goes_on(tmp_path: Path) -> None:
    values: Values = small_run(tmp_path / "runs", method="gn")
    path = stopped(values, 2)
    file = path / "config.toml"
    file.write_text(file.read_text().replace("partition-parameter = 1.0", "partition-parameter = 0.3"))
    assert "partition-parameter = 0.3" in file.read_text()
    assert run_to_resume(config_to_resume(path)) == path.resolve()
    file.write_text(file.read_text().replace('partition = "iid"', 'partition = "dirichlet"'))  # control: there it counts
    assert config_to_resume(path)["partition-parameter"] == 0.3
    with refusing("partition", "'dirichlet'", "'iid'"):
        run_to_resume(config({**values, "resume": "run"}))


def test_a_cell_that_ran_with_an_ignored_key_is_not_run_again(tmp_path: Path) -> None:
    cell = Cell(config({"output": str(tmp_path), "name": "a", "rounds": 1, "partition": "iid"}))
    cell.path.mkdir()
    (cell.path / "rounds.jsonl").write_text('{"round": 1}\n')
    cell.write_outcome("finished", 1.0)
    (cell.path / "config.toml").write_text('rounds = 1\npartition = "iid"\nlearning-rate-decay = 0.1\n')
    assert cell.finished()
    (cell.path / "config.toml").write_text('rounds = 1\npartition = "iid"\nlearning-rate = 0.2\n')
    with refusing("learning-rate"):
        cell.finished()
