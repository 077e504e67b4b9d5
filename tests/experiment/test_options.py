"""Options are declared once: the places where they are read agree, and a package of one's own adds some by one file and one line each."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_bn import options
from fl_bn.app.config import REGISTRIES
from fl_bn.flower import HBN, Rounds
from fl_bn.methods import METHODS, Method, Refresh
from fl_bn.options import options_by_key, range_of
from tests.experiment.inside import RunConfig, config, ends_with_a_sentence, kebab, refusing
from tests.extension.package import installed
from tests.integration.runs import tiny
from tests.listed import listed

ROOT = Path(__file__).parents[2]
BEFORE = RunConfig()  # made before a test installs a package
EVERYONE = [(key, name) for key, registry in REGISTRIES.items() for name in registry]


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
        before, weights = weights, {"w": weights["w"] ** 2}
        value.step(before, weights)
        steps.append(weights["w"].tolist() + value.lookahead(weights).get("w", torch.zeros(0)).tolist())
    return steps


@listed(("key", "name"), EVERYONE)
def test_the_constructor_its_signature_and_the_run_config_say_the_same(key: str, name: str) -> None:
    make, found = REGISTRIES[key][name], config({key: name, **({"momentum": 0.0} if name == "scaffold" else {})})
    made = {"method": found.build_method, "objective": found.build_objective, "server-optimizer": found.build_server_optimizer}[key]()
    alone = make()  # type: ignore[operator]
    neutral = comparable(alone)
    assert comparable(made) == (comparable(alone.bounded()) if key == "method" else neutral)  # a run clips
    taken = inspect.signature(make).parameters  # type: ignore[arg-type]
    said = {one.field: one.neutral for hidden in (False, True) for one in options_by_key(make, hidden).values()}
    assert {field: taken[field].default for field in taken} == said
    for of, declared in options_by_key(make).items():
        field = declared.field
        assert RunConfig()[of] == RunConfig.keys()[of].default == declared.default
        if declared.unset is not None:
            assert comparable(make(**{field: None})) == neutral  # type: ignore[operator]
        for wrong in ("no such name", -0.5, float("nan")):
            with refusing(field, by=ValueError):
                make(**{field: wrong})  # type: ignore[operator]


def test_the_example_of_the_module_runs_and_what_is_no_range_is_refused() -> None:
    assert doctest.testmod(options) == (0, 11)
    for text in ("", "positive", ">=1", "(0, 1"):
        with refusing(repr(text), by=ValueError):
            range_of(text)


def test_strategies_take_the_options_of_their_methods() -> None:
    model, rounds = torch.nn.BatchNorm1d(2), Rounds(4, fraction=0.5)
    made = HBN(model, rounds, lam=0.5, lower_layers="shared", evaluate="exact", save_clients="x").transport
    assert (made.method.refresh, made.method.statistics_pass.lower_layers, made.save_clients) == (Refresh.EXACT, "shared", "x")
    assert comparable(HBN(model, rounds).transport.method) == comparable(METHODS["hbn"](fraction=0.5)) != comparable(METHODS["hbn"]())
    with refusing("lamb", by=TypeError):
        HBN(model, rounds, lamb=0.5)


# A package of one's own


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package: a file for each of its two additions, and a line for each in its entry points."""
    modules = {name: (ROOT / "tests" / "extension" / f"{name}.py").read_text() for name in ("pull", "halfway")}
    with installed(tmp_path / "site", modules, monkeypatch):
        yield tmp_path / "site"


def weights(tmp_path: Path, name: str, **keys: Any) -> dict[str, torch.Tensor]:
    """The network after a short run."""
    return load_file(tiny(tmp_path / name, "fedavg", rounds=2, **kebab(keys)) / "model.safetensors")


@listed(
    ("own", "same", "tolerance"),
    [
        ({"objective": "pull", "pull_strength": 5.0}, {"objective": "fedprox", "fedprox_mu": 5.0}, {"rtol": 1e-4, "atol": 1e-6}),
        (
            {"server_optimizer": "halfway", "halfway_share": 0.25, "halfway_momentum": 0.5},
            {"server_optimizer": "fedavgm", "server_learning_rate": 0.25, "server_momentum": 0.5},
            {"rtol": 0, "atol": 0},
        ),
    ],
)
def test_one_of_ones_own_does_what_the_same_of_fl_bn_does(
    own: dict[str, Any], same: dict[str, Any], tolerance: dict[str, float], package: Path, tmp_path: Path
) -> None:
    """Control: its own defaults are another run. tests/extension has a method and an option of local training."""
    theirs, ours, default = (weights(tmp_path, name, **keys) for name, keys in (("a", same), ("b", own), ("c", dict([*own.items()][:1]))))
    assert all(torch.allclose(ours[name], tensor, **tolerance) for name, tensor in theirs.items())
    assert not all(torch.allclose(default[name], tensor, **tolerance) for name, tensor in theirs.items())
    late = [*kebab(own)][-1]
    assert BEFORE[late] == RunConfig.keys()[late].default


def test_one_that_cannot_be_imported_is_named(package: Path) -> None:
    (package / "own_package" / "pull.py").write_text("import no_such_module\n")
    with refusing("own-package", "own_package.pull", "no_such_module"):
        RunConfig()
    ends_with_a_sentence("config", about="own_package.pull")
