"""Sweep files: what a list, a named axis, a variant and an override make, and what is refused, in which words."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fl_bn.app.config import ConfigError
from fl_bn.app.sweep.compare import comparison
from fl_bn.app.sweep.file import Sweep, parse, read
from tests.experiment.inside import kebab, refusing
from tests.listed import listed
from tests.refusals import naming

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


def sweep(text: str = TEXT, variant: str = "", **overrides: Any) -> Sweep:
    return parse(tomllib.loads(text), "file", variant, "there", {name.replace("_", "-"): value for name, value in overrides.items()})


def test_every_combination_is_a_run_and_the_first_seed_comes_first(tmp_path: Path) -> None:
    cells = sweep().cells(tmp_path)
    pairs = [("BN", "skewed"), *product(("Fix", "all"), ("IID", "skewed"))]
    assert [(cell.axes["method"], cell.axes["split"]) for cell in cells] == pairs * 2
    assert [cell.axes["seed"] for cell in cells] == [0] * 5 + [1] * 5
    fix = next(cell for cell in cells if cell.axes["method"] == "Fix" and cell.axes["split"] == "skewed")
    assert (fix.config.method, fix.config.freeze_after, fix.config.rounds, fix.config.partition) == ("fixbn", 2, 3, "dirichlet")
    assert (fix.config.data_path, fix.centralised) == ("there/x.npz", False)
    assert {cell.centralised for cell in cells if cell.axes["method"] == "all"} == {True}
    assert len({cell.path for cell in cells if cell.path.parent == tmp_path / "runs"}) == len(cells)


def test_a_variant_changes_keys_keeps_values_and_replaces_axes(tmp_path: Path) -> None:
    small = sweep(variant="small", rounds=7)
    assert [(cell.config.seed, cell.config.rounds) for cell in small.cells(tmp_path)] == [(5, 7)] * 3
    assert set(small.axes["split"]) == {"skewed"}
    assert small.tables["report"] == {"rows": "method", "columns": ["split"], "at": "best"}
    assert set(sweep(variant="other").axes["method"]) == {"HBN"}
    one_seed = sweep(TEXT.replace('report = { at = "best" }', 'skip = [{ seed = 5, method = "BN" }]'), "small")  # no axis here, a value
    assert {at["method"] for at, _ in one_seed.points()} == {"Fix", "all"}
    assert [*parse(tomllib.loads(one_seed.to_toml()), "", "", "", {}).named()] == [*one_seed.named()]


def test_a_key_that_some_runs_use_is_left_out_of_the_others(tmp_path: Path) -> None:
    """A variant must use its own keys."""
    text = TEXT.replace('"all" = { method = "centralised" }', '"GN" = { method = "gn" }')
    cells = sweep(text, groups=4).cells(tmp_path)
    assert {(cell.config.method, cell.config["groups"]) for cell in cells} == {("fedavg", 2), ("fixbn", 2), ("gn", 4)}
    sweep(clip_limit=2.0, clip="norm").cells(tmp_path)
    with naming("fbn-momentum=0.5", ConfigError):
        sweep(TEXT.replace("seed = 5", "seed = 5, fbn-momentum = 0.5"), "small").cells(tmp_path)


def test_the_sweep_as_run_is_a_sweep_file_that_does_the_same(tmp_path: Path) -> None:
    for variant in ("", "small", "other"):
        made = sweep(variant=variant)
        (tmp_path / "again.toml").write_text(made.to_toml())
        again = read(tmp_path / "again.toml")
        assert [cell.config for cell in again.cells(tmp_path)] == [cell.config for cell in made.cells(tmp_path)]
        assert again.tables["report"] == made.tables["report"]


@listed(
    ("change", "message"),
    [
        ({"rounds = 3": "round = 3"}, "'round'"),
        ({'{ partition = "iid" }': '"iid"'}, "split"),
        ({"seed = [0, 1]": "seed = []"}, "seed"),
        ({"seed = [0, 1]": 'output = "x"'}, "output"),
        ({"seed = [0, 1]": "seed = [0, 1]\nsplit = [1]"}, "twice"),
        ({'rows = "method"': 'rows = "methods"'}, "'methods'"),
        ({'rows = "method"': 'metric = "acuracy"'}, "'acuracy'"),  # unless a task of one's own has it
        ({'"Fix" =': '"B;N" = { method = "gn" }\n"B,N" =', "skip =": "# skip ="}, "punctuation"),
        ({"skip = [{ method": "skip = [{ methd"}, "'methd'"),
        ({'"BN", split = "IID" }]': '"BM", split = "IID" }]'}, "'BM'"),
        ({'method = "BN", split = "skewed"': 'method = "BNN"'}, "'BNN'"),
        ({"keys = { batch-size = 8 }": "key = { batch-size = 8 }"}, "where"),
        ({"batch-size = 8": "batch-sizes = 8"}, "'batch-sizes'"),
        ({"rounds = 3": "rounds = 3\ngroups = 4"}, "groups=4"),  # none of the runs uses it
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(change: dict[str, str], message: str, tmp_path: Path) -> None:
    text = TEXT if all(old in TEXT for old in change) else WHERE
    for old, new in change.items():
        text = text.replace(old, new, 1)
    with naming(message, ConfigError):
        sweep(text).cells(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_variant_and_an_override_must_fit_the_file() -> None:
    for text, variant, overrides, about in (
        (TEXT, "smal", {}, "'smal'"),
        (TEXT.replace('["skewed"]', '["skew"]'), "small", {}, "'skew'"),
        (TEXT, "", {"method": "fbn"}, "axes.method"),  # it makes an axis one run
        (TEXT + "[variants.one]\naxes.other = []\n", "one", {}, "other"),  # an empty list drops an axis, which must be there
    ):
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


# Comparisons: variants from text, the cells that they make, and what cannot be compared


def compared(*variants: str, seeds: Sequence[int] = (0,), **base: Any) -> Sweep:
    return comparison(variants, seeds, kebab(base), "a comparison")


def test_a_variants_config_is_the_base_with_its_own_keys(tmp_path: Path) -> None:
    (cell,) = compared(" fbn:rounds=7;model='resnet18';deterministic=false", seeds=[4], rounds=3, clients=2).cells(tmp_path)
    config = cell.config
    assert (config.method, config.rounds, config.clients, config.seed) == ("fbn", 7, 2, 4)
    assert (config.model, config.deterministic) == ("resnet18", False)
    assert (config.output, config.pictures) == (str(tmp_path / "runs"), False)
    assert "/" not in config.name
    (cell,) = compared("centralised").cells(tmp_path)
    assert (cell.config.method, cell.centralised) == ("fedavg", True)
    cells = compared("fbn", "gn", seeds=[3, 4], rounds=2).cells(tmp_path)
    assert [(cell.config.method, cell.config.seed) for cell in cells] == [("fbn", 3), ("gn", 3), ("fbn", 4), ("gn", 4)]
    assert len({cell.path for cell in cells}) == 4


@listed(
    ("variants", "base", "about"),
    [
        (["fbn:round=7"], {}, "'round'"),
        (["fbn", "fbn"], {}, "fbn"),
        (["fbn:rounds=1;clients=2", "fbn:rounds=1 clients=2"], {}, "folder"),  # they differ in punctuation alone
        (["fbn:seed=3"], {}, "seed"),
        (["fbn"], {"output": "x"}, "output"),  # which the comparison sets itself
        (["fbn:method='gn'"], {}, "method"),
        (["fbn:groups=8", "gn"], {}, "groups=8"),
        (["fbn", "fedavg"], {"groups": 4}, "groups=4"),
        (["fedavg", "gn:validation-share=0.3"], {"clients": 2}, "validation"),  # they would be tested on other samples
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(variants: list[str], base: dict[str, Any], about: str, tmp_path: Path) -> None:
    with refusing(about):
        compared(*variants, **base).cells(tmp_path)
    compared("fedavg", "gn", clients=2, validation_share=0.3).cells(tmp_path)  # control
