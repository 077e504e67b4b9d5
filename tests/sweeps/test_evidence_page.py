"""The page of evidence, README's table and the pages of claims say what the files say."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments.catalogue import FOLDER, Experiment, find
from experiments.claims import read_register
from experiments.evidence import RESULTS, definition, gather, results_of
from experiments.evidence import Tested as OneClaim  # pytest would take a name in Test... for tests
from experiments.evidence_page import AMENDED, PAGE, markdown, readme, write_evidence
from tests.sweeps.evidence_runs import ALL, CLAIMS, OWN, kept, register
from tests.sweeps.inner import SEED

ROOT = Path(__file__).parents[2]
MOST = 630  # lines of the page: a reader's patience


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
    assert len(page.splitlines()) <= MOST


def test_cells_of_a_commit_that_the_history_lacks_say_so() -> None:
    """Control: the other commits are there."""
    lines = [line for file in (ROOT / "experiments" / RESULTS).glob("*.jsonl") for line in file.read_text().splitlines()]
    commits = {json.loads(line)["commit"].rstrip("+") for line in lines}
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False).stdout.strip()
    if shallow != "false":
        pytest.skip("this copy has no history")
    said = subprocess.run([*git, "cat-file", "--batch-check"], input="\n".join(commits), capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in said.splitlines() if line.endswith("missing")} == set(AMENDED)


@pytest.mark.slow
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


def test_every_method_of_the_repository_s_rates_stands_in_its_claim() -> None:
    """Of the repository: the claim's rate is among those that were tried, for all methods."""
    rated = [claim for claim in read_register(FOLDER).claims if claim.rates]
    assert len(rated) > 3
    for claim in rated:
        (experiment,) = find([claim.of])
        claimed = {(cell.axes["method"], cell.config.learning_rate) for cell in definition(experiment, claim.variant)[0]}
        here = {(cell.axes["method"], cell.config.learning_rate) for cell in definition(experiment, claim.rates)[0]}
        methods = {method for method, _ in here}
        assert methods <= {method for method, _ in claimed}, claim.id
        assert all(here & {(m, rate) for m, rate in claimed if m == method} for method in methods), claim.id
        assert all(SEED not in cell.axes or cell.config.seed >= 10 for cell in definition(experiment, claim.rates)[0]), claim.id
