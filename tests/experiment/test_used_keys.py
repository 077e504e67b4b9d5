"""A key that the run ignores is refused: when, in which words, and what stays as it was for runs of before."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.methods import METHODS
from fl_bn.run import config as config_module
from fl_bn.run.assembly import partitions
from fl_bn.run.checkpoints import run_to_resume
from fl_bn.run.config import REGISTRIES, ConfigError, RunConfig
from fl_bn.run.resume import config_to_resume
from fl_bn.run.run_keys import general_options
from fl_bn.run.used import HasNoEffect, conditions
from fl_bn.sweep.attack_grid import Grid, grid_sweep
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.compare import Variant, comparison
from fl_bn.sweep.file import Sweep, parse
from tests.experiment.resuming import Values, small_run, stopped
from tests.experiment.small_data import small_config
from tests.listed import listed

SITES = {"dataset": "sites", "classes": 2, "channels": 1, "image-size": 4}
SECURE = {"secure-aggregation": True}
NOISY = {**SECURE, "client-weights": "uniform", "dp-noise": 1.0}
UNDER_ATTACK = {"byzantine": 2, "attack": "foe"}

# A key with a value, keys with which the run ignores it, and keys with which it does not.
CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("groups", 4, {"method": "fbn"}, {"method": "gn"}),
    ("groups", 4, {"method": "ln"}, {"method": "gn-ws"}),
    ("freeze-what", "both", {"method": "fedavg", "freeze-after": 5}, {"method": "fixbn"}),
    ("hbn-stat-samples", 8, {"method": "fbn"}, {"method": "hbn"}),
    ("fbn-momentum", 0.1, {"method": "fedavg"}, {"method": "fbn"}),
    ("tracking", 0.1, {"method": "hbn", "hbn-lam": 0.5}, {"method": "hbn"}),
    ("tracking", 0.1, {"method": "fbn", "fbn-momentum": 0.5}, {"method": "fbn"}),
    ("tracking", 0.1, {"method": "fixbn"}, {"method": "fbn"}),
    ("fedtan-schedule", "paper", {"method": "fedavg"}, {"method": "fedavg-alg2"}),
    ("freeze-after", 100, {"method": "fedavg"}, {"method": "fixbn"}),
    ("freeze-after", 9, {"method": "fedavg", "rounds": 9}, {"method": "fedavg", "rounds": 10}),
    ("frozen-rate", 0.5, {"method": "fedavg"}, {"method": "fedavg", "freeze-after": 5}),
    ("frozen-rate", 0.5, {"method": "fedavg", "freeze-after": 0}, {"method": "fedtan2"}),
    ("model-stem", "imagenet", {"model": "resnet20"}, {"model": "resnet18"}),
    ("classes", 2, {}, SITES),
    ("data-path", "x", SITES, {"dataset": "npz"}),
    ("shifts", "invert", SITES, {}),
    ("samples-per-domain", 9, SITES, {}),
    ("samples-share", 0.5, SITES, {}),
    ("test-on", "all", {"partition": "iid"}, {"partition": "natural"}),
    ("partition", "iid", SITES, {}),
    ("sizes", "equal", SITES, {}),
    ("partition-parameter", 2.0, {"partition": "iid"}, {"partition": "classes"}),
    ("partition-parameter", 0.1, {"partition": "domain"}, {"partition": "dirichlet"}),
    ("partition-parameter", 0.1, {"partition": "natural"}, {"partition": "similarity"}),
    ("share-drift", True, {"method": "fedavg"}, {"method": "silobn"}),
    ("share-drift", True, {"method": "silobn", "secure-aggregation": True}, {"method": "fedbn"}),
    ("unseen-client", True, {"method": "fbn"}, {"method": "fedbn"}),
    ("recalibration", "passes", {"method": "fedavg"}, {"method": "fbn"}),
    ("recalibration", "passes", {"method": "hbn", **SECURE}, {"method": "fedavg", "calibrate": -1}),
    ("recalibration-memory", 2.0, {"method": "fbn", "recalibration": "passes"}, {"method": "static-bn"}),
    ("unit-scale", False, {"method": "fedavg"}, {"method": "fedavg", "freeze-after": 0}),
    ("unit-scale", False, {"method": "hbn", "calibrate": 0}, {"method": "hbn"}),
    ("exchange", "local", {"method": "fedavg"}, {"method": "fedtan"}),
    ("exchange", "replay", {"method": "gn"}, {"method": "fedavg", "calibrate": -1}),
    ("exchange-policy", "shrink", {"method": "fbn"}, {"method": "fedtan"}),
    ("exchange-timeout", 5.0, {"method": "fedbn"}, {"method": "hbn"}),
    ("exchange-join-timeout", 5.0, {"method": "hbn", "recalibration": "passes"}, {"method": "hbn", "hbn-evaluate": "exact"}),
    ("exchange-port", 9, {"method": "fedtan", "exchange": "replay"}, {"method": "fedtan", "exchange": "grpc"}),
    ("exchange-host", "localhost", {"method": "fbn", **UNDER_ATTACK}, {"method": "fbn"}),
    ("exchange-bind", "127.0.0.1", {"method": "fedavg"}, {"method": "fedtan"}),
    ("exchange-insecure", True, {"method": "fedavg"}, {"method": "fedtan"}),
    ("attack", "foe", {}, {"byzantine": 1}),
    ("client-weights", "data", {"byzantine": 1}, {}),
    ("client-weights", "data", {"update-rule": "median"}, {"update-rule": "mean"}),
    ("attack-on", "updates", {"byzantine": 1}, UNDER_ATTACK),
    ("attack-on", "updates", {"byzantine": 1, "attack": "label-flip"}, {"byzantine": 1, "attack": "nan"}),
    ("attack-on", "statistics", {**UNDER_ATTACK, "method": "gn"}, {**UNDER_ATTACK, "method": "static-bn"}),
    ("attack-on", "statistics", {**UNDER_ATTACK, "method": "fedbn"}, {**UNDER_ATTACK, "method": "fedavg"}),
    ("statistics-rule", "median", {"method": "gn"}, {"method": "static-bn"}),
    ("statistics-rule", "median", {"method": "silobn"}, {"method": "fbn"}),
    ("update-rule", "median", {"method": "single"}, {"method": "fedbn"}),
    ("server-optimizer", "fedadam", {"method": "single"}, {"method": "fedbn"}),
    ("payload-dtype", "float16", {"method": "single"}, {"method": "fedbn"}),
    ("keep-best", True, {"method": "single"}, {"method": "fedbn"}),
    ("attack-strength", 2.0, {"byzantine": 1}, UNDER_ATTACK),
    ("attack-strength", 2.0, {"byzantine": 1, "attack": "sign-flip"}, {"byzantine": 1, "attack": "mimic"}),
    ("attack-strength", 2.0, {"byzantine": 1, "attack": "foe-optimised"}, {"byzantine": 1, "attack": "alie"}),
    ("secagg-shares", 5, {}, SECURE),
    ("secagg-threshold", 7, {}, SECURE),
    ("secagg-clipping-range", 4.0, {}, SECURE),
    ("secagg-quantization-range", 20, {}, SECURE),
    ("dp-noise", 1.0, {"client-weights": "uniform"}, {"client-weights": "uniform", **SECURE}),
    ("dp-clip", 2.0, SECURE, NOISY),
    ("dp-statistics-clip", 2.0, SECURE, NOISY),
    ("dp-delta", 1e-6, {}, NOISY),
    ("learning-rate-decay", 0.1, {}, {"learning-rate-schedule": "step"}),
    ("learning-rate-decay", 0.1, {"learning-rate-schedule": "constant"}, {"learning-rate-schedule": "exponential"}),
    ("learning-rate-milestones", "0.5:0.1", {}, {"learning-rate-schedule": "milestones"}),
    ("clip-limit", 2.0, {}, {"clip": "norm"}),
    ("clip-limit", 2.0, {"clip": "none"}, {"clip": "adaptive"}),
    ("fedprox-mu", 0.1, {}, {"objective": "fedprox"}),
    ("scaffold-option", 1, {}, {"objective": "scaffold", "momentum": 0.0, "clip": "none", "method": "fedavg"}),
    ("moon-temperature", 0.1, {"objective": "fedprox"}, {"objective": "moon"}),
    ("fedsam-rho", 0.1, {}, {"objective": "fedsam"}),
    ("server-adaptivity", 0.1, {"server-optimizer": "fedavgm"}, {"server-optimizer": "fedadagrad"}),
    ("server-beta2", 0.9, {"server-optimizer": "fedadagrad"}, {"server-optimizer": "fedyogi"}),
    ("evaluate-on", "training", {"validation-share": 0.1}, {}),
    ("name", "mine", {"output": ""}, {}),
    ("keep-best", True, {"output": ""}, {}),
    ("local-evaluation", True, {"secure-aggregation": True}, {}),
]
BY_CERTIFICATE = {"exchange-certificate", "exchange-key", "exchange-authority"}  # all three or none: a test of their own


def named(case: tuple[Any, ...]) -> str:
    return f"{case[0]}-{'-'.join(map(str, case[2].values()))}"


@listed(("key", "value", "ignored", "used"), CASES, ids=map(named, CASES))
def test_a_key_is_refused_where_the_run_ignores_it_and_only_there(
    key: str, value: Any, ignored: dict[str, Any], used: dict[str, Any]
) -> None:
    with pytest.raises(HasNoEffect) as told:
        RunConfig.from_mapping({**ignored, key: value})
    assert list(told.value.by_key) == [key]
    assert str(told.value).startswith(f"{key}=")
    assert f"Leave {key} out, or change " in str(told.value)
    by_value = key in ("freeze-after", "attack-on")  # the value decides whether they count
    assert by_value or key in RunConfig.from_mapping(ignored).without_effect
    made = RunConfig.from_mapping({key: value, **used})
    assert key not in made.without_effect


def test_every_key_with_a_condition_has_a_case() -> None:
    of_registries = set(RunConfig.keys()) - set(general_options())
    conditioned = of_registries | set(conditions(RunConfig(), REGISTRIES, general_options()))
    of_one_condition = {"channels": "classes", "columns-digest": "classes"}
    of_one_condition |= {"fbn-report": "fbn-momentum", "scaffold-strength": "scaffold-option"}
    of_one_condition |= {"moon-mu": "moon-temperature", "fedtan-momentum": "fedtan-schedule"}
    of_one_condition |= dict.fromkeys((key for key in of_registries if key.startswith("hbn-")), "hbn-stat-samples")
    del of_one_condition["hbn-stat-samples"]
    everyone = {"server-learning-rate", "server-momentum"}  # every server optimiser has them
    tried = {key for key, *_ in CASES}
    assert set(of_one_condition.values()) <= tried
    assert conditioned == tried | BY_CERTIFICATE | set(of_one_condition) | everyone


def test_the_files_of_a_certificate_count_where_there_is_an_exchange() -> None:
    files = dict.fromkeys(BY_CERTIFICATE, "x.pem")
    with pytest.raises(HasNoEffect) as told:
        RunConfig.from_mapping({"method": "fedavg", **files})
    assert set(told.value.by_key) == BY_CERTIFICATE
    assert RunConfig.from_mapping({"method": "fedtan", **files}).without_effect.isdisjoint(BY_CERTIFICATE)


def test_the_sentence_says_what_is_ignored_why_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as told:
        RunConfig.from_mapping({"learning-rate-decay": 0.1})
    assert str(told.value) == (
        "learning-rate-decay=0.1 has no effect with learning-rate-schedule='cosine': it counts only with learning-rate-schedule='step' or "
        "'exponential'. Leave learning-rate-decay out, or change learning-rate-schedule"
    )


def test_of_several_conditions_the_one_that_is_not_met_is_named() -> None:
    with pytest.raises(HasNoEffect, match=r"dp-clip=2 has no effect with dp-noise=0: it counts only with dp-noise > 0\. Leave"):
        RunConfig.from_mapping({**SECURE, "dp-clip": 2.0})
    with pytest.raises(HasNoEffect, match="dp-clip=2 has no effect with secure-aggregation=false: it counts only with secure-a"):
        RunConfig.from_mapping({"dp-clip": 2.0})


@listed("method", METHODS)
def test_a_default_is_never_refused(method: str) -> None:
    """Flower passes every key of pyproject.toml to a run."""
    everything = {key: spec.default for key, spec in RunConfig.keys().items()}
    assert RunConfig.from_mapping({**everything, "method": method}) == RunConfig(method=method)


def test_what_is_refused_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken as it is, an ignored key changes nothing that a run is made of."""
    monkeypatch.setattr(config_module, "check_used", lambda *arguments: None)
    own = {**small_config(tmp_path), "partition": "iid", "rounds": 10}
    plain = RunConfig.from_mapping(own)
    ignored = {"learning-rate-decay": 0.1, "secagg-shares": 5, "partition-parameter": 2.0, "attack": "foe", "groups": 4}
    made = RunConfig.from_mapping({**own, **ignored})
    assert {*ignored} <= made.without_effect
    for one, other in zip(partitions(plain), partitions(made), strict=True):
        assert one.tolist() == other.tolist()
    assert made.local_training() == plain.local_training()
    assert made.secure() is plain.secure() is None
    assert made.build_method().adversary is None
    assert [made.schedule()(round, 10) for round in range(1, 11)] == [plain.schedule()(round, 10) for round in range(1, 11)]
    stepped = RunConfig.from_mapping({**own, **ignored, "learning-rate-schedule": "step"})  # control
    assert stepped.schedule()(9, 10) != RunConfig.from_mapping({**own, "learning-rate-schedule": "step"}).schedule()(9, 10)


def test_a_door_for_people_says_it(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["run", "--run-config", f"output='{tmp_path}' method='fbn' groups=4"])
    assert said.exit_code != 0
    assert "groups=4 has no effect with method='fbn'" in " ".join(said.output.split())


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


def test_a_run_of_a_sweep_leaves_out_what_it_ignores(tmp_path: Path) -> None:
    groups = {cell.config.method: cell.config["groups"] for cell in sweep().cells(tmp_path)}
    assert groups == {"fedavg": RunConfig()["groups"], "gn": 4}


def test_a_key_that_no_run_of_a_sweep_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="groups=4 has no effect with method='fedavg'"):
        sweep(SWEEP.replace('"GN" = { method = "gn" }', "")).cells(tmp_path)
    with pytest.raises(ConfigError, match=r"clip-limit=2 has no effect with clip='auto'"):
        sweep(**{"clip-limit": 2.0}).cells(tmp_path)
    sweep(**{"clip-limit": 2.0, "clip": "norm"}).cells(tmp_path)  # control


def test_a_variant_must_use_its_own_keys_and_not_all_of_the_files(tmp_path: Path) -> None:
    (small,) = sweep(variant="small").cells(tmp_path)
    assert small.config["groups"] == RunConfig()["groups"]
    with pytest.raises(ConfigError, match="fbn-momentum=0.5 has no effect with method='fixbn'"):
        sweep(variant="other").cells(tmp_path)


def test_the_methods_of_a_comparison_leave_out_what_they_ignore(tmp_path: Path) -> None:
    base = {"groups": 4, "rounds": 2}
    cells = comparison([Variant.parse("fbn"), Variant.parse("gn")], [0], base, "").cells(tmp_path)
    assert [cell.config["groups"] for cell in cells] == [RunConfig()["groups"], 4]
    with pytest.raises(ConfigError, match="groups=4 has no effect"):
        comparison([Variant.parse("fbn"), Variant.parse("fedavg")], [0], base, "").cells(tmp_path)
    with pytest.raises(ConfigError, match="groups=8 has no effect"):
        comparison([Variant.parse("fbn:groups=8"), Variant.parse("gn")], [0], base, "").cells(tmp_path)


def test_an_axis_of_the_attack_grid_must_count(tmp_path: Path) -> None:
    settings = Grid(["fbn"], [0.1], [2], ["mean"], ["foe"]).settings()
    grid_sweep(settings, [0], {}, "").cells(tmp_path)  # control
    with pytest.raises(ConfigError, match="partition-parameter=0.1 has no effect with partition='iid'"):
        grid_sweep(settings, [0], {"partition": "iid"}, "").cells(tmp_path)


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
    with pytest.raises(ConfigError, match="partition was 'dirichlet', and is 'iid'"):
        run_to_resume(RunConfig.from_mapping({**values, "resume": "run"}))


def test_a_cell_that_ran_with_an_ignored_key_is_not_run_again(tmp_path: Path) -> None:
    cell = Cell(RunConfig.from_mapping({"output": str(tmp_path), "name": "a", "rounds": 1, "partition": "iid"}))
    cell.path.mkdir()
    (cell.path / "rounds.jsonl").write_text('{"round": 1}\n')
    cell.write_outcome("finished", 1.0)
    for text, same in (("learning-rate-decay = 0.1", True), ("learning-rate = 0.2", False)):
        (cell.path / "config.toml").write_text(f'rounds = 1\npartition = "iid"\n{text}\n')
        if same:
            assert cell.finished()
        else:
            with pytest.raises(ConfigError, match="learning-rate is 0.2 there"):
                cell.finished()
