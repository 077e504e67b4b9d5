"""Options are declared once: the places where they are read agree, and a package of one's own adds some by one file and one line each."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_bn import options
from fl_bn.cli.main import app
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.flower import FBNStrategy, FedTAN2Strategy, HBNStrategy, Rounds, run_in_process
from fl_bn.methods import METHODS, Method, Refresh
from fl_bn.objectives import OBJECTIVES
from fl_bn.options import Options, keys_of, option, options_by_key, range_of, takes
from fl_bn.run.assembly import dataset, source_model
from fl_bn.run.config import REGISTRIES, ConfigError, RunConfig
from fl_bn.run.keys import defaults, table
from tests.extension.package import installed
from tests.integration.runs import TINY
from tests.listed import listed

ROOT = Path(__file__).parents[2]
EVERYONE = [(key, name) for key, registry in REGISTRIES.items() for name in registry]
OWN = {"halves": METHODS, "pull": OBJECTIVES, "halfway": SERVER_OPTIMIZERS}


# One declaration


def comparable(value: Any) -> Any:
    """A method, objective or server optimiser as values."""
    if isinstance(value, partial):
        return value.func, [comparable(part) for part in value.args], value.keywords
    if isinstance(value, Method):
        return [comparable(getattr(value, spec.name)) for spec in fields(value)]
    if not hasattr(value, "step"):
        return value
    weights, steps = {"w": torch.ones(3, dtype=torch.float64)}, []
    for _ in range(3):
        weights = value.step(weights, {"w": weights["w"] ** 2})
        steps.append(weights["w"].tolist() + value.lookahead(weights).get("w", torch.zeros(0)).tolist())
    return steps


def made(config: RunConfig) -> dict[str, Any]:
    return {"method": config.build_method(), "objective": config.build_objective(), "server-optimizer": config.build_server_optimizer()}


@listed(("key", "name"), EVERYONE)
def test_a_run_config_without_options_makes_what_the_constructor_makes_without_arguments(key: str, name: str) -> None:
    alone = {"momentum": 0.0} if name == "scaffold" else {}
    config = RunConfig.from_mapping({key: name, **alone})
    alone_made = REGISTRIES[key][name]()  # type: ignore[operator]
    assert comparable(made(config)[key]) == comparable(alone_made.bounded() if key == "method" else alone_made)  # a run clips


@listed(("key", "name"), EVERYONE)
def test_the_signature_is_the_options_class(key: str, name: str) -> None:
    constructor = REGISTRIES[key][name]
    said = {field: option.default for field, option in options_by_key(constructor).values()}
    taken = inspect.signature(constructor).parameters  # type: ignore[arg-type]
    assert {field: taken[field].default for field in taken} == said


@listed(("key", "name"), EVERYONE)
def test_a_value_in_the_run_config_reaches_what_is_made_and_one_out_of_range_reaches_nothing(key: str, name: str) -> None:
    for of, (field, declared) in options_by_key(REGISTRIES[key][name]).items():
        found = RunConfig.keys()[of]
        assert found.shown.endswith(declared.as_key(of).shown)
        assert RunConfig()[of] == found.default == declared.as_key(of).default
        if declared.unset is not None:
            assert comparable(REGISTRIES[key][name](**{field: None})) == comparable(REGISTRIES[key][name]())  # type: ignore[operator]
        for wrong in ("no such name", -0.5, float("nan"), None):
            if wrong is not None or (declared.default is not None and declared.unset is None):
                with pytest.raises(ValueError, match=f"{field} must be .*, but got"):
                    REGISTRIES[key][name](**{field: wrong})  # type: ignore[operator]
            with pytest.raises(ConfigError, match=f"{of} must be .*, but got"):
                RunConfig.from_mapping({of: wrong})


def test_pyproject_and_the_page_are_generated() -> None:
    assert f"[tool.flwr.app.config]\n{defaults(RunConfig.keys())}\n\n" in (ROOT / "pyproject.toml").read_text(), "fl-bn config --toml"
    assert (ROOT / "docs" / "config.md").read_text().endswith(table(RunConfig.keys()) + "\n"), "fl-bn config"
    assert CliRunner().invoke(app, ["config", "--toml"]).output == defaults(RunConfig.keys()) + "\n"


@dataclass(frozen=True)
class One(Options):
    name: ClassVar[str] = "one"
    share: float = option(0.5, "share", "(0, 1]", key="share")


@dataclass(frozen=True)
class Two(One):
    name: ClassVar[str] = "two"
    share: float = option(0.25, "share", "(0, 1]", key="share")


def test_places_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: one key with two defaults, and a default that the documents do not have."""
    one, two = takes(One)(lambda given: given.share), takes(Two)(lambda given: given.share)
    assert (one(), two(), one(0.75)) == (0.5, 0.25, 0.75)
    with pytest.raises(ValueError, match=r"'share' is declared twice.*: 0.5 of \(0, 1\] and 0.25 of \(0, 1\]"):
        keys_of({"one": one, "two": two})
    monkeypatch.setitem(METHODS, "one", one)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        test_pyproject_and_the_page_are_generated()
    monkeypatch.setitem(METHODS, "two", two)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'share' is declared twice"):
        RunConfig()


@dataclass(frozen=True)
class Elsewhere(Options):
    name: ClassVar[str] = "elsewhere"
    fraction: float = option(0.5, "of something else", "(0, 1]", key="fraction")


def test_a_general_key_is_not_declared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "elsewhere", takes(Elsewhere)(lambda given: METHODS["fbn"]()))
    with pytest.raises(ConfigError, match="'fraction' is declared twice"):
        RunConfig()


def test_what_is_entered_late_has_keys_in_configs_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RunConfig()
    with pytest.raises(KeyError, match="unknown config key 'share'"):
        before["share"]
    monkeypatch.setitem(METHODS, "one", takes(One)(lambda given: METHODS["fbn"]()))
    assert before["share"] == before.share == 0.5  # type: ignore[attr-defined]
    assert RunConfig.from_mapping({"method": "one", "share": 1})["share"] == 1.0
    with pytest.raises(ConfigError, match="share=1 has no effect with method='fbn': it counts only with method='one'"):
        RunConfig.from_mapping({"share": 1})
    assert before.to_mapping()["share"] == 0.5
    with pytest.raises(AttributeError, match="unknown config key 'hbn-lamb': did you mean 'hbn-lam'"):
        before.hbn_lamb  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (">= 1", [1, 1.5, 3e38], [0.9, -1, np.inf, np.nan]),
        ("> 0", [1e-300, 2], [0, -1]),
        ("0..9", [0, 9, 4.5], [-0.1, 9.1]),
        ("(0, 1]", [1, 0.1], [0, 1.1]),
        ("[0, 1)", [0, 0.9], [1, -0.1]),
        ("(-2, 1e-6)", [0, -1.9], [-2, 1e-6]),
        ("0 or >= 2", [0, 2, 7], [1, -1]),
    ],
)
def test_ranges(text: str, inside: list[float], outside: list[float]) -> None:
    assert [value for value in [*inside, *outside] if range_of(text)(value)] == inside


def test_the_example_of_the_module_runs() -> None:
    assert doctest.testmod(options) == (0, 10)


@pytest.mark.parametrize("text", ["", "positive", ">=1", "0-9", "(0, 1", ">= x", "1 or"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="a range must be like"):
        range_of(text)


@listed(
    ("values", "told"),
    [
        ({"method": "fedbm"}, "method must be one of .*, but got 'fedbm': did you mean 'fedbn'?"),
        ({"objective": "scafold"}, "objective must be one of .*: did you mean 'scaffold'?"),
        ({"server-optimizer": "adam"}, "server-optimizer must be one of .*: did you mean 'fedadam'?"),
        ({"partition": "dirichlett"}, "partition must be one of .*: did you mean 'dirichlet'?"),
        ({"attack": "signflip"}, "attack must be one of .*: did you mean 'sign-flip'?"),
        (
            {"shifts": "noise, invrt"},
            "shifts must be none, invert, .*, separated by commas, but got 'noise, invrt': did you mean 'invert'?",
        ),
        ({"diagnostics": "drifts"}, "diagnostics must be training-loss, drift, .*: did you mean 'drift'?"),
        ({"update-rule": "nnm+medain"}, r"update-rule must be mean, .*but got 'nnm\+medain': did you mean 'nnm\+median'?"),
        ({"hbn-evaluate": "exakt"}, "hbn-evaluate must be one of .*: did you mean 'exact'?"),
        ({"freeze-afer": 3}, "unknown config key 'freeze-afer': did you mean 'freeze-after'?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RunConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("what", "name", "near"), [("model", "resnet81", "resnet18"), ("model", "digit-cnn", "digits-cnn"), ("dataset", "cifar-10", "cifar10")]
)
def test_a_misspelt_model_or_data_set_is_answered_with_the_nearest(what: str, name: str, near: str) -> None:
    config = RunConfig.from_mapping({what: name})
    with pytest.raises(ValueError, match=f"{what} must be one of .*, but got '{name}': did you mean '{near}'?"):
        source_model(config) if what == "model" else dataset(config)


def test_strategies_take_the_options_of_their_methods() -> None:
    model, rounds = torch.nn.BatchNorm1d(2), Rounds(4, fraction=0.5)
    made = HBNStrategy(model, rounds, lam=0.5, lower_layers="shared", evaluate_with="exact", save_clients="x")
    assert (made.method.refresh, made.method.statistics_pass.lower_layers, made.save_clients) == (Refresh.EXACT, "shared", "x")
    assert comparable(HBNStrategy(model, rounds).method) == comparable(METHODS["hbn"](fraction=0.5))
    assert comparable(HBNStrategy(model, rounds).method) != comparable(METHODS["hbn"]())  # control
    assert comparable(FedTAN2Strategy(model, rounds, freeze_after=2).method) == comparable(METHODS["fedtan2"](2, "merged"))
    with pytest.raises(TypeError, match="lamb"):
        HBNStrategy(model, rounds, lamb=0.5)
    with pytest.raises(ValueError, match=r"fbn's momentum must be in \(0, 1\], but got 2"):
        FBNStrategy(model, rounds, momentum=2)


# A package of one's own


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package: a file for each of ``OWN``, and a line for each in its entry points."""
    modules = {name: (ROOT / "tests" / "extension" / f"{name}.py").read_text() for name in OWN}
    with installed(tmp_path / "site", modules, monkeypatch):
        yield tmp_path / "site"


def weights(tmp_path: Path, name: str, **keys: Any) -> dict[str, torch.Tensor]:
    """The network after a short run."""
    own = {key.replace("_", "-"): value for key, value in keys.items()}
    values = RunConfig.from_mapping({**TINY, "rounds": 2, "output": str(tmp_path), "name": name, **own}).to_mapping()
    folder = run_in_process(values)
    assert folder is not None
    text = (folder / "config.toml").read_text()
    assert all(f"{key} = " in text for key in own)
    return load_file(folder / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_method_of_ones_own(package: Path, tmp_path: Path) -> None:
    ran = weights(tmp_path, "a", method="halves", halves_weight=0.3, halves_report="pass")
    assert equal(ran, weights(tmp_path, "b", method="fbn", fbn_momentum=0.3, fbn_report="pass"))
    assert not equal(ran, weights(tmp_path, "c", method="halves", halves_report="pass"))  # controls: its own defaults
    assert not equal(ran, weights(tmp_path, "d", method="halves", halves_weight=0.3))


def test_an_objective_of_ones_own(package: Path, tmp_path: Path) -> None:
    ran = weights(tmp_path, "a", method="fedavg", objective="pull", pull_strength=5.0)
    theirs = weights(tmp_path, "b", method="fedavg", objective="fedprox", fedprox_mu=5.0)
    weak = weights(tmp_path, "c", method="fedavg", objective="pull")  # control
    assert all(torch.allclose(ran[name], theirs[name], rtol=1e-4, atol=1e-6) for name in ran)
    assert not all(torch.allclose(weak[name], theirs[name], rtol=1e-4, atol=1e-6) for name in ran)


def test_a_server_optimizer_of_ones_own(package: Path, tmp_path: Path) -> None:
    ran = weights(tmp_path, "a", method="fedavg", server_optimizer="halfway", halfway_share=0.25, halfway_momentum=0.5)
    same = {"server_optimizer": "fedavgm", "server_learning_rate": 0.25, "server_momentum": 0.5}
    assert equal(ran, weights(tmp_path, "b", method="fedavg", **same))
    assert not equal(ran, weights(tmp_path, "c", method="fedavg", server_optimizer="halfway"))  # control


def test_its_keys_are_everywhere(package: Path) -> None:
    keys = RunConfig.keys()
    assert [name for name in keys if name.split("-")[0] in OWN] == [
        *("halves-weight", "halves-report", "pull-strength", "pull-kind", "halfway-share", "halfway-momentum")
    ]
    page = CliRunner().invoke(app, ["config"]).output
    assert "| `halves-weight` | `0.5` | (0, 1] | halves: weight of a round's pooled moments (h in the paper) |" in page
    assert 'pull-kind = "linear"\n' in CliRunner().invoke(app, ["config", "--toml"]).output
    assert RunConfig()["halfway-share"] == 0.5
    for values, told in (
        ({"halves-weigth": 1.0}, "unknown config key 'halves-weigth': did you mean 'halves-weight'?"),
        ({"method": "halvs"}, "method must be one of .*, but got 'halvs': did you mean 'halves'?"),
        ({"halves-weight": 0.0}, r"halves-weight must be in \(0, 1\], but got 0.0"),
        ({"pull-kind": "lineer"}, "pull-kind must be one of linear, but got 'lineer': did you mean 'linear'?"),
    ):
        with pytest.raises(ConfigError, match=told):
            RunConfig.from_mapping(values)
    assert "halves" in CliRunner().invoke(app, ["layers", "resnet20", "--method", "halves"]).output


def test_a_new_process_knows_it(package: Path) -> None:
    path = os.pathsep.join([str(package), str(ROOT)])
    asked = [sys.executable, "-m", "fl_bn.cli.main", "config", "--toml"]
    said = subprocess.run(asked, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "halves-weight = 0.5\n" in said
    assert "halfway-momentum = 0.0\n" in said


def test_one_that_cannot_be_imported_is_named(package: Path) -> None:
    (package / "own_package" / "pull.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="the installed package own-package .* own_package.pull.* ModuleNotFoundError: .*no_such_module"):
        RunConfig()
    result = CliRunner().invoke(app, ["config"])
    assert result.exit_code == 2
    assert "own_package.pull" in " ".join(result.output.split())


def test_without_it_there_are_none_of_its_keys() -> None:
    """Control, and that the package above has left nothing behind."""
    assert [name for name in RunConfig.keys() if name.split("-")[0] in OWN] == []  # noqa: SIM118
