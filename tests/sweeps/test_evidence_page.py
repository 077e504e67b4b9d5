"""The page of evidence, README's table and the pages of claims say what the files say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fl_bn.federation.adaptation import HOW
from fl_bn.report.layout import tabulate
from fl_bn.run.config import ConfigError
from fl_bn.sweep.claims import (
    VARIANT,
    Outcome,
    Why,
    answer,
)
from fl_bn.sweep.evidence import HOURS, RESULTS, claim_of, gather, results_of, runs_of
from fl_bn.sweep.evidence_page import PAGE, markdown, readme, short, write_evidence
from fl_bn.sweep.experiments import Experiment, find
from tests.sweeps.evidence_runs import ABOVE, ALL, DEFINITION, WHY, kept

ROOT = Path(__file__).parents[2]


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


def test_pages_and_the_picture(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    made = write_evidence(folder, tmp_path / "pages", [experiment])
    assert [path.name for path in made] == [PAGE, "evidence.png", "X-1.html"]
    assert all(path.stat().st_size > 1000 for path in made)
    shutil.rmtree(folder / RESULTS)
    assert [path.name for path in write_evidence(folder, tmp_path / "none", [experiment])] == [PAGE]
    assert "not run yet" in (folder / PAGE).read_text()


def test_a_claims_page_counts_all_cells_and_names_its_own_commands(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, dict(list(ALL.items())[:2]))
    write_evidence(folder, tmp_path / "pages", [experiment])
    page = (tmp_path / "pages" / "X-1.html").read_text()
    assert "fl-bn experiments run X-1 --variant evidence" in page
    assert "fl-bn sweep" not in page  # there is no folder of a sweep
    assert "2 of 6" in page
    assert "runs finished" not in page


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
    assert answer(Why("cause", "?", (ABOVE,), "yes", "no"), [one]) == "Undecided: fewer than 3 seeds."


def test_an_answer_says_what_would_not_have_been_seen() -> None:
    """Where seeds do not separate the sides. Controls: they do, for and against; one seed, of which nothing is known."""
    open_, wide = Outcome(ABOVE, (1.0, -1.0, 0.5)), Outcome(ABOVE, (9.0, -9.0, 1.0))
    held, against = Outcome(ABOVE, (3.0, 3.1, 2.9)), Outcome(ABOVE, (-3.0, -3.1, -2.9))
    why = Why("cause", "?", (ABOVE,), "yes", "no")
    low, high = f"{open_.detectable:.1f}", f"{wide.detectable:.1f}"
    assert answer(why, [open_]) == f"no Not separated: a difference below {low} points would not reliably have been seen."
    assert answer(why, [open_, wide]).endswith(f"below {low} to {high} points, by comparison, would not reliably have been seen.")
    assert answer(why, [held, open_]).startswith("In part: 1 of 2 comparisons held. Not separated: ")
    assert (answer(why, [held]), answer(why, [against])) == ("yes", "no")
    assert answer(why, [Outcome(ABOVE, (1.0,))]) == "Undecided: fewer than 3 seeds."


def test_words_about_causes_state_no_number_and_no_absence() -> None:
    """Of the repository: what nothing generates or checks. A `no` is said of comparisons that are not separated, too."""
    whys = [why for claim in map(claim_of, find()) if claim for why in claim.why]
    texts = [claim.cause for claim in map(claim_of, find()) if claim] + [text for why in whys for text in (why.yes, why.no)]
    assert [text for text in texts if re.search(r"\d", text)] == []
    assert [why.no for why in whys if "seen" not in why.no] == []


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


def test_another_measurement_is_compared_as_it_is_after_the_last_round(experiment: Experiment, tmp_path: Path) -> None:
    """The loss, of which round 4 has 0.25 everywhere. Controls: the accuracies beside it differ; a column that no run has is not run."""
    more = '{ left = ["FedBN", "accuracy"], right = ["FedAvg", "accuracy"], metric = "METRIC" }]'
    with_loss = DEFINITION.replace('"accuracy"] }]', f'"accuracy"] }}, {more}', 1)
    experiment.file.write_text(with_loss.replace("METRIC", "loss"))
    page = markdown(gather(kept(experiment, tmp_path, ALL), [experiment]))
    assert "| FedBN > FedAvg (accuracy) | +10.3 (+8.9 to +11.8) |" in page
    assert "| loss: FedBN > FedAvg (accuracy) | +0.000 (+0.000 to +0.000) | – | 0.000 | 3 | 1.000 | not separated |" in page
    experiment.file.write_text(with_loss.replace("METRIC", "drift"))
    page = markdown(gather(tmp_path / "out", [experiment]))
    assert "| largest drift of a mean (sd): FedBN > FedAvg (accuracy) | – | – | – | 0 | – | not run |" in page


def test_an_undecided_claim_says_what_keeps_it_open(experiment: Experiment, tmp_path: Path) -> None:
    """The paper's difference is too small to be found. Control: one that is not."""
    even = {name: 0.5 + 0.01 * (n % 4) for n, name in enumerate(ALL)}
    folder = kept(experiment, tmp_path, even)
    numbers = '[paper.numbers]\nFedBN = { accuracy = "60.5" }\nFedAvg = { accuracy = "60.0" }\n'
    experiment.file.write_text(DEFINITION + numbers)
    said = "**Verdict: undecided: what is claimed would not have been seen in 1 of 1 comparisons.** Comparisons: 1 not separated."
    assert said in markdown(gather(folder, [experiment]))
    experiment.file.write_text(DEFINITION + numbers.replace("60.5", "90.5"))
    assert "**Verdict: not reproduced.** Comparisons: 1 not separated." in markdown(gather(folder, [experiment]))


def test_the_unseen_client_s_page_explains_its_rows_and_prints_no_other_data_as_best() -> None:
    """Of the repository. Control: the same table without the key has that row in bold."""
    (one,) = gather(ROOT / "experiments", find(["001-G"]))
    assert one.runs is not None
    assert one.runs.report is not None
    table = one.runs.report.table
    assert {row for row, _ in table.best} <= set(HOW)
    assert all(f'"{row}"' in one.runs.settings.notes for row in table.entries)
    assert one.runs.settings.notes in markdown([one])
    layout = replace(table.layout, settings=replace(table.layout.settings, apart=()))
    assert "known domains" in {row for row, _ in tabulate(layout, ()).best}


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
    assert text.startswith(
        "Before.\n<!-- evidence -->\nOf 1 claims 1 has been run so far, over 3 seeds, and judged by a paired test.\n\n| claim |"
    )
    assert text.endswith("<!-- end -->\nAfter.\n")
    assert "| [X-1](out/EVIDENCE.md#x-1) FedBN is ahead of FedAvg | reproduced | 1 of 1 |" in text
    assert "Not run yet" not in text
    shutil.rmtree(folder / RESULTS)
    assert "Not run yet, or not testable here: X-1." in readme(text, gather(folder, [experiment]), "out")
    assert "None of 1 claims has been run so far." in readme(text, gather(folder, [experiment]), "out")
    with pytest.raises(ConfigError, match="the page needs the lines <!-- evidence --> and <!-- end -->"):
        readme("nothing", [], "out")


def test_readme_counts_the_claims_that_were_run_and_their_seeds(experiment: Experiment, tmp_path: Path) -> None:
    """One claim of three seeds, another of two. Control: one that was not run is counted as a claim alone."""
    folder, copies = kept(experiment, tmp_path, ALL), [replace(experiment, name=name) for name in ("X-2", "X-3")]
    lines = (folder / RESULTS / "X-1.jsonl").read_text().splitlines(keepends=True)
    (folder / RESULTS / "X-2.jsonl").write_text("".join(line for line in lines if "seed2" not in line))
    said = "Of 3 claims 2 have been run so far, over 2 to 3 seeds, and judged by a paired test."
    assert short(gather(folder, [experiment, *copies]), PAGE).startswith(said)


def test_a_claim_s_page_begins_with_its_verdict(experiment: Experiment, tmp_path: Path) -> None:
    experiment.file.write_text(DEFINITION.replace("[run]", f"{WHY}[run]", 1))
    write_evidence(kept(experiment, tmp_path, ALL), tmp_path / "pages", [experiment])
    page = (tmp_path / "pages" / "X-1.html").read_text()
    said = ("FedBN is ahead of FedAvg", "reproduced", "+10.3 (+8.9 to +11.8)", "Is it the rate?", 'id="results"')
    assert "6 of 6 (6 on abc1234)" in page
    told = [page.index(text) for text in said]
    assert told == sorted(told)
