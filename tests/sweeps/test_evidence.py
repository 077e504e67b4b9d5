"""Evidence: results that are committed, and what the repository's own say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.catalogue import Experiment, find, study
from experiments.claims import FILE as CLAIMS_FILE
from experiments.claims import VARIANT
from experiments.evidence import RESULTS, compact, definition, gather, known_cells, results_of
from experiments.evidence_page import PAGE, markdown, readme, write_evidence
from experiments.kept import ANY_DATA, cells_of, load, measured, own_config
from fl_bn.app.config import ConfigError
from fl_bn.app.sweep import run
from fl_bn.app.sweep.file import read
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.evidence_runs import ALL, CLAIMS, DEFINITION, OWN, finish, kept, register

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


def test_cells_with_a_result_are_not_run_again(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed2" not in name})
    planned = run.plan(read(experiment.file, VARIANT, "/somewhere"), tmp_path / "again", known=known_cells(experiment, VARIANT, folder))
    assert {cell.config.name for cell in planned.todo} == {name for name in ALL if "seed2" in name}


FEDBN = '["FedBN", "accuracy"]'


@listed(
    ("file", "old", "new", "about"),
    [
        ("X-1.toml", "rounds = 4", "rounds = 4\nlearning-rate = 0.2", "learning-rate"),
        ("X-1.toml", "FedBN = {", "Local = {", "FedBN-seed0"),
        (CLAIMS_FILE, FEDBN, '["FedBN", "nowhere"]', "X-1"),
        (CLAIMS_FILE, "place =", 'experiment = "X-2"\nplace =', "'X-2'"),
    ],
)
def test_results_and_claims_of_another_definition_are_refused(
    file: str, old: str, new: str, about: str, experiment: Experiment, tmp_path: Path
) -> None:
    folder, changed = kept(experiment, tmp_path, ALL), experiment.file.parent / file
    text = changed.read_text()
    gather(folder, changed.parent)  # control
    changed.write_text(text.replace(old, new, 1))
    with naming(about, ConfigError):
        gather(folder, changed.parent)
    changed.write_text(text)


def test_a_program_s_runs_are_kept_in_every_way_of_measuring(tmp_path: Path) -> None:
    (experiment,) = find(["own-unseen-domain"])
    of, (defined, _) = study(experiment), definition(experiment, VARIANT)
    planned = of.plan(tmp_path, VARIANT, "/somewhere")
    assert len(defined) == len(planned) * len(of.ways)
    finish(planned[1], [0.5] * planned[1].config.rounds)
    (planned[1].path / "environment.json").write_text('{"commit": "abc1234"}')
    found = [*measured(planned, defined, of.ways, lambda cell: {way: n / 10 for n, way in enumerate(of.ways)})]
    mine = defined[len(of.ways) : 2 * len(of.ways)]
    assert [(one.name, one.curve[0]["accuracy"]) for one in found] == [(cell.config.name, n / 10) for n, cell in enumerate(mine)]
    assert not any(str(tmp_path) in str(one.config) for one in found)


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


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_says_what_the_results_say() -> None:
    """Of the repository itself, and README's table."""
    ours, text = gather(ROOT / "experiments"), (ROOT / "README.md").read_text()
    assert (ROOT / "experiments" / PAGE).read_text() == markdown(ours), "python -m experiments evidence"
    assert text == readme(text, ours, "experiments"), "python -m experiments evidence --readme README.md"


def test_pages_and_the_picture(experiment: Experiment, tmp_path: Path) -> None:
    folder, experiments = kept(experiment, tmp_path, ALL), experiment.file.parent
    made = write_evidence(folder, tmp_path / "pages", experiments)
    assert [path.name for path in made] == [PAGE, "evidence.png", "X-1.html"]
    assert all(path.stat().st_size > 1000 for path in made)
    assert (folder / PAGE).read_text() == markdown(gather(folder, experiments))
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
