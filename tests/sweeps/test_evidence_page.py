"""The page of evidence, README's table and the pages of claims say what the files say."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.catalogue import FOLDER, Experiment
from experiments.claims import LEAST, Rules, read_register
from experiments.evidence import CORE_HOURS, HOURS, RESULTS, gather, results_of
from experiments.evidence import Tested as OneClaim  # pytest would take a name in Test... for tests
from experiments.evidence_page import AMENDED, PAGE, markdown, picture, readme, short, write_evidence
from experiments.scale import too_short
from fl_bn.run.config import ConfigError
from tests.sweeps.evidence_runs import ALL, CLAIMS, OWN, kept, register

ROOT = Path(__file__).parents[2]
MOST = 630  # lines of the page: a reader's patience


@pytest.fixture(scope="module")
def ours() -> list[OneClaim]:
    """What the repository has."""
    return gather(ROOT / "experiments")


def test_the_page_says_what_the_results_say(ours: list[OneClaim]) -> None:
    """Of the repository itself. The negative control changes one number of a copy."""
    folder, text = ROOT / "experiments", (ROOT / "README.md").read_text()
    page = markdown(ours)
    assert (folder / PAGE).read_text() == page, "fl-bn experiments evidence"
    assert text == readme(text, ours, "experiments"), "fl-bn experiments evidence --readme README.md"
    assert len(page.splitlines()) <= MOST


def test_no_planned_cell_belongs_to_a_claim_that_it_cannot_decide(ours: list[OneClaim]) -> None:
    """By the rules: enough seeds, or a gap of the paper's that three decide, and a length at which the runs count. Controls below."""
    rules = read_register(FOLDER).rules
    assert {one.claim.id: why for one in ours if (why := undecidable(one, rules))} == {}
    (one,) = [one for one in ours if one.claim.id == "002-T1"]
    assert one.runs is not None
    fewer = replace(one.runs, defined=tuple(cell for cell in one.runs.defined if cell.config.seed < 3), kept=())
    assert len(undecidable(replace(one, runs=fewer), rules)) == 3
    assert undecidable(replace(one, runs=fewer), replace(rules, collapse=0.5)) == []  # the paper's gaps count as collapses
    assert len(undecidable(replace(one, runs=replace(one.runs, kept=())), replace(rules, share=0.5))) == 3


def undecidable(one: OneClaim, rules: Rules) -> list[str]:
    """Return the comparisons that cells without a result are planned for, although no results of theirs would decide them."""
    if one.runs is None:
        return []
    places, found = one.runs.places, []
    for comparison in one.claim.compare:
        sides = [places[row, column] for side in (comparison.left, comparison.right) for row, column, _ in side.places]
        seeds = min(len(cells) for cells in sides)
        enough = seeds >= rules.seeds or (seeds >= LEAST and not comparison.near and abs(comparison.gap or 0.0) > rules.collapse)
        short = not comparison.metric and any(too_short(cells, one.claim, rules) for cells in sides)
        if any(not cell.rows for cells in sides for cell in cells) and (short or not enough):
            found.append(str(comparison))
    return found


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


def test_another_number_in_a_result_makes_another_page(experiment: Experiment, tmp_path: Path) -> None:
    folder, experiments = kept(experiment, tmp_path, ALL), experiment.file.parent
    write_evidence(folder, experiments=experiments)
    page = (folder / PAGE).read_text()
    assert page == markdown(gather(folder, experiments))
    file = folder / RESULTS / "X-1.jsonl"
    file.write_text(file.read_text().replace("0.63", "0.62"))
    assert page != markdown(gather(folder, experiments))


def test_pages_and_the_picture(experiment: Experiment, tmp_path: Path) -> None:
    folder, experiments = kept(experiment, tmp_path, ALL), experiment.file.parent
    made = write_evidence(folder, tmp_path / "pages", experiments)
    assert [path.name for path in made] == [PAGE, "evidence.png", "X-1.html"]
    assert all(path.stat().st_size > 1000 for path in made)
    shutil.rmtree(folder / RESULTS)
    assert [path.name for path in write_evidence(folder, tmp_path / "none", experiments)] == [PAGE]
    assert "not run yet" in (folder / PAGE).read_text()


def test_the_picture_has_the_papers_difference_beside_ours(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    drawn = picture(gather(folder, experiment.file.parent))
    assert drawn is not None
    assert "FedBN > FedAvg (accuracy): +10.3 (the paper +10.5), held" in drawn.alt


def test_a_claims_page_counts_all_cells_and_names_its_own_commands(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, dict(list(ALL.items())[:2]))
    write_evidence(folder, tmp_path / "pages", experiment.file.parent)
    page = (tmp_path / "pages" / "X-1.html").read_text()
    assert "fl-bn experiments run X-1 --variant evidence" in page
    assert "fl-bn sweep" not in page  # there is no folder of a sweep
    assert "2 of 6" in page
    assert "runs finished" not in page


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


def test_a_claim_without_runs_has_the_papers_numbers_and_says_what_is_to_be_run(experiment: Experiment, tmp_path: Path) -> None:
    text = CLAIMS.replace("paper = [70.5, 60.0]", "paper = [70.5, 60.0], spread = [0.5, 1]")
    page = markdown(gather(tmp_path, register(experiment, text)))
    assert "| not run yet | FedBN > FedAvg (accuracy): +10.5 | – |" in page
    assert "FedBN > FedAvg (accuracy): 70.5, 60: +10.50 (± 0.5, 1). To be run: `X-1`, variant `evidence`." in page
    text = CLAIMS.replace("paper = [70.5, 60.0]", 'figure = "4"')
    assert "FedBN > FedAvg (accuracy): figure 4 only" in markdown(gather(tmp_path, register(experiment, text)))
    text = CLAIMS.replace("paper = [70.5, 60.0]", 'figure = "4", about = [70, 60]')
    assert "FedBN > FedAvg (accuracy): figure 4: about 70, 60" in markdown(gather(tmp_path, register(experiment, text)))


def test_hours_come_from_what_the_benchmarks_wrote(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir()
    before = markdown(gather(tmp_path, experiment.file.parent))
    assert "hours of a GPU" not in before
    assert "core hours" not in before
    (tmp_path / RESULTS / HOURS).write_text(json.dumps({"device": "one", "hours": {"X-1": 3.21}}))
    assert "The paper's own setting takes about 3.2 hours of a GPU." in markdown(gather(tmp_path, experiment.file.parent))
    (tmp_path / RESULTS / CORE_HOURS).write_text(json.dumps({"device": "one", "hours": {"X-1.evidence": 1234.5, "X-1.paper": 9.9}}))
    assert "It takes about 1,234.5 core hours." in markdown(gather(tmp_path, experiment.file.parent))


def test_what_is_near_has_its_distance(experiment: Experiment, tmp_path: Path) -> None:
    """As far apart as in the paper. Control: a paper in which they are nearer."""
    folder = kept(experiment, tmp_path, ALL)
    near = register(experiment, CLAIMS.replace("paper = [70.5, 60.0]", "near = true, paper = [71.5, 60.0]"))
    assert "| held (within 12.5) |" in markdown(gather(folder, near))
    register(experiment, CLAIMS.replace("paper = [70.5, 60.0]", "near = true, paper = [61.5, 60.0]"))
    assert "| contradicted (within 2.5) |" in markdown(gather(folder, near))


def test_a_run_that_is_too_short_says_so_and_what_the_test_alone_would_say(experiment: Experiment, tmp_path: Path) -> None:
    """Of 4 rounds of 5 steps. Control: a paper of as many."""
    folder = kept(experiment, tmp_path, ALL)
    experiments = register(experiment, CLAIMS.replace("place =", "steps = [200]\nplace ="))
    page = markdown(gather(folder, experiments))
    assert "**Verdict: not at scale.** Not decided: 10 % of the paper's steps per client (1 of 1)." in page
    assert "| not at scale; there held |" in page
    register(experiment, CLAIMS.replace("place =", "steps = [20]\nplace ="))
    assert "**Verdict: reproduced.**" in markdown(gather(folder, experiments))


def test_gains_are_compared_and_other_rounds_and_metrics(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    gain = '[["FedBN", "accuracy"], ["FedAvg", "accuracy"]]'
    text = CLAIMS.replace('["FedBN", "accuracy"]', gain).replace('right = ["FedAvg", "accuracy"]', f"right = {gain}")
    assert "| 10.3, 10.3 | +0.0 (+0.0 to +0.0) |" in markdown(gather(folder, register(experiment, text)))
    text = CLAIMS.replace('"accuracy"], paper', '"accuracy"], metric = "loss", paper')
    assert "| loss: FedBN > FedAvg (accuracy) | 70.5, 60: +10.50 | 0.250, 0.250 | +0.000" in markdown(
        gather(folder, register(experiment, text))
    )
    text = CLAIMS.replace('["FedBN", "accuracy"]', '["FedBN", "accuracy", 3]')
    assert "not run yet" in markdown(gather(folder, register(experiment, text)))  # round 3 was not evaluated


def test_readme_s_table_has_what_was_run_and_names_what_was_not(experiment: Experiment, tmp_path: Path) -> None:
    folder, file, experiments = kept(experiment, tmp_path, ALL), tmp_path / "README.md", experiment.file.parent
    file.write_text("Before.\n<!-- evidence -->\nold\n<!-- end -->\nAfter.\n")
    assert file in write_evidence(folder, experiments=experiments, readme_file=file)
    text = file.read_text()
    assert text.startswith(
        "Before.\n<!-- evidence -->\nOf 1 claims of the five papers 1 have runs here, and 1 are decided by them.\n\n| method |"
    )
    assert text.endswith("<!-- end -->\nAfter.\n")
    assert "| Nobody's | [X-1](out/EVIDENCE.md#x-1) FedBN is ahead of FedAvg. FedBN > FedAvg (accuracy): +10.5 | +10.3" in text
    assert "n = 3 | reproduced |" in text
    assert "not run yet" not in text
    second = '{ left = ["FedAvg", "accuracy"], right = ["FedBN", "accuracy"], near = true, margin = 1.0, figure = "2" }'
    for headline, shown in ((1, "FedBN > FedAvg (accuracy): +10.5 | +10.3"), (2, "FedAvg near FedBN (accuracy): figure only | -10.3")):
        more = CLAIMS.replace("compare = [", f"headline = {headline}\ncompare = [").replace(" }]", f" }}, {second}]")
        assert shown in readme(text, gather(folder, register(experiment, more)), "out")
    register(experiment, CLAIMS)
    shutil.rmtree(folder / RESULTS)
    assert "1 more are not run yet, or not testable here: [the page](out/EVIDENCE.md) names them." in readme(
        text, gather(folder, experiments), "out"
    )
    with pytest.raises(ConfigError, match="the page needs the lines <!-- evidence --> and <!-- end -->"):
        readme("nothing", [], "out")


def test_claims_that_cannot_be_run_say_why(experiment: Experiment, tmp_path: Path) -> None:
    text = CLAIMS.replace(
        "compare =", 'untestable = "There are no data."\n[[claims]]\nid = "X-2"\nplace = "Table 2; l. 7"\nexperiment = "X-1"\n'
    )
    text = text.partition('experiment = "X-1"\n')[0] + 'experiment = "X-1"\nclaim = "The bytes are the paper\'s"\nexact = "tests/x.py"\n'
    claims = gather(tmp_path, register(experiment, text))
    page = markdown(claims)
    assert "| not testable here | – | – |" in page
    assert "**Verdict: not testable here.** There are no data." in page
    assert "| **reproduced (exactly)** | exact | equal |" in page
    assert "The numbers are equal: `tests/x.py`." in page
    assert "Exactly as in the paper: X-2." in short(claims, PAGE)


def test_a_claim_s_page_begins_with_its_verdict(experiment: Experiment, tmp_path: Path) -> None:
    register(experiment, CLAIMS + OWN)
    write_evidence(kept(experiment, tmp_path, ALL), tmp_path / "pages", experiment.file.parent)
    page = (tmp_path / "pages" / "X-1.html").read_text()
    said = ("FedBN is ahead of FedAvg", "reproduced", "+10.3 (+8.9 to +11.8)", "Is it the rate?", 'id="results"')
    assert "6 of 6 (6 on abc1234)" in page
    told = [page.index(text) for text in said]
    assert told == sorted(told)
