"""Write EVIDENCE.md, its picture, and the table in README.md.

They show for each claim the paper's difference, this project's difference, and a verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.catalogue import FOLDER
from experiments.claims import Comparison
from experiments.difference_pictures import Difference, differences
from experiments.evidence import Runs, Tested, gather
from experiments.judging import AGAINST, HELD, LESS, MISSING, NOT_AT_SCALE, NOT_RUN, OPEN, SMALL, UNTESTABLE, Outcome, answer
from experiments.marks import replaced
from experiments.rates import in_words, tried
from fl_bn.app.pictures import Picture
from fl_bn.app.report.page import report_page
from fl_bn.support import durable

PAGE, PICTURE = "EVIDENCE.md", "evidence"
AMENDED = ("bcaaa6b", "a81997a")  # commits that were amended after cells had run on them, so that the history lacks them
HEAD = (
    "# Evidence",
    "",
    "What five papers claim, and what runs of this repository say of it. Differences are in points of test accuracy: the first method less",
    "the second, paired by seed. Behind ours stand a 95 % interval and the number of seeds.",
    "",
    "- **reproduced**: all of the paper's comparisons held. **mostly reproduced (k of n)**: more than half held, and none is contradicted.",
    "- **contradicted (k of n)**: so many came out the other way.",
    "- **smaller than the paper's (k of n)**: so many show no difference, and would have shown one as large as the paper's.",
    "- **undecided**: too few seeds, or too much noise, to say.",
    "- **not at scale**: our runs are much shorter than the paper's, so they say nothing, whatever they show.",
    "- **not testable here**: no data. **not run yet**: no run.",
)
RULES = (
    "## Rules",
    "",
    "They are stated before anything is run, in `experiments/definitions/claims.toml`. A comparison *held* where a paired two-sided t-test",
    "has p < 0.05 in the claim's direction. Where the paper says that two are equal, the interval must lie within the paper's own gap",
    "and a margin (one point unless said otherwise). Five seeds decide; three do where the difference is more than ten points, and",
    "for questions of our own, which are judged at the last round.",
    "*Detectable* is the smallest true difference that the test finds in four of five cases. A claim about converged accuracy needs a",
    "third of the paper's local steps per client in every phase of the schedule, or a curve that is flat at the end of each. A phase",
    "whose rate falls to nothing, as along a cosine, ends flat however short it is, and does not count as flat. Runs of a pair share",
    "data, division and initial weights. Where seeds divide the same subjects anew, the variance is corrected for their overlap",
    "(Nadeau and Bengio 2003). Elsewhere the test data are the same for all seeds. No correction is made for the number of",
    "comparisons. Lines (l.) are those of the papers' texts. A commit that was *since amended* is not in the history.",
    "",
    "This page is written from the files in `results`. No number of ours is typed by hand, and a test compares both.",
    "",
    "    python experiments/evidence_data.py SOURCE DATA     # its text says what SOURCE holds",
    "    python -m experiments run all --variant evidence --jobs 1 --data DATA --output RUNS     # resumable",
    "    python -m experiments compact RUNS --data DATA     # finished cells, into experiments/results",
    "    python -m experiments evidence --readme README.md     # this page, and README's table; --pages FOLDER: one per claim",
)


def readme(text: str, claims: Sequence[Tested], folder: str) -> str:
    """Return the text of the README with a new table of verdicts between its marks.

    Args:
        text: The text of the README.
        claims: The claims with their results.
        folder: The folder of EVIDENCE.md, relative to the README.

    Raises:
        ConfigError: The text lacks the marks ``<!-- evidence -->`` and ``<!-- end -->``.
    """
    return replaced(text, "evidence", short(claims, f"{folder}/{PAGE}"))


def write_evidence(folder: Path, pages: Path | None = None, experiments: Path = FOLDER, readme_file: Path | None = None) -> list[Path]:
    """Judge all claims by the committed results, and write EVIDENCE.md and its picture.

    Args:
        folder: The folder of the results and of EVIDENCE.md.
        pages: The folder in which to write one page per claim with results; None: write no pages.
        experiments: The folder of the register and of the experiments' files.
        readme_file: The README whose table is written; None: write no README.

    Returns:
        The paths of the files that were written.
    """
    claims = gather(folder, experiments)
    made = [folder / PAGE]
    durable.write(made[0], markdown(claims).encode(), mode=0o666)
    if drawn := picture(claims):
        made.append(folder / f"{drawn.name}.png")
        durable.write(made[-1], drawn.png, mode=0o666)
    if readme_file:
        there = folder.resolve().relative_to(readme_file.resolve().parent).as_posix()
        durable.write(readme_file, readme(readme_file.read_text(encoding="utf-8"), claims, there).encode(), mode=0o666)
        made.append(readme_file)
    for one in claims:
        if pages and one.runs and one.runs.report:
            pages.mkdir(parents=True, exist_ok=True)
            made.append(pages / f"{one.claim.id}.html")
            durable.write(made[-1], report_page(one.runs.report).encode(), mode=0o666)
    return made


def markdown(claims: Sequence[Tested]) -> str:
    """Return the text of EVIDENCE.md: a table with one line per claim, the picture, and a section per paper."""
    lines = [*HEAD, "", "| claim | verdict | the paper's difference | ours |", "|---|---|---|---|"]
    lines += [
        f"| [{one.claim.id}](#{one.anchor}) {one.claim.claim} | {_bold(one.verdict)} | {_paper(one)} | {_ours(one)} |" for one in claims
    ]
    if any(one.was_run for one in claims):
        lines += ["", f"![the papers' differences and ours]({PICTURE}.png)"]
    for paper in dict.fromkeys(one.experiment.paper for one in claims):
        lines += ["", f"## {paper}"]
        for one in claims:
            lines += ["", *_section(one)] if one.experiment.paper == paper else []
    return "\n".join([*lines, "", *RULES]) + "\n"


def short(claims: Sequence[Tested], page: str) -> str:
    """Return the text for the README: a table of what is decided, and a sentence that counts the claims.

    Args:
        claims: The claims with their results.
        page: The path of EVIDENCE.md, relative to the README.
    """
    run = [one for one in claims if one.was_run]
    decided = [one for one in run if one.verdict not in (OPEN, NOT_AT_SCALE)]
    counts = [(len([one for one in run if one.verdict == verdict]), verdict) for verdict in (OPEN, NOT_AT_SCALE)]
    others = "".join(f", {number} {verdict}" for number, verdict in counts if number)
    lines = ["| the paper says | we measured | so |", "|---|---|---|"]
    for one in decided:
        lines.append(f"| [{one.claim.claim}]({page}#{one.anchor}): {_paper(one)} | {_ours(one)} | {one.verdict} |")
    against: list[tuple[str, str, str]] = []  # questions of ours whose answer is against the method: one row
    for one in claims:
        for own, _, outcomes in one.own:
            if wrong := [outcome for outcome in outcomes if outcome.state == AGAINST]:
                asked = f"[{'; '.join(str(outcome.comparison) for outcome in wrong)}]({page}#{own.id})"
                against.append((asked, "; ".join(map(_measured, wrong)), answer(own, outcomes)))
    if against:
        lines.append(f"| we asked: {' | '.join('<br>'.join(column) for column in zip(*against, strict=True))} |")
    lines += ["", f"Of {len(claims)} claims of the five papers {len(run)} have runs here: {len(decided)} decided{others} ([all]({page}))."]
    return "\n".join(lines) + "\n"


def picture(claims: Sequence[Tested]) -> Picture | None:
    """Return the picture of the papers' and this project's differences; None if no comparison can be drawn.

    A comparison is drawn if it has results and compares accuracies, in points.
    """
    groups = {
        f"{one.claim.id}: {one.verdict}": [
            Difference(str(o.comparison), o.mean, o.half, o.state, o.limit, o.comparison.gap, bool(o.comparison.paper))
            for o in one.outcomes
            if o.state != MISSING and not o.comparison.metric
        ]
        for one in claims
    }
    groups = {name: rows for name, rows in groups.items() if rows}
    return differences(PICTURE, groups, (HELD, AGAINST, LESS, OPEN, SMALL)) if groups else None


def _section(one: Tested) -> list[str]:
    claim = one.claim
    lines = [f"### {claim.id}", "", f"{claim.claim}. *{claim.place}.* {_decided(one, bold=True)}"]
    if not one.was_run:
        if one.outcomes:
            said = [f"{o.comparison}: {_numbers(o.comparison)}" for o in one.outcomes]
            lines[-1] += f" The paper's numbers: {'; '.join(said)}. To be run: `{claim.of}`, variant `{claim.variant}`."
        return lines + _own(one)
    for title, text in _words(one):
        lines += ["", f"{title}: {text}"] if text else []
    lines += ["", *_table(one.outcomes)]
    for title, text in _cells(one.runs):
        lines += ["", f"{title}: {text}"]
    return lines + _own(one)


def _own(one: Tested) -> list[str]:
    lines = []
    for own, runs, outcomes in one.own:
        said = f"**{own.asks}** {answer(own, outcomes)} ({len(runs.kept)} of {len(runs.defined)} cells)"
        lines += ["", f"#### {own.id}", "", said]
        lines += ["", *_table(outcomes)] if any(o.differences for o in outcomes) else []
    return lines


def _words(one: Tested) -> tuple[tuple[str, str], ...]:
    rates = in_words(tried(one.runs, one.rates)) if one.runs and one.rates else ""
    return (
        ("What differs from the paper", one.claim.differs and f"{one.claim.differs}."),
        ("Compared", "the best round by test accuracy, as in the authors' code." if one.runs and one.runs.settings.at == "best" else ""),
        ("Learning rates, tried on samples held out of the training part", rates and f"{rates}."),
        ("Cause", one.claim.cause),
    )


def _decided(one: Tested, bold: bool = False) -> str:
    """Return a text with the verdict, and with the reasons why comparisons are undecided."""
    said = f"Verdict: {one.verdict}."
    if one.claim.exact:
        return f"{f'**{said}**' if bold else said} The numbers are equal: `{one.claim.exact}`."
    less = sum(outcome.state == LESS for outcome in one.outcomes)
    if less and LESS not in one.verdict:
        said += f" Smaller than the paper's: {less} of {len(one.outcomes)}."
    more = "; ".join(one.reasons)
    ending = "" if not more else f" {more}" if more.endswith(".") else f" Not decided: {more}."
    return (f"**{said}**" if bold else said) + ending


def _table(outcomes: Iterable[Outcome]) -> list[str]:
    head = ["| comparison | the paper | ours | difference (95 % interval) | detectable | n | |", "|---|---:|---:|---:|---:|---:|---|"]
    return [*head, *(f"| {' | '.join(_row(one))} |" for one in outcomes)]


def _row(one: Outcome) -> tuple[str, ...]:
    state = one.state if one.limit is None or one.state == MISSING else f"{one.state} (within {one.limit:.1f})"
    if one.state == SMALL and one.tested != OPEN:
        state += f"; there {one.tested}"
    ours = "–" if not one.left else f"{_mean(one.left, one)}, {_mean(one.right, one)}"
    return str(one.comparison), _numbers(one.comparison), ours, _difference(one), _detectable(one), str(len(one.differences)), state


def _numbers(one: Comparison) -> str:
    """Return the paper's two numbers and their difference, or the figure from which they were read off."""
    if one.paper:
        spread = f" (± {one.spread[0]:g}, {one.spread[1]:g})" if one.spread else ""
        return f"{one.paper[0]:g}, {one.paper[1]:g}: {one.gap:+.2f}{spread}"
    if one.about:
        return f"figure {one.figure}: about {one.about[0]:g}, {one.about[1]:g}"
    return f"figure {one.figure} only" if one.figure else "–"


def _paper(one: Tested) -> str:
    """Return the paper's own difference in the comparison that represents the claim."""
    if one.main is None:
        return "exact" if one.claim.exact else "–"
    comparison = one.main.comparison
    said = "figure only"
    if comparison.gap is not None:
        said = f"{comparison.gap:+.1f}" if comparison.paper else f"about {comparison.gap:+.0f}"
    said += "" if one.main.limit is None else f" (near: within {one.main.limit:.1f})"
    return f"{comparison}: {said}"


def _ours(one: Tested) -> str:
    if one.main is None or not one.main.differences:
        return "equal" if one.claim.exact else "–"
    return _measured(one.main)


def _measured(one: Outcome) -> str:
    return f"{_difference(one)}, n = {len(one.differences)}"


def _bold(verdict: str) -> str:
    return verdict if verdict in (NOT_RUN, UNTESTABLE, NOT_AT_SCALE, OPEN) else f"**{verdict}**"


def _cells(runs: Runs | None) -> list[tuple[str, str]]:
    """Return a title and a text about the finished and the missing cells; an empty list without results."""
    if runs is None or not runs.kept:
        return []
    counts = Counter(kept.commit for kept in runs.kept)
    commits = ", ".join(f"{number} on {commit}{' (since amended)' * (commit in AMENDED)}" for commit, number in counts.items())
    said = f"{len(runs.kept)} of {len(runs.defined)} ({commits}), {sum(kept.seconds for kept in runs.kept) / 3600:.1f} hours of the clock."
    if runs.missing:
        said += f" Missing: about {runs.hours_missing:.1f} core hours."
    return [("Cells run", said)]


def _difference(one: Outcome) -> str:
    if not one.differences:
        return "–"
    mean, low, high = (f"{value:+.{_digits(one)}f}" for value in (one.mean, one.mean - one.half, one.mean + one.half))
    return mean if math.isnan(one.half) else f"{mean} ({low} to {high})"


def _detectable(one: Outcome) -> str:
    return "–" if math.isnan(one.detectable) else f"{one.detectable:.{_digits(one)}f}"


def _mean(values: Sequence[float], one: Outcome) -> str:
    return f"{sum(values) / len(values):.{_digits(one)}f}"


def _digits(one: Outcome) -> int:
    """Return how many decimals to print: fewer for accuracy in points than for another metric."""
    return 3 if one.comparison.metric else 1
