"""Evidence: results that are committed, and what the repository's own say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.catalogue import Experiment, find, study
from experiments.claims import FILE as CLAIMS_FILE
from experiments.claims import VARIANT
from experiments.definitions.programs.own_statistics import measure
from experiments.evidence import RESULTS, compact, definition, gather, known_cells, results_of
from experiments.evidence import Tested as OneClaim  # pytest would take a name in Test... for tests
from experiments.evidence_page import PAGE, markdown, readme, write_evidence
from experiments.kept import ANY_DATA, cells_of, keep, load, measured, own_config
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.evidence_runs import ALL, CLAIMS, DEFINITION, OWN, kept, register
from tests.sweeps.inner import ConfigError, carry_out, read, run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    file = tmp_path / "defined" / "X-1.toml"
    file.parent.mkdir()
    file.write_text(DEFINITION)
    made = Experiment("X-1", file, "Nobody's", "Two methods", (VARIANT, "cause"))
    register(made)
    return made


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
    page = markdown(gather(folder, experiment.file.parent))
    assert "FedBN is ahead of FedAvg | undecided | FedBN > FedAvg (accuracy): +10.5 | +10.0, n = 1 |" in page
    kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed0" not in name}, "more")
    assert compact(experiment, VARIANT, tmp_path / "runs-more-evidence", "/somewhere", folder)[1:] == (6, 6)
    page = markdown(gather(folder, experiment.file.parent))
    assert "FedBN is ahead of FedAvg | **reproduced** | FedBN > FedAvg (accuracy): +10.5 | +10.3 (+8.9 to +11.8), n = 3 |" in page
    assert "| FedBN > FedAvg (accuracy) | 70.5, 60: +10.50 | 61.3, 51.0 | +10.3 (+8.9 to +11.8) | 1.9 | 3 | held |" in page
    assert "Cells run: 6 of 6 (6 on abc1234)" in page


def test_cells_with_a_result_are_not_run_again(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check", lambda cells: None)  # reads the data, which are not there

    def perform(results: Path | None) -> str:
        known = known_cells(experiment, VARIANT, results) if results else {}
        carry_out(read(experiment.file, VARIANT, "/somewhere"), tmp_path / "again", 0, False, known=known, dry_run=True)
        return " ".join(capsys.readouterr().out.split())

    folder = kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed2" not in name})
    said = perform(folder)
    assert "2 runs, 0 of them finished before, 2 to do" in said
    assert f"4 more are not run, since their results are in {folder / RESULTS / 'X-1.jsonl'}" in said
    assert "seed0" not in said
    assert "6 runs, 0 of them finished before, 6 to do" in perform(None)


FEDBN = '["FedBN", "accuracy"]'


@listed(
    ("file", "old", "new", "about"),
    [
        ("X-1.toml", "rounds = 4", "rounds = 4\nlearning-rate = 0.2", "learning-rate"),
        ("X-1.toml", "FedBN = {", "Local = {", "FedBN-seed0"),
        (CLAIMS_FILE, FEDBN, '["FedBN", "nowhere"]', "X-1"),
        (CLAIMS_FILE, FEDBN, '["HBN", "accuracy"]', "X-1"),
        (CLAIMS_FILE, "place =", 'variant = "nothing"\nplace =', "'nothing'"),
        (CLAIMS_FILE, "place =", 'experiment = "X-2"\nplace =', "'X-2'"),
    ],
)
def test_results_and_claims_of_another_definition_are_refused(
    file: str, old: str, new: str, about: str, experiment: Experiment, tmp_path: Path
) -> None:
    folder, changed = kept(experiment, tmp_path, ALL), experiment.file.parent / file
    text = changed.read_text()
    gather(folder, changed.parent)  # control: as it is, and with another round of a place
    gather(folder, register(experiment, CLAIMS.replace(FEDBN, '["FedBN", "accuracy", 4]')))
    register(experiment)
    changed.write_text(text.replace(old, new, 1))
    with naming(about, ConfigError):
        gather(folder, changed.parent)
    changed.write_text(text)


def test_a_program_s_runs_are_kept_in_every_way_of_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (experiment,) = find(["own-unseen-domain"])
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
    there = load(tmp_path / "kept.jsonl", defined)
    assert [one.axes for one in there] == [one.axes for one in found]


def test_exact_statistics_are_those_of_all_samples_in_every_layer() -> None:
    """Beside float64 by hand. Control: those of the first layer alone do not fit the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2)).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    measure(net, x)
    first, second = net[1], net[4]
    hidden = net[0](x)
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + first.eps).sqrt()
    inputs = net[3](normal.relu())
    assert torch.allclose(second.running_mean, inputs.mean(0))
    assert not torch.allclose(second.running_mean, net[3](hidden.relu()).mean(0))
    assert (first.momentum, second.momentum) == (0.1, 0.1)


@pytest.mark.slow
def test_every_committed_result_is_found_though_its_run_ignored_keys() -> None:
    """Lines keep the keys that they were run with; those without effect are no part of what a line is."""
    ignoring = 0
    for file in sorted((ROOT / "experiments" / RESULTS).glob("*.jsonl")):
        name, variant, program, *_ = (*file.stem.split("."), "", "")
        defined, _ = definition(find([name])[0], variant or VARIANT, f"programs/{program}.py:measured" if program else "")
        results = load(file, defined)
        assert len(results) == len(file.read_text(encoding="utf-8").splitlines()), file.name
        configs = {cell.config.name: cell.config for cell in defined}
        ignoring += sum(not configs[kept.name].without_effect.isdisjoint(kept.config) for kept in results)
    assert ignoring > 100  # control: decays under cosine, and others


# The page of evidence, README's table and the pages of claims say what the files say




@pytest.fixture(scope="module")
def ours() -> list[OneClaim]:
    """What the repository has."""
    return gather(ROOT / "experiments")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_says_what_the_results_say(ours: list[OneClaim]) -> None:
    """Of the repository itself. The negative control changes one number of a copy."""
    folder, text = ROOT / "experiments", (ROOT / "README.md").read_text()
    page = markdown(ours)
    assert (folder / PAGE).read_text() == page, "python -m experiments evidence"
    assert text == readme(text, ours, "experiments"), "python -m experiments evidence --readme README.md"


@pytest.mark.slow
def test_every_claim_whose_seeds_divide_the_data_says_so(ours: list[OneClaim]) -> None:
    """Of the repository: where every seed has data of its own, ``held_out`` divides them 4 : 1. It is so of one claim alone."""
    divided = []
    for one in ours:
        cells = one.runs.defined if one.runs else ()
        at = [tuple(value for axis, value in cell.axes.items() if axis != "seed") for cell in cells]
        own = len({(here, cell.config.data_path) for here, cell in zip(at, cells, strict=True)}) > len({*at})
        assert one.claim.resampled == (0.25 if own else 0.0), one.experiment.name
        divided += [one.experiment.name] if own else []
    assert divided == ["001-T1-ABIDE"]


def test_pages_and_the_picture(experiment: Experiment, tmp_path: Path) -> None:
    folder, experiments = kept(experiment, tmp_path, ALL), experiment.file.parent
    made = write_evidence(folder, tmp_path / "pages", experiments)
    assert [path.name for path in made] == [PAGE, "evidence.png", "X-1.html"]
    assert all(path.stat().st_size > 1000 for path in made)
    file, page = folder / RESULTS / "X-1.jsonl", (folder / PAGE).read_text()
    assert page == markdown(gather(folder, experiments))
    file.write_text(file.read_text().replace("0.63", "0.62"))
    assert page != markdown(gather(folder, experiments))  # another number makes another page
    shutil.rmtree(folder / RESULTS)
    assert [path.name for path in write_evidence(folder, tmp_path / "none", experiments)] == [PAGE]
    assert "not run yet" in (folder / PAGE).read_text()


def test_a_question_is_answered_by_its_runs(experiment: Experiment, tmp_path: Path) -> None:
    experiments = register(experiment, CLAIMS + OWN)
    folder = kept(experiment, tmp_path, ALL)
    assert "**Is it the rate?** Not run yet." in markdown(gather(folder, experiments))
    kept(experiment, tmp_path, ALL, variant="cause")
    assert results_of(experiment, "cause", folder).name == "X-1.cause.jsonl"
    page = markdown(gather(folder, experiments))
    assert "#### own-rate\n\n**Is it the rate?** It is. (6 of 6 cells)" in page
    swapped = {name.replace("FedBN", "?").replace("FedAvg", "FedBN").replace("?", "FedAvg"): value for name, value in ALL.items()}
    shutil.rmtree(tmp_path / "runs-out-cause")
    kept(experiment, tmp_path, swapped, variant="cause")
    assert "**Is it the rate?** It is not." in markdown(gather(folder, experiments))
