"""Evidence: results that are committed, comparisons of paired seeds, verdicts, and a page that says what the files say."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp, ttest_rel  # type: ignore[import-untyped]
from torch import nn

from fl_bn.cli import experiments as commands
from fl_bn.experiments.programs.own_statistics import measure
from fl_bn.report.cells import Cell as Shown
from fl_bn.report.write import report_of
from fl_bn.run.config import ConfigError
from fl_bn.sweep import run
from fl_bn.sweep.claims import (
    AGAINST,
    HELD,
    NOT,
    NOT_RUN,
    OPEN,
    PARTLY,
    POWER,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    VARIANT,
    Claim,
    Comparison,
    Outcome,
    Why,
    answer,
    parse_claim,
    verdict,
)
from fl_bn.sweep.evidence import HOURS, RESULTS, Runs, compact, definition, gather, results_of, runs_of
from fl_bn.sweep.evidence_page import PAGE, markdown, readme, write_evidence
from fl_bn.sweep.experiments import FOLDER, Experiment, find, study
from fl_bn.sweep.file import read
from fl_bn.sweep.kept import ANY_DATA, cells_of, keep, load, measured, own_config
from fl_bn.sweep.run import Place

ROOT = Path(__file__).parents[2]
MEASURE = "programs/own_statistics.py:measured"
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
[variants.cause.run]
rounds = 4
learning-rate = 0.5
"""
WHY = """
[[evidence.why]]
variant = "cause"
asks = "Is it the rate?"
compare = [{ left = ["FedBN", "accuracy"], right = ["FedAvg", "accuracy"] }]
yes = "It is."
no = "It is not."
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    file = tmp_path / "defined" / "X-1.toml"
    file.parent.mkdir()
    file.write_text(DEFINITION)
    return Experiment("X-1", file, "Nobody's", "Two methods", (VARIANT, "cause"))


def runs(experiment: Experiment, folder: Path, data: str, accuracy: dict[str, float], variant: str = VARIANT) -> None:
    """What finished cells leave; ``accuracy`` by cell."""
    for cell in read(experiment.file, variant, data).cells(folder):
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


def kept(experiment: Experiment, tmp_path: Path, accuracy: dict[str, float], out: str = "out", variant: str = VARIANT) -> Path:
    """The folder with these results, compacted."""
    place = tmp_path / f"runs-{out}-{variant}"
    runs(experiment, place, "/somewhere", accuracy, variant)
    compact(experiment, variant, place, "/somewhere", tmp_path / out)
    return tmp_path / out


ALL = {
    f"{method}-seed{seed}": value
    for method, values in {"FedAvg": (0.5, 0.52, 0.51), "FedBN": (0.6, 0.63, 0.61)}.items()
    for seed, value in enumerate(values)
}


def test_the_page_says_what_the_results_say() -> None:
    """Of the repository itself. The negative control changes one number of a copy."""
    folder, text = ROOT / "experiments", (ROOT / "README.md").read_text()
    claims = gather(folder)
    assert (folder / PAGE).read_text() == markdown(claims), "fl-bn experiments evidence"
    assert text == readme(text, claims, "experiments"), "fl-bn experiments evidence --readme README.md"


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
    assert "| undecided, so far | 0 of 1 | 2 of 6 | 2.0 | – |" in page
    assert "Missing: 4 cells, 0.5 core hours each" in page
    kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed0" not in name}, "more")
    assert compact(experiment, VARIANT, tmp_path / "runs-more-evidence", "/somewhere", folder)[1:] == (6, 6)
    page = markdown(gather(folder, [experiment]))
    assert "| reproduced | 1 of 1 | 6 of 6 | – | – |" in page
    assert "| FedBN > FedAvg (accuracy) | +10.3 (+8.9 to +11.8) | – | 1.9 | 3 | 0.001 | held |" in page
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
    experiment.file.write_text(DEFINITION.replace("rounds = 4", "rounds = 4\nlearning-rate = 0.2", 1))
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
        ({"claim": "c", "why": [{"asks": "why?"}]}, "needs the first two"),
        ({"claim": "c", "why": [{"variant": "v", "asks": "why?", "perhaps": "who knows"}]}, "needs the first two"),
    ],
)
def test_a_wrong_table_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_claim(table, "X-1.toml")


def test_a_difference_that_is_detectable_is_found_as_often_as_said() -> None:
    """By simulation. Control: half of it is found less often."""
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4000, 10))
    spread = Outcome(ABOVE, tuple(np.tile([-1.0, 1.0], 5) * math.sqrt(9 / 10)))  # a standard deviation of 1
    assert np.std(spread.differences, ddof=1) == pytest.approx(1)
    found = [float((ttest_1samp(draws + shift, 0, axis=1).pvalue < 0.05).mean()) for shift in (spread.detectable, spread.detectable / 2)]
    assert found[0] == pytest.approx(POWER, abs=0.02)
    assert found[1] < 0.5


def test_a_question_is_answered_by_its_runs(experiment: Experiment, tmp_path: Path) -> None:
    experiment.file.write_text(DEFINITION.replace("[run]", f"{WHY}[run]", 1))
    folder = kept(experiment, tmp_path, ALL)
    assert "**Is it the rate?** Not run yet." in markdown(gather(folder, [experiment]))
    kept(experiment, tmp_path, ALL, variant="cause")
    assert results_of(experiment, "cause", folder).name == "X-1.cause.jsonl"
    page = markdown(gather(folder, [experiment]))
    assert "**Is it the rate?** It is." in page
    assert "Cells run of the variant `cause`: 6 of 6 (6 on abc1234)" in page
    assert page.count("| FedAvg | 51.0 (1.0) |") == 2
    swapped = {name.replace("FedBN", "?").replace("FedAvg", "FedBN").replace("?", "FedAvg"): value for name, value in ALL.items()}
    shutil.rmtree(tmp_path / "runs-out-cause")
    kept(experiment, tmp_path, swapped, variant="cause")
    assert "**Is it the rate?** It is not." in markdown(gather(folder, [experiment]))
    one = Outcome(ABOVE, (1.0,))
    assert answer(Why("cause", "?", (ABOVE,), "yes", "no"), [one]) == "Undecided, with one seed."


def test_a_claim_that_is_not_reproduced_says_whether_its_cause_was_looked_for(experiment: Experiment, tmp_path: Path) -> None:
    even = dict.fromkeys(ALL, 0.5)
    folder = kept(experiment, tmp_path, even)
    assert "no controlled experiment has looked for the cause yet" in markdown(gather(folder, [experiment]))
    experiment.file.write_text(DEFINITION.replace("[run]", f"{WHY}[run]", 1))
    assert "no controlled experiment" not in markdown(gather(folder, [experiment]))


def test_the_paper_s_own_difference_is_beside_ours(experiment: Experiment, tmp_path: Path) -> None:
    numbers = '[paper.numbers]\nFedBN = { accuracy = "70.5" }\nFedAvg = { accuracy = "60.0" }\n'
    experiment.file.write_text(DEFINITION + numbers)
    page = markdown(gather(kept(experiment, tmp_path, ALL), [experiment]))
    assert "| +10.3 (+8.9 to +11.8) | +10.5 | 1.9 |" in page


def test_a_claim_about_another_experiment_s_runs() -> None:
    """Of the repository: 004-F4 is about 004-T1's runs, and counts none as its own."""
    folder = ROOT / "experiments"
    (one,) = gather(folder, find(["004-F4"]))
    assert one.runs is not None
    assert one.runs.defined == runs_of(find(["004-T1"])[0], VARIANT, folder).defined
    assert "| as 004-T1 | – | – |" in markdown([one])


def test_hours_of_a_gpu_come_from_what_its_benchmark_wrote(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    (folder / RESULTS / HOURS).write_text(json.dumps({"device": "one", "hours": {"X-1": 3.21}}))
    assert "| reproduced | 1 of 1 | 6 of 6 | – | 3.2 |" in markdown(gather(folder, [experiment]))


def test_readme_s_table_has_what_was_run_and_names_what_was_not(experiment: Experiment, tmp_path: Path) -> None:
    folder, file = kept(experiment, tmp_path, ALL), tmp_path / "README.md"
    file.write_text("Before.\n<!-- evidence -->\nold\n<!-- end -->\nAfter.\n")
    assert file in write_evidence(folder, experiments=[experiment], readme_file=file)
    text = file.read_text()
    assert text.startswith("Before.\n<!-- evidence -->\n| claim |")
    assert text.endswith("<!-- end -->\nAfter.\n")
    assert "| [X-1](out/EVIDENCE.md#x-1) FedBN is ahead of FedAvg | reproduced | 1 of 1 |" in text
    assert "Not run yet" not in text
    shutil.rmtree(folder / RESULTS)
    assert "Not run yet, or not testable here: X-1." in readme(text, gather(folder, [experiment]), "out")
    with pytest.raises(ConfigError, match="README needs the lines <!-- evidence --> and <!-- end -->"):
        readme("nothing", [], "out")


def test_a_claim_s_page_begins_with_its_verdict(experiment: Experiment, tmp_path: Path) -> None:
    experiment.file.write_text(DEFINITION.replace("[run]", f"{WHY}[run]", 1))
    write_evidence(kept(experiment, tmp_path, ALL), tmp_path / "pages", [experiment])
    page = (tmp_path / "pages" / "X-1.html").read_text()
    said = ("FedBN is ahead of FedAvg", "reproduced", "+10.3 (+8.9 to +11.8)", "Is it the rate?", 'id="results"')
    told = [page.index(text) for text in said]
    assert told == sorted(told)


@pytest.mark.parametrize("name", ["001-G", "own-recalibration"])
def test_a_program_s_runs_are_kept_in_every_way_of_measuring(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (experiment,) = find([name])
    of, (defined, _) = study(experiment), definition(experiment, VARIANT)
    planned = of.plan(tmp_path, VARIANT, "/somewhere")
    assert len(defined) == len(planned) * len(of.ways) == len({cell.config.name for cell in defined})
    monkeypatch.setattr(type(planned[0]), "finished", lambda cell: cell is planned[1])
    planned[1].path.mkdir(parents=True)
    (planned[1].path / "environment.json").write_text('{"commit": "abc1234"}')
    planned[1].write_outcome("finished", 12.0)
    found = list(measured(planned, defined, of.ways, lambda cell: {way: n / 10 for n, way in enumerate(of.ways)}))
    assert [one.name for one in found] == [cell.config.name for cell in defined[len(of.ways) : 2 * len(of.ways)]]
    assert [one.curve[0]["accuracy"] for one in found] == [n / 10 for n in range(len(of.ways))]
    assert all("/somewhere" not in str(one.config) and str(tmp_path) not in str(one.config) for one in found)
    assert keep(found, defined, tmp_path / "kept.jsonl") == len(of.ways)
    assert [one.axes for one in load(tmp_path / "kept.jsonl", defined)] == [one.axes for one in found]


def test_every_claim_s_comparisons_are_of_places_in_its_table() -> None:
    """Of the repository: rows and columns that its cells would fill. Control: one that they would not."""
    for one in gather(ROOT / "experiments"):
        for compare, runs in ((one.claim.compare, one.runs), *((why.compare, of) for why, of in one.whys)):
            named = {place for comparison in compare for place in (comparison.left, comparison.right)}
            assert runs is None or named <= places(runs), one.experiment.name
    assert ("FedBN", "nowhere") not in places(runs_of(find(["001-T15"])[0], "cause", ROOT / "experiments"))


def places(runs: Runs) -> set[tuple[str, str]]:
    """Row and column of every cell that a variant defines, as if it had been run."""
    metric = {"round": 1, "accuracy": 0.5, "per-domain": dict.fromkeys(("amazon", "NYU"), 0.5)}
    return set(
        report_of(runs.settings, [Shown(c.config.name, c.axes, {}, "finished", rows=(metric,)) for c in runs.defined], "x").layout.groups
    )


def test_a_sweep_s_runs_are_measured_in_another_way(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question's rows are those that the program measured, not the runs' own."""
    again = WHY.replace('"cause"', '"evidence"').replace('"accuracy"', '"measured anew"') + f'measure = "{MEASURE}"\n'
    experiment.file.write_text(DEFINITION.replace("[run]", f"{again}[run]", 1))
    folder = kept(experiment, tmp_path, ALL)
    (tmp_path / "defined" / "programs").symlink_to(FOLDER / "programs")
    assert "**Is it the rate?** Not run yet." in markdown(gather(folder, [experiment]))
    study(experiment, MEASURE)
    module = importlib.import_module("fl_bn.experiments.programs.own_statistics")
    monkeypatch.setattr(module, "measured", lambda cell: {"as kept": 0.5, "measured anew": 0.5 + 0.01 * cell.config.seed})
    assert compact(experiment, VARIANT, tmp_path / "runs-out-evidence", "/somewhere", folder, MEASURE)[1:] == (12, 12)
    assert results_of(experiment, VARIANT, folder, MEASURE).name == "X-1.own_statistics.jsonl"
    page = markdown(gather(folder, [experiment]))
    assert "**Is it the rate?** It is not." in page
    assert "| FedBN | 50.0 (0.0) | 51.0 (1.0) |" in page.replace("**", "")


def test_exact_statistics_are_those_of_all_samples_in_every_layer() -> None:
    """Beside float64 by hand. Control: those of the first layer alone do not fit the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2)).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    measure(net, x)
    first, second = net[1], net[4]
    assert isinstance(first, nn.BatchNorm1d)
    assert isinstance(second, nn.BatchNorm1d)
    hidden = net[0](x)
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + first.eps).sqrt()
    inputs = net[3](normal.relu())
    assert second.running_mean is not None
    assert torch.allclose(second.running_mean, inputs.mean(0))
    assert not torch.allclose(second.running_mean, net[3](hidden.relu()).mean(0))
    assert (first.momentum, second.momentum) == (0.1, 0.1)
