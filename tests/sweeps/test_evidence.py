"""Evidence: results that are committed, comparisons of paired seeds, verdicts, and a page that says what the files say."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import ttest_rel  # type: ignore[import-untyped]

from fl_bn.cli import experiments as commands
from fl_bn.run.config import ConfigError
from fl_bn.sweep import run
from fl_bn.sweep.claims import (
    AGAINST,
    ELSEWHERE,
    HELD,
    NOT,
    NOT_RUN,
    OPEN,
    PARTLY,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    Claim,
    Comparison,
    Outcome,
    parse_claim,
    verdict,
)
from fl_bn.sweep.evidence import PAGE, RESULTS, VARIANT, gather, markdown, write_evidence
from fl_bn.sweep.experiments import Experiment
from fl_bn.sweep.file import read
from fl_bn.sweep.kept import ANY_DATA, cells_of, keep, load, own_config
from fl_bn.sweep.run import Place

ROOT = Path(__file__).parents[2]
ABOVE = Comparison(("A", "x"), ("B", "x"))
NEAR = Comparison(("A", "x"), ("B", "x"), 2.0)
DEFINITION = """
title = "Two methods"
[experiment]
paper = "Nobody's"
[evidence]
claim = "FedBN is ahead of FedAvg"
hours = 0.5
compare = [{ left = ["FedBN", "accuracy"], right = ["FedAvg", "accuracy"] }]
[run]
dataset = "npz"
data-path = "{data}/x.npz"
rounds = 2
seed = [0, 1, 2]
[axes.method]
FedAvg = { method = "fedavg" }
FedBN = { method = "fedbn" }
[report]
rows = "method"
[variants.evidence.run]
rounds = 4
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    file = tmp_path / "defined" / "X-1.toml"
    file.parent.mkdir()
    file.write_text(DEFINITION)
    return Experiment("X-1", file, "Nobody's", "Two methods", (VARIANT,))


def runs(experiment: Experiment, folder: Path, data: str, accuracy: dict[str, float]) -> None:
    """What finished cells leave; ``accuracy`` by cell."""
    for cell in read(experiment.file, VARIANT, data).cells(folder):
        if cell.config.name not in accuracy:
            continue
        cell.path.mkdir(parents=True)
        values = {key: value for key, value in cell.config.to_mapping().items() if key != "name"}
        (cell.path / "config.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
        rows = [
            {"round": n, "loss": 1.0 / n, "accuracy": accuracy[cell.config.name] if n == 4 else None, "seconds": 10.0} for n in range(1, 5)
        ]
        (cell.path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (cell.path / "summary.md").write_text("done")
        (cell.path / "environment.json").write_text('{"commit": "abc1234"}')
        cell.write_outcome("finished", 33.0)


def kept(experiment: Experiment, tmp_path: Path, accuracy: dict[str, float], out: str = "out") -> Path:
    """The folder with these results, compacted."""
    runs(experiment, tmp_path / f"runs-{out}", "/somewhere", accuracy)
    file = tmp_path / out / RESULTS / "X-1.jsonl"
    keep(
        read(experiment.file, VARIANT, "/somewhere").cells(tmp_path / f"runs-{out}"),
        cells_of(read(experiment.file, VARIANT, ANY_DATA)),
        file,
    )
    return tmp_path / out


ALL = {
    f"{method}-seed{seed}": value
    for method, values in {"FedAvg": (0.5, 0.52, 0.51), "FedBN": (0.6, 0.63, 0.61)}.items()
    for seed, value in enumerate(values)
}


def test_the_page_says_what_the_results_say() -> None:
    """Of the repository itself. The negative control changes one number of a copy."""
    folder = ROOT / "experiments"
    assert (folder / PAGE).read_text() == markdown(gather(folder)), "fl-bn experiments evidence"


def test_another_number_in_a_result_makes_another_page(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    write_evidence(folder, experiments=[experiment])
    page = (folder / PAGE).read_text()
    assert page == markdown(gather(folder, [experiment]))
    file = folder / RESULTS / "X-1.jsonl"
    file.write_text(file.read_text().replace("0.63", "0.62"))
    assert page != markdown(gather(folder, [experiment]))


def test_p_values_and_intervals_are_those_of_scipy() -> None:
    left, right = [61.0, 63.5, 60.2, 64.0], [60.0, 60.5, 61.0, 61.1]
    one = Outcome(ABOVE, tuple(a - b for a, b in zip(left, right, strict=True)))
    expected = ttest_rel(left, right)
    interval = expected.confidence_interval()
    assert one.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert (one.mean - one.half, one.mean + one.half) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert one.p != pytest.approx(ttest_rel(left, right[::-1]).pvalue, rel=1e-3)  # pairs matter


@pytest.mark.parametrize(
    ("comparison", "differences", "state"),
    [
        (ABOVE, (3.0, 3.1, 2.9), HELD),
        (ABOVE, (-3.0, -3.1, -2.9), AGAINST),
        (ABOVE, (3.0, -2.0, 1.0), OPEN),
        (ABOVE, (30.0,), OPEN),
        (ABOVE, (0.0, 0.0), OPEN),
        (NEAR, (0.1, -0.1, 0.2), HELD),
        (NEAR, (5.0, 5.1, 4.9), AGAINST),
        (NEAR, (1.9, 2.3, 1.7), OPEN),
        (NEAR, (-1.0, -1.0), HELD),
    ],
)
def test_what_seeds_decide(comparison: Comparison, differences: tuple[float, ...], state: str) -> None:
    assert Outcome(comparison, differences).state == state


def test_verdicts() -> None:
    held, against, open_, single, none = (Outcome(ABOVE, d) for d in ((3.0, 3.1), (-3.0, -3.1), (9.0, -9.0), (9.0,), ()))
    claim = Claim("A is ahead", compare=(ABOVE, ABOVE))
    pairs = ((held, held), (held, against), (held, none), (open_, against), (single, none), (none, none))
    assert [verdict(claim, list(pair)) for pair in pairs] == [
        REPRODUCED, PARTLY, PARTLY, NOT, UNDECIDED, NOT_RUN,
    ]  # fmt: skip
    assert verdict(replace(claim, untestable="no data"), [held]) == UNTESTABLE
    assert verdict(replace(claim, elsewhere="there"), []) == ELSEWHERE
    assert math.isnan(single.p)


def test_finished_cells_are_kept_without_the_machine_s_paths(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    text = (folder / RESULTS / "X-1.jsonl").read_text()
    assert str(tmp_path) not in text
    assert "/somewhere" not in text
    defined = cells_of(read(experiment.file, VARIANT, ANY_DATA))
    found = load(folder / RESULTS / "X-1.jsonl", defined)
    assert [one.name for one in found] == [cell.config.name for cell in defined]
    assert found[0].config == own_config(defined[0].config)
    assert found[0].config["data-path"] == "{data}/x.npz"
    assert (found[0].commit, found[0].seconds) == ("abc1234", 40.0)  # rounds took longer than the last part of a resumed cell
    assert found[0].curve == ({"round": 4, "loss": 0.25, "accuracy": 0.5},)


def test_cells_come_bit_by_bit(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, {"FedAvg-seed0": 0.5, "FedBN-seed0": 0.6})
    page = markdown(gather(folder, [experiment]))
    assert "| undecided, so far | 0 of 1 | 2 of 6 | 2.0 |" in page
    assert "Missing: 4 cells, 0.5 core hours each" in page
    kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed0" not in name}, "more")
    defined, file = cells_of(read(experiment.file, VARIANT, ANY_DATA)), folder / RESULTS / "X-1.jsonl"
    assert keep(read(experiment.file, VARIANT, "/somewhere").cells(tmp_path / "runs-more"), defined, file) == 6
    page = markdown(gather(folder, [experiment]))
    assert "| reproduced | 1 of 1 | 6 of 6 | – |" in page
    assert "| FedBN > FedAvg (accuracy) | +10.3 (+8.9 to +11.8) | 3 | 0.001 | held |" in page
    assert "6 on abc1234" in page


def test_cells_with_a_result_are_not_run_again(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check", lambda cells: None)  # reads the data, which are not there

    def perform(results: Path | None) -> str:
        commands.perform(experiment.file, VARIANT, "/somewhere", tmp_path / "again", Place(), False, "", results=results, dry_run=True)
        return " ".join(capsys.readouterr().out.split())

    file = kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed2" not in name}) / RESULTS / "X-1.jsonl"
    said = perform(file)
    assert "2 runs, 0 of them finished before, 2 to do" in said
    assert "4 more have their result in" in said
    assert "seed0" not in said
    assert "6 runs, 0 of them finished before, 6 to do" in perform(None)


def test_results_of_another_definition_are_refused(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    gather(folder, [experiment])
    experiment.file.write_text(DEFINITION.replace("rounds = 4", "rounds = 4\nlearning-rate = 0.2"))
    with pytest.raises(ConfigError, match="ran with other settings .learning-rate None there, 0.2 in the experiment's file"):
        gather(folder, [experiment])
    experiment.file.write_text(DEFINITION.replace("FedBN = {", "Local = {"))
    with pytest.raises(ConfigError, match="FedBN-seed0 is no cell of the experiment any more"):
        gather(folder, [experiment])


def test_pages_and_the_picture(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    made = write_evidence(folder, tmp_path / "pages", [experiment])
    assert [path.name for path in made] == [PAGE, "evidence.png", "X-1.html"]
    assert all(path.stat().st_size > 1000 for path in made)
    shutil.rmtree(folder / RESULTS)
    assert [path.name for path in write_evidence(folder, tmp_path / "none", [experiment])] == [PAGE]
    assert "not run yet" in (folder / PAGE).read_text()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"claim": "c", "compared": []}, "key 'compared'"),
        ({"claim": ""}, "needs a claim"),
        ({"claim": "c", "hours": "two"}, "hours as a number"),
        ({"claim": "c", "compare": [{"left": ["A"], "right": ["B", "x"]}]}, "a comparison is"),
        ({"claim": "c", "compare": [{"left": ["A", "x"], "right": ["B", "x"], "within": "2"}]}, "a comparison is"),
        ({"claim": "c", "compare": [{"left": ["A", "x"], "right": ["B", "x"], "than": 2}]}, "a comparison is"),
    ],
)
def test_a_wrong_table_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_claim(table, "X-1.toml")
