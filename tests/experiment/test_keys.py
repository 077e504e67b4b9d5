"""The run config, asked for every key that ``fl-bn config`` prints; keys that do not go together; texts and files of keys."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_bn.app.config import REGISTRIES
from fl_bn.app.former import IN_PAPERS
from fl_bn.app.run_keys import general_options
from fl_bn.app.used import HasNoEffect, conditions
from fl_bn.methods import METHODS
from fl_bn.options import options_by_key
from tests.experiment.inside import ConfigError, RunConfig, command, config, parse_overrides, refusing
from tests.experiment.test_options import comparable
from tests.listed import listed

ROOT = Path(__file__).parents[2]
DEFAULTS: dict[str, Any] = tomllib.loads(command("config", "--toml").output)
PAGE = command("config").output
VALUES = dict(re.findall(r"^- `([a-z0-9-]+)=.*?`(?: \((.*?)\))?: ", PAGE, re.MULTILINE))
"""Key -> its allowed values, as the page of all keys has them."""
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
SYNTAX: dict[str, list[str]] = {
    "callbacks": ["mlflow", "trackers:MLflow, x"],
    "client-names": ["a b", "a,A", "a,", "../x"],
    "client-nodes": ["a", "-1", "7,7", "1,", "9" * 21],
    "columns-digest": ["nonsense"],
    "device": ["tpu", "gpu", ""],
    "name": ["a/b", "..", " a", "-x", "~x", ".x", "a\\b", "a\u202egnp.exe", "a\u200bb", "a\u0085b", "a\x1b[2J", "\ufeffa", "\u20ac" * 200],
    "output": ["~/x"],
    "data-path": ["~/x"],
    "model-weights": ["~/x"],
    "setup": ["Papers", "experiments.papers"],
}
"""Texts that a key does not take, where a name or a range does not say so."""


def within(values: str, number: float) -> bool:
    """Whether a number is in a range as the page has it, such as ``0 or >= 2``, ``(0, 1]`` and ``1..9``."""
    for part in values.split(" or "):
        low, *high = map(float, re.findall(NUMBER, part.replace("..", " ")))
        above = number > low if part[0] in ">(" and "=" not in part else number >= low
        below = (number < high[0] if part[-1] == ")" else number <= high[0]) if high else part[0] == ">" or number == low
        if above and below:
            return True
    return False


def out_of_range(key: str) -> list[Any]:
    """Make values beside every bound of the key's range; a name that is none of its names; texts of a wrong syntax."""
    default, values = DEFAULTS[key], VALUES[key]
    if isinstance(default, str):
        return ["nonsense"] * (default in values.split(", ")) + SYNTAX.get(key, [])
    if isinstance(default, bool) or values == "finite":
        return []
    near = 1 if isinstance(default, int) else 1e-7
    bounds = [(int if near == 1 else float)(float(bound)) for bound in re.findall(NUMBER, values.replace("..", " "))]
    found = [number for bound in bounds for number in (bound - near, bound, bound + near, -bound - 1) if not within(values, number)]
    assert found, f"no value of {key} is out of {values}"
    return found


def unfit(key: str) -> list[Any]:
    """Return values of another type, and values that cannot be written to a file or sent."""
    kind = type(DEFAULTS[key])
    never = {float: [math.inf, -math.inf, math.nan, 1e39], int: [2**63, -(2**63) - 1, 10**40], str: ["a\0b", "a\nb", "\x7f", "\ud800"]}
    others = [value for value in ("3", 3, 3.5, True, None, [1]) if type(value) is not kind and not (kind is float and type(value) is int)]
    return [*others, *never.get(kind, [])]


@listed("key", DEFAULTS)
def test_every_key_takes_its_default_and_refuses_what_its_declaration_excludes(key: str) -> None:
    assert config({key: DEFAULTS[key]}) == RunConfig()
    for wrong in [*unfit(key), *out_of_range(key)]:
        with refusing() as told:
            config({key: wrong})
        assert str(told.value).startswith(key)
        assert key == "name" or str(told.value).isprintable()


def test_pyproject_and_the_page_are_generated_and_name_the_same_keys() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]
    assert [(key, type(value), value) for key, value in stated["app"]["config"].items()] == [
        (key, type(value), value) for key, value in DEFAULTS.items()
    ]
    assert f"[tool.flwr.app.config]\n{command('config', '--toml').output}\n" in (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "docs" / "config.md").read_text().endswith(command("config").output)
    assert VALUES.keys() == DEFAULTS.keys() == RunConfig().to_mapping().keys()
    simulated = [value["options"]["num-supernodes"] for value in stated["federations"].values() if "options" in value]
    assert simulated == [RunConfig().clients] * len(simulated)
    assert len(simulated) >= 2


# Keys that do not go together: an error that names one of them. Without one of them the run is fine.
SHAPE = {"classes": 2, "channels": 1, "image_size": 4}
SECURE = {"secure_aggregation": True}
NOT_SECURE = {
    "clients": 2, "method": "fedtan", "statistics_rule": "median", "maintain_momentum": "global", "dp_noise": 1.0, "secagg_shares": 4,
}  # fmt: skip
GRADIENTS = {"update": "gradients", "local_steps": 1}
TOO_MANY = {"min_cohort": 4, "min_sites": 4, "byzantine": 3}
TOGETHER: list[dict[str, Any]] = [
    {"local_epochs": 2, "local_steps": 9},
    {"local_steps": 0},
    {"objective": "scaffold"},
    {"objective": "fedsam", "method": "fedtan2"},
    {"clip": "norm", "method": "fedtan"},
    {"objective": "fedprox", **GRADIENTS},
    {"objective": "scaffold", "momentum": 0.0, "byzantine": 1, "clients": 5},
    {"maintain_momentum": "global", "statistics_rule": "median", "clients": 5},
    {"maintain_momentum": "local", "momentum": 0.0},
    {"server_optimizer": "fedacg", "server_learning_rate": 0.5},
    {"server_momentum": 0.5},
    {**SECURE, "unseen_client": True, "method": "fedbn"},
    *({**SECURE, key: value} for key, value in NOT_SECURE.items()),
    {"learning_rate_schedule": "milestones"},
    {"optimizer": "adam", "momentum": 0.5},
    {"update": "gradients", "local_steps": 9},
    {"method": "fixbn", "freeze_after": 99, "rounds": 60},
    {"method": "fedtan", "client_weights": "uniform"},
    {"engine": "vectorised", "workers": 2},
    {"resume": "latest"},
    {"checkpoint_every": 1, "output": ""},
    {"clients": 10, "fraction": 0.5, "min_cohort": 6},
    *({"clients": 3, key: value} for key, value in {**TOO_MANY, "client_nodes": "7,8", "client_names": "east,west"}.items()),
    {"clients": 5, "clients_at_start": 6},
    {"dataset": "sites"},
    {"dataset": "sites", **SHAPE, "byzantine": 1},
    {"byzantine": 5, "statistics_rule": "median"},
    {"byzantine": 4, "update_rule": "krum"},
    {"byzantine": 3, "update_rule": "median", "fraction": 0.6},
    {"byzantine": 3, "attack": "mimic", "attack_strength": 7.0},
]
JUST_ENOUGH: list[dict[str, Any]] = [
    {"name": "\u20ac" * 85},  # as long as a file's name may be, and of any language
    {"byzantine": 4, "statistics_rule": "median", "update_rule": "nnm+trimmed-mean"},
    {"byzantine": 3, "update_rule": "krum"},
    {"byzantine": 3, "update_rule": "median", "fraction": 0.7},
    {"byzantine": 3, "attack": "mimic", "attack_strength": 6.0},
]


def names(keys: Mapping[str, Any], text: str) -> bool:
    words = text.replace("-", " ")
    return any(key.replace("_", " ") in words or (isinstance(value, str) and value in text) for key, value in keys.items())


def fits(keys: Mapping[str, Any]) -> bool:
    try:
        config(keys)
    except ConfigError:
        return False
    return True


@listed("keys", TOGETHER)
def test_keys_that_do_not_go_together_are_named(keys: dict[str, Any]) -> None:
    with refusing() as told:
        config(keys)
    assert names(keys, str(told.value)), told.value
    assert any(fits({key: value for key, value in keys.items() if key != left_out}) for left_out in keys), "control"


@listed("keys", JUST_ENOUGH)
def test_control_just_enough_is_enough(keys: dict[str, Any]) -> None:
    assert fits(keys)


def test_keys_reach_the_rounds() -> None:
    rates = {"learning_rate": 0.05, "learning_rate_schedule": "step", "learning_rate_decay": 0.1}
    counts = {"min_replies": 0.25, "calibrate": 2, "evaluate_every": 7, "client_weights": "uniform", "min_cohort": 3, "checkpoint_every": 4}
    policy = config(**counts, **rates).round_policy()
    assert {key: getattr(policy, key) for key in counts} == counts
    assert [policy.rate(round, 60) for round in (1, 30, 31, 46)] == pytest.approx([0.05, 0.05, 0.005, 0.0005])
    assert (policy.at_clients, config(dataset="sites", **SHAPE).round_policy().at_clients) == (False, True)
    assert (config().round_policy().unit_scale, config(unit_scale=False).round_policy().unit_scale) == (True, False)
    assert config(precision="mixed").local_training().precision == "mixed"
    for wrong in ("0.6", "0.8:0.1,0.6:0.1"):
        with refusing("milestones"):
            config(learning_rate_schedule="milestones", learning_rate_milestones=wrong)


# Texts and files


@listed("text", ["rounds 10", "method=hbn", "no.toml", "rounds=1 rounds=2", "rounds=[" + "[" * 5000])
def test_no_text_is_read_with_a_traceback(text: str) -> None:
    with refusing(text[:6]):
        parse_overrides(text)


# A key that the run ignores is refused


KEYS = RunConfig.keys()
GENERAL = general_options()
SITES = {"dataset": "sites", "classes": 2, "channels": 1, "image-size": 4}
SUMMED = {"secure-aggregation": True}
NOISY = {**SUMMED, "client-weights": "uniform", "dp-noise": 1.0}
UNDER_ATTACK = {"byzantine": 2, "attack": "foe"}

CONDITIONS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"freeze-after": 100}, {"method": "fedavg"}, {"method": "fixbn"}),
    ({"frozen-rate": 0.5}, {"method": "fedavg"}, {"method": "fedavg", "freeze-after": 5}),
    ({"classes": 2}, {}, SITES),
    ({"data-path": "x"}, SITES, {"dataset": "npz"}),
    ({"partition": "iid"}, SITES, {}),
    ({"test-on": "all"}, {"partition": "iid"}, {"partition": "natural"}),
    ({"partition-parameter": 2.0}, {"partition": "iid"}, {"partition": "classes"}),
    ({"unseen-client": True}, {"method": "fbn"}, {"method": "fedbn"}),
    ({"recalibration": "passes"}, {"method": "fedavg"}, {"method": "fbn"}),
    ({"unit-scale": False}, {"method": "fedavg"}, {"method": "fedavg", "freeze-after": 0}),
    ({"exchange": "local"}, {"method": "fedavg"}, {"method": "fedtan"}),
    ({"attack": "foe"}, {}, {"byzantine": 1}),
    ({"client-weights": "data"}, {"update-rule": "median"}, {"update-rule": "mean"}),
    ({"attack-on": "updates"}, {"byzantine": 1, "attack": "label-flip"}, {"byzantine": 1, "attack": "nan"}),
    ({"attack-on": "statistics"}, {**UNDER_ATTACK, "method": "fedbn"}, {**UNDER_ATTACK, "method": "fedavg"}),
    ({"statistics-rule": "median"}, {"method": "silobn"}, {"method": "fbn"}),
    ({"update-rule": "median", "server-optimizer": "fedadam"}, {"method": "single"}, {"method": "fedbn"}),
    ({"keep-best": True}, {"method": "single"}, {"method": "fedbn"}),
    ({"attack-strength": 2.0}, {"byzantine": 1}, UNDER_ATTACK),
    ({"secagg-shares": 5, "secagg-clipping-range": 9.0}, {}, SUMMED),
    ({"dp-noise": 1.0}, {"client-weights": "uniform"}, {"client-weights": "uniform", **SUMMED}),
    ({"dp-clip": 2.0, "dp-statistics-clip": 2.0, "dp-delta": 1e-6}, SUMMED, NOISY),
    ({"learning-rate-decay": 0.1}, {}, {"learning-rate-schedule": "step"}),
    ({"learning-rate-milestones": "0.5:0.1"}, {}, {"learning-rate-schedule": "milestones"}),
    ({"clip-limit": 2.0}, {}, {"clip": "norm"}),
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
FITTING: dict[str, dict[str, Any]] = {"scaffold": {"momentum": 0.0, "clip": "none", "method": "fedavg"}}
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
        usual, made = ({chosen_by: owner, **FITTING.get(owner, {}), **more} for more in ({}, {key: value}))
        assert config(made)[key] == value
        assert built(made, chosen_by) != built(usual, chosen_by)


def built(keys: dict[str, Any], chosen_by: str) -> Any:
    """Return what the run would use, as values that can be compared."""
    return comparable(getattr(config(keys), f"build_{chosen_by.replace('-', '_')}")())


def test_every_key_with_a_condition_has_a_case() -> None:
    tried = {key for key, *_ in CASES} | OWNERS.keys()
    assert {*OWNERS, *conditions(RunConfig(), REGISTRIES, GENERAL)} == (tried - IN_PAPERS.keys()) | WITH_ANOTHER


@listed("method", METHODS)
def test_a_default_is_never_refused(method: str) -> None:
    """Flower passes every key of pyproject.toml to a run."""
    everything = {key: spec.default for key, spec in KEYS.items()}
    assert config({**everything, "method": method}) == config(method=method)
