"""Evidence: results that are committed, comparisons of paired seeds, verdicts, and a page that says what the files say."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest
import torch
from scipy.stats import t as student  # type: ignore[import-untyped]
from scipy.stats import ttest_1samp, ttest_rel
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
    LEVEL,
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
    parse_claim,
    undecided_for,
    verdict,
)
from fl_bn.sweep.evidence import RESULTS, Runs, compact, definition, gather, results_of, runs_of
from fl_bn.sweep.evidence import Tested as OneClaim  # pytest would take a name in Test... for tests
from fl_bn.sweep.evidence_page import markdown
from fl_bn.sweep.experiments import FOLDER, Experiment, find, study
from fl_bn.sweep.file import read
from fl_bn.sweep.kept import ANY_DATA, cells_of, keep, load, measured, own_config
from fl_bn.sweep.run import Place
from tests.sweeps.evidence_runs import ABOVE, ALL, DEFINITION, WHY, kept

ROOT = Path(__file__).parents[2]
MEASURE = "programs/own_statistics.py:measured"
NEAR = Comparison(("A", "x"), ("B", "x"), 2.0)


@pytest.fixture(scope="module")
def ours() -> list[OneClaim]:
    """What the repository has."""
    return gather(ROOT / "experiments")


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


def test_a_claim_is_not_reproduced_only_where_its_effect_would_have_been_seen() -> None:
    """Two seeds, cells that are missing, or a paper's difference that is too small to be found. Control: three seeds that would have."""
    found = Outcome(ABOVE, (1.0, -1.0, 0.5), paper=9.0)
    claim = Claim("A is ahead", compare=(ABOVE,))
    assert 1 < found.detectable < 9
    assert verdict(claim, [found]) == verdict(claim, [replace(found, paper=None)]) == NOT
    assert verdict(claim, [replace(found, differences=(1.0, -1.0))]) == UNDECIDED
    assert verdict(claim, [found], incomplete=True) == UNDECIDED
    assert verdict(claim, [found, replace(found, paper=1.0)]) == UNDECIDED
    assert undecided_for([found, replace(found, paper=1.0)]) == "what is claimed would not have been seen in 1 of 2 comparisons"
    assert undecided_for([found]) == ""


def test_a_distance_that_no_seeds_like_these_could_have_shown_is_undecided() -> None:
    """Control: seeds that differ less, around the bound itself."""
    claim = Claim("A is near B", compare=(NEAR,))
    assert verdict(claim, [Outcome(NEAR, (9.0, -9.0, 0.0))]) == UNDECIDED
    assert verdict(claim, [Outcome(NEAR, (1.9, 2.3, 1.7))]) == NOT


def test_a_contradicted_claim_is_not_reproduced_whatever_else_is_open() -> None:
    claim = Claim("A is ahead", compare=(ABOVE, ABOVE))
    against, coarse = Outcome(ABOVE, (-3.0, -3.1)), Outcome(ABOVE, (9.0, -9.0), paper=1.0)
    assert verdict(claim, [against, coarse], incomplete=True) == NOT
    assert verdict(claim, [coarse, coarse], incomplete=True) == UNDECIDED


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


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"claim": "c", "compared": []}, "key 'compared'"),
        ({"claim": ""}, "needs a claim"),
        ({"claim": "c", "hours": "two"}, "hours and resampled as numbers"),
        ({"claim": "c", "resampled": -0.25}, "hours and resampled as numbers"),
        ({"claim": "c", "resampled": True}, "hours and resampled as numbers"),
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


def test_seeds_that_divide_the_same_samples_have_the_variance_of_nadeau_and_bengio() -> None:
    """The closed form: stdev * sqrt(1 / n + test / train). Control: 0, which is the test of scipy."""
    values = (1.0, 4.5, 2.5, 3.0, -1.0)
    plain, one = Outcome(ABOVE, values), Outcome(ABOVE, values, resampled=0.25)
    error, quantile = stdev(values) * math.sqrt(1 / 5 + 0.25), student.ppf(0.975, 4)
    assert one.p == pytest.approx(2 * student.sf(2.0 / error, 4), rel=1e-9)
    assert one.half == pytest.approx(quantile * error, rel=1e-9)
    assert one.detectable == pytest.approx(plain.detectable * 1.5, rel=1e-9)  # sqrt(0.45 / 0.2)
    assert plain.p == pytest.approx(ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert (plain.half, one.half) == pytest.approx((quantile * stdev(values) / math.sqrt(5), 1.5 * plain.half), rel=1e-9)


def test_divisions_of_the_same_subjects_find_a_difference_that_is_none_as_rarely_as_said() -> None:
    """By simulation: two nearest-mean classifiers that read different noise of 100 people, ten divisions 4 : 1, 400 draws of people.
    Control: the test that takes divisions for independent draws finds one too often."""
    rng = np.random.default_rng(0)

    def wrongly_found(resampled: float, draws: list[tuple[float, ...]]) -> float:
        return sum(Outcome(ABOVE, d, resampled=resampled).p < LEVEL for d in draws) / len(draws)

    draws = [divisions(rng) for _ in range(400)]
    assert wrongly_found(0.25, draws) <= LEVEL + 0.025
    assert wrongly_found(0.0, draws) > 3 * LEVEL


def divisions(rng: np.random.Generator) -> tuple[float, ...]:
    """Points by which one classifier is ahead of the other, in each of ten divisions of the same people."""
    y = np.repeat([-1, 1], 50)
    views = y[:, None] * 0.3 + rng.standard_normal((2, 100, 5))
    found = []
    for _ in range(10):
        train, test = np.split(rng.permutation(100), [80])
        right = [(np.sign(x[test] @ (y[train] @ x[train])) == y[test]).mean() for x in views]
        found.append(100 * float(right[0] - right[1]))
    return tuple(found)


def test_every_claim_whose_seeds_divide_the_data_says_so(ours: list[OneClaim]) -> None:
    """Of the repository: where every seed has data of its own, ``held_out`` divides them 4 : 1. It is so of one claim alone."""
    divided = []
    for one in ours:
        paths: dict[tuple[object, ...], set[str]] = {}
        for cell in one.runs.defined if one.runs else ():
            paths.setdefault(tuple(value for axis, value in cell.axes.items() if axis != "seed"), set()).add(cell.config.data_path)
        own = any(len(of) > 1 for of in paths.values())
        assert one.claim.resampled == (0.25 if own else 0.0), one.experiment.name
        divided += [one.experiment.name] if own else []
    assert divided == ["001-T15"]


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


def test_what_001_t15_says_of_its_cause_is_what_its_runs_say(ours: list[OneClaim]) -> None:
    """The words that no answer has: new statistics were not seen to help FedBN more than FedAvg on the sites as they are."""
    (one,) = (one for one in ours if one.experiment.name == "001-T15")
    found = {str(o.comparison): o for why, runs in one.whys for o in runs.outcomes(why)}

    def gain(method: str, sites: str) -> Outcome:
        return found[f"{method} ({sites}, measured anew) > {method} ({sites}, as kept)"]

    pairs = zip(gain("FedBN", "as it is").differences, gain("FedAvg", "as it is").differences, strict=True)
    assert replace(gain("FedBN", "as it is"), differences=tuple(a - b for a, b in pairs)).state == OPEN
    assert (gain("FedBN", "as it is").state, gain("FedBN", "4-fold").state) == (OPEN, HELD)
    assert found["one client (site) > one client (shuffled)"].state == HELD
    assert {found[f"FedBN > FedAvg (4-fold{how})"].state for how in ("", ", measured anew")} == {OPEN}


def test_every_claim_s_comparisons_are_of_places_in_its_table(ours: list[OneClaim]) -> None:
    """Of the repository: rows and columns that its cells would fill. Control: one that they would not."""
    for one in ours:
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
