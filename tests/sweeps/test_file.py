"""Sweep files: what a list, a named axis, a variant and an override make, and what is refused, in which words."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.inner import ConfigError, Sweep, parse, read

TEXT = """
title = "two methods"
skip = [{ method = "BN", split = "IID" }]
[run]
rounds = 3
seed = [0, 1]
data-path = "{data}/x.npz"
dataset = "npz"
[axes.method]
"BN" = { method = "fedavg" }
"Fix" = { method = "fixbn", freeze-after = 2 }
"all" = { method = "centralised" }
[axes.split]
"IID" = { partition = "iid" }
"skewed" = { partition = "dirichlet", partition-parameter = 0.1 }
[report]
rows = "method"
columns = ["split"]
[variants.small]
run = { rounds = 2, seed = 5 }
axes.split = ["skewed"]
report = { at = "best" }
[variants.other.axes.method]
"HBN" = { method = "hbn" }
"""


SKEWED = '{ partition = "dirichlet", partition-parameter = 9.0 }'
IID = """"IID" = { partition = "iid" }
"skewed" = { partition = "dirichlet", partition-parameter = 0.1 }
"""


def sweep(text: str = TEXT, variant: str = "", **overrides: Any) -> Sweep:
    return parse(tomllib.loads(text), "file", variant, "there", {name.replace("_", "-"): value for name, value in overrides.items()})


def at(made: Sweep, folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(cell.axes[name] for name in ("seed", "method", "split")) for cell in made.cells(folder)]


def test_every_combination_is_a_run_and_the_first_seed_comes_first(tmp_path: Path) -> None:
    cells = sweep().cells(tmp_path)
    assert at(sweep(), tmp_path) == [
        (seed, method, split)
        for seed in (0, 1)
        for method in ("BN", "Fix", "all")
        for split in ("IID", "skewed")
        if (method, split) != ("BN", "IID")
    ]
    fix = next(cell for cell in cells if cell.axes["method"] == "Fix" and cell.axes["split"] == "skewed")
    assert (fix.config.method, fix.config.freeze_after, fix.config.rounds, fix.config.partition) == ("fixbn", 2, 3, "dirichlet")
    assert (fix.config.data_path, fix.centralised) == ("there/x.npz", False)
    assert {cell.centralised for cell in cells if cell.axes["method"] == "all"} == {True}
    assert len({cell.path for cell in cells}) == len(cells)
    assert all(cell.path.parent == tmp_path / "runs" for cell in cells)


def test_a_variant_changes_keys_keeps_values_and_replaces_axes(tmp_path: Path) -> None:
    small = sweep(variant="small", rounds=7)
    assert [(cell.config.seed, cell.config.rounds) for cell in small.cells(tmp_path)] == [(5, 7)] * 3
    assert set(small.axes["split"]) == {"skewed"}
    assert small.tables["report"] == {"rows": "method", "columns": ["split"], "at": "best"}
    assert set(sweep(variant="other").axes["method"]) == {"HBN"}


def test_the_sweep_as_run_is_a_sweep_file_that_does_the_same(tmp_path: Path) -> None:
    for variant in ("", "small", "other"):
        made = sweep(variant=variant)
        (tmp_path / "again.toml").write_text(made.to_toml())
        again = read(tmp_path / "again.toml")
        assert [cell.config for cell in again.cells(tmp_path)] == [cell.config for cell in made.cells(tmp_path)]
        assert again.tables["report"] == made.tables["report"]


@given(
    st.dictionaries(st.text(max_size=6), st.dictionaries(st.just("name"), st.text(max_size=9)), min_size=1, max_size=3),
    st.text(max_size=20),
)
def test_any_text_survives_being_written(axis: dict[str, dict[str, str]], title: str) -> None:
    made = Sweep(title, {"rounds": 1}, {"a b": axis})
    assert tomllib.loads(made.to_toml()) == {"title": title, "run": {"rounds": 1}, "axes": {"a b": axis}}


@listed(
    ("change", "message"),
    [
        ({"rounds = 3": "round = 3"}, "'round'"),
        ({"rounds = 3": "rounds = 0"}, "rounds"),
        ({"rounds = 3": 'rounds = "3"'}, "'3'"),
        ({'"fedavg"': '"fedavgg"'}, "'fedavgg'"),
        ({"[report]": "[reports]"}, "'reports'"),
        ({'{ partition = "iid" }': '"iid"'}, "split"),
        ({'partition = "iid"': 'partition = ["iid", "classes"]'}, "IID"),
        ({"seed = [0, 1]": "seed = []"}, "seed"),
        ({"seed = [0, 1]": "seed = [0, [1]]"}, "booleans"),
        ({"seed = [0, 1]": 'output = "x"'}, "output"),
        ({"seed = [0, 1]": "seed = [0, 1]\nsplit = [1]"}, "twice"),
        ({'title = "two methods"': 'title = "two methods"\nnotes = "a"'}, "'a'"),
        ({'rows = "method"': 'row = "method"'}, "'row'"),
        ({'rows = "method"': 'rows = "methods"'}, "'methods'"),
        ({'columns = ["split"]': 'columns = ["seed"]'}, "'seed'"),
        ({'columns = ["split"]': 'against = "steps"'}, "'steps'"),
        ({'"Fix" =': '"B;N" = { method = "gn" }\n"B,N" =', "skip =": "# skip ="}, "punctuation"),
        ({"skip = [{ method": "skip = [{ methd"}, "'methd'"),
        ({"skip = [{ method": "skip = [{ q"}, "'q'"),
        ({'method = "BN", split = "skewed"': 'methd = "BN"'}, "'methd'"),
        ({'method = "BN", split = "skewed"': 'method = "BNN"'}, "'BNN'"),
        ({"keys = { batch-size = 8 }": "key = { batch-size = 8 }"}, "where"),
        ({"batch-size = 8": 'name = "x"'}, "name"),
        ({"batch-size = 8": "batch-sizes = 8"}, "'batch-sizes'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(change: dict[str, str], message: str, tmp_path: Path) -> None:
    text = TEXT if all(old in TEXT for old in change) else WHERE
    for old, new in change.items():
        text = text.replace(old, new, 1)
    with naming(message, ConfigError):
        sweep(text).cells(tmp_path)
    assert not list(tmp_path.iterdir())


@listed(
    ("text", "variant", "overrides", "about"),
    [
        (TEXT, "smal", {}, "'smal'"),
        (TEXT.replace('["skewed"]', '["skew"]'), "small", {}, "'skew'"),
        (TEXT, "", {"method": "fbn"}, "axes.method"),  # it makes an axis one run
        (TEXT.replace('{ partition = "iid" }', SKEWED), "", {"partition_parameter": 1.0}, "'IID'"),
        (TEXT + "[variants.one]\naxes.other = []\n", "one", {}, "other"),  # an empty list drops an axis, which must be there
        (TEXT.replace(IID, ""), "", {}, "split"),
    ],
)
def test_a_variant_and_an_override_must_fit_the_file(text: str, variant: str, overrides: dict[str, Any], about: str) -> None:
    with naming(about, ConfigError):
        sweep(text, variant, **overrides)


def test_control_an_override_that_leaves_axes_apart_and_an_empty_list_that_drops_one() -> None:
    assert sweep(freeze_after=1).axes["method"]["Fix"] == {"method": "fixbn"}  # they still differ
    assert "seed" not in sweep(seed=3).axes  # nor is a list of [run], whose values are their labels
    one = '[variants.one]\naxes.split = []\nrun = { partition = "iid" }\nskip = []\nreport = { columns = [] }\n'
    made = sweep(TEXT + one, "one")
    assert list(made.axes) == ["method", "seed"]
    assert {keys["partition"] for _, keys in made.points()} == {"iid"}


WHERE = TEXT.replace(
    "[report]",
    """
[[where]]
at = { method = "BN", split = "skewed" }
keys = { learning-rate = 0.5, data-path = "{data}/y.npz" }
[[where]]
at = { seed = 1 }
keys = { batch-size = 8 }
[report]""",
    1,
)


def test_keys_of_some_combinations_count_more_than_those_of_the_axes(tmp_path: Path) -> None:
    plain, made = ({cell.config.name: cell.config for cell in sweep(text).cells(tmp_path)} for text in (TEXT, WHERE))
    assert made.keys() == plain.keys()
    changed = {name: config for name, config in made.items() if config.learning_rate == 0.5}
    assert set(changed) == {"BN-skewed-seed0", "BN-skewed-seed1"}
    assert {config.data_path for config in changed.values()} == {"there/y.npz"}
    assert {name for name, config in made.items() if config.batch_size == 8} == {name for name in made if name.endswith("seed1")}
    assert all(config.learning_rate == plain[name].learning_rate for name, config in made.items() if name not in changed)
