"""What the evidence says, in words, tables and one picture: EVIDENCE.md, the table in README, and the head of a claim's own page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fl_bn import durable
from fl_bn.report.difference_pictures import Difference, differences
from fl_bn.report.formats import to_markdown
from fl_bn.report.marks import replaced
from fl_bn.report.page import Answered, Compared, Statement, claim_page
from fl_bn.report.pictures import Picture
from fl_bn.sweep.claims import AGAINST, HELD, MISSING, NOT, OPEN, VARIANT, Outcome
from fl_bn.sweep.evidence import Runs, Tested, gather
from fl_bn.sweep.experiments import Experiment
from fl_bn.sweep.rates import Tried, in_words, tried

PAGE, PICTURE = "EVIDENCE.md", "evidence"
HEAD = (
    "# Evidence",
    "",
    "One section per claim of a paper. Written by `fl-bn experiments evidence` from the files in `results`. No number is",
    "typed by hand, and a test compares both. A cell is one run. Differences are in points of test accuracy, paired by seed: the",
    "runs of a pair share the division of the data and the initial weights. Where a comparison begins with another measurement, they",
    "are of that. A comparison *held* where a paired two-sided t-test has",
    "p < 0.05 in the claim's direction (where a distance is claimed: where the 95 % confidence interval lies within it). It is",
    "*contradicted* where the same holds of the opposite, and *not separated* else, and with fewer than three seeds. *Detectable* is",
    "the smallest true difference that the test would find in four of five such experiments. Where it is larger than the paper's own,",
    "*not separated* says nothing against the paper. A claim is *reproduced* if all its comparisons held, and *partly reproduced* if",
    "some did. Where none held and none is contradicted, it is *undecided* for as long as there are fewer than three seeds or cells",
    "are missing. It is undecided, too, where a comparison would not have seen what is claimed. That is so where the paper's own",
    "difference is not detectable, or half an interval is longer than a claimed distance. Else it is *not reproduced*. No correction",
    "is made for the number of comparisons. Where seeds are divisions of the same subjects into training and test, the variance is",
    "corrected for their overlap (Nadeau and Bengio 2003), and the claim's section says so. Elsewhere the test data are the same for",
    "all seeds, so an interval is of training anew, not of other data.",
    "",
    "    python experiments/evidence_data.py SOURCE DATA     # its text says what SOURCE holds",
    "    fl-bn experiments run all --variant evidence --jobs 1 --data DATA --output RUNS     # resumable; so are `cause` and `rates`",
    "    fl-bn experiments compact RUNS --data DATA     # finished cells, into experiments/results",
    "    fl-bn experiments evidence --readme README.md     # this page, and README's table; --pages FOLDER: one per claim",
    "    python benchmarks/gpu.py     # on a machine with a GPU: the hours of `--variant paper`, the papers' own settings",
)


def readme(text: str, claims: Sequence[Tested], folder: str) -> str:
    """``text`` with the verdicts between its marks; ``folder``: where EVIDENCE.md is, from there. Raises ConfigError without marks."""
    return replaced(text, "evidence", short(claims, f"{folder}/{PAGE}"))


def write_evidence(
    folder: Path, pages: Path | None = None, experiments: Sequence[Experiment] | None = None, readme_file: Path | None = None
) -> list[Path]:
    """EVIDENCE.md and the picture in ``folder``, a page per claim that has results in ``pages``, README's table; the files made."""
    claims = gather(folder, experiments)
    made = [folder / PAGE]
    durable.write(made[0], markdown(claims).encode(), mode=0o666)
    if drawn := picture(claims):
        made += drawn.save(folder, ["png"])
    if readme_file:
        there = folder.resolve().relative_to(readme_file.resolve().parent).as_posix()
        durable.write(readme_file, readme(readme_file.read_text(encoding="utf-8"), claims, there).encode(), mode=0o666)
        made.append(readme_file)
    for one in claims:
        if pages and one.runs and one.runs.report:
            pages.mkdir(parents=True, exist_ok=True)
            made.append(pages / f"{one.experiment.name}.html")
            durable.write(made[-1], claim_page(one.runs.report, statement(one)).encode(), mode=0o666)
    return made


def markdown(claims: Sequence[Tested]) -> str:
    """EVIDENCE.md."""
    lines = [*HEAD, ""]
    lines += ["| claim | verdict | comparisons that held | cells run | core hours that are missing | GPU hours of the paper's scale |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for one in claims:
        own = one.runs if not one.claim.runs else None
        cells = f"as {one.claim.runs}" if one.claim.runs else f"{len(own.kept)} of {len(own.defined)}" if own else "–"
        gpu = "–" if one.gpu_hours is None else f"{one.gpu_hours:.1f}"
        name = f"[{one.experiment.name}](#{one.anchor})"
        lines.append(f"| {name}: {one.claim.claim} | {one.verdict} | {_held(one)} | {cells} | {_hours(own)} | {gpu} |")
    if any(o.differences for one in claims for o in one.outcomes):
        lines += ["", f"![differences of every comparison]({PICTURE}.png)"]
    for one in claims:
        lines += ["", *_section(one)]
    return "\n".join(lines) + "\n"


def short(claims: Sequence[Tested], page: str) -> str:
    """How many claims were tested, and README's table of them; ``page``: EVIDENCE.md from there."""
    lines = [_counted(claims), "", "| claim | verdict | comparisons that held |", "|---|---|---:|"]
    for one in claims:
        if one.was_run:
            lines.append(f"| [{one.experiment.name}]({page}#{one.anchor}) {one.claim.claim} | {one.verdict} | {_held(one)} |")
    waiting = [one.experiment.name for one in claims if not one.was_run]
    return "\n".join(lines + (["", f"Not run yet, or not testable here: {', '.join(waiting)}."] if waiting else [])) + "\n"


def _counted(claims: Sequence[Tested]) -> str:
    seeds = [len(o.differences) for one in claims for o in one.outcomes if o.differences]
    if not seeds:
        return f"None of {len(claims)} claims has been run so far."
    run, low, high = sum(one.was_run for one in claims), min(seeds), max(seeds)
    over = f"{low} to {high} seeds" if low < high else f"{low} seed{'s' if low > 1 else ''}"
    return f"Of {len(claims)} claims {run} {'have' if run > 1 else 'has'} been run so far, over {over}, and judged by a paired test."


def statement(one: Tested) -> Statement:
    """The head of a claim's own page."""
    rates = ("Learning rates, on samples held out of the training part", in_words(_tried(one)))
    words = [(title, text) for title, text in (*_words(one), rates, *_cells_of(one)) if text]
    whys = [Answered(why.asks, one.answer(why, runs), tuple(_compared(o) for o in runs.outcomes(why))) for why, runs in one.whys]
    said = f"{_decided(one)}. {_verdict(one)}"
    name = one.claim.runs or one.experiment.name
    commands = (
        f"fl-bn experiments run {name} --variant {VARIANT} --jobs 1 --data DATA --output RUNS",
        "fl-bn experiments compact RUNS --data DATA",
        "fl-bn experiments evidence --pages PAGES",
    )
    return Statement(one.claim.claim, one.experiment.paper, said, tuple(words), _all_compared(one), commands, tuple(whys))


def picture(claims: Sequence[Tested]) -> Picture | None:
    """Every comparison's difference in accuracy with its confidence interval, claim by claim; None: there is none."""
    groups = {
        f"{one.experiment.name}: {one.claim.claim}": [
            Difference(str(o.comparison), o.mean, o.half, o.state, o.comparison.within)
            for o in one.outcomes
            if o.state != MISSING and not o.comparison.metric
        ]
        for one in claims
        if one.was_run
    }
    return differences(PICTURE, groups, (HELD, AGAINST, OPEN)) if groups else None


def _section(one: Tested) -> list[str]:
    lines = [f"## {one.experiment.name}", "", f"{one.claim.claim}. {one.experiment.paper}."]
    lines += ["", f"**Verdict: {_decided(one)}.** {_verdict(one)}".rstrip()]
    for title, text in _words(one):
        lines += ["", f"{title}: {text}"] if text else []
    if one.runs and not one.claim.runs:
        lines += _table(one.runs)
    lines += _comparisons(_all_compared(one))
    for title, text in _cells_of(one):
        lines += ["", f"{title}: {text}"]
    return lines + _rates(one) + _whys(one)


def _rates(one: Tested) -> list[str]:
    """Every method at the learning rates that were tried, and what the claim's runs have."""
    if not one.rates:
        return []
    lines = ["", f"### {one.experiment.name}: learning rates"]
    if methods := _tried(one):
        rates = sorted({rate for method in methods for rate in method.accuracies})
        lines += ["", f"Tried on samples held out of the training part, never on test data: {in_words(methods)}."]
        head = " | ".join(["method \\\\ rate", *(f"{rate:g}" for rate in rates), "the claim's"])
        lines += ["", f"| {head} |", f"|---|{'---:|' * (len(rates) + 1)}"]
        for method in methods:
            claimed = "–" if math.isnan(method.claimed) else f"{method.claimed:g}"
            lines.append(f"| {method.name} | {' | '.join(map(method.shown, rates))} | {claimed} |")
        rounds = {cell.config.rounds for cell in one.rates.defined}
        seeds = {cell.config.seed for cell in one.rates.defined}
        lines += ["", f"Accuracy (%) on those samples after {', '.join(map(str, sorted(rounds)))} rounds; seeds: {len(seeds)}."]
    for title, text in _cells(one.rates, f" of the variant `{one.claim.rates}`"):
        lines += ["", f"{title}: {text}"]
    return lines


def _tried(one: Tested) -> list[Tried]:
    return tried(one.runs, one.rates) if one.runs and one.rates else []


def _whys(one: Tested) -> list[str]:
    """The controlled experiments; where there is none for a claim that is not reproduced, that is said, too."""
    if not one.whys:
        return ["", "Why: no controlled experiment has looked for the cause yet."] if one.verdict == NOT and not one.claim.cause else []
    lines, last = ["", f"### {one.experiment.name}: why"], (VARIANT, "")
    for why, runs in one.whys:
        lines += ["", f"**{why.asks}** {one.answer(why, runs)}".rstrip()]
        source = (why.variant, why.measure)
        if source not in ((VARIANT, ""), last):
            lines += _table(runs)
            for title, text in _cells(runs, f" of the variant `{why.variant}`"):
                lines += ["", f"{title}: {text}"]
        lines += _comparisons([_compared(o) for o in runs.outcomes(why)])
        last = source
    return lines


def _table(runs: Runs) -> list[str]:
    if not runs.report:
        return []
    return ["", *to_markdown(runs.report.table).rstrip().split("\n")[2:], *(["", runs.settings.notes] if runs.settings.notes else [])]


def _comparisons(rows: Sequence[Compared]) -> list[str]:
    if not rows:
        return []
    head = ["| comparison | difference (95 % interval) | the paper's | detectable | seeds | p | |", "|---|---:|---:|---:|---:|---:|---|"]
    return ["", *head, *(f"| {' | '.join(row)} |" for row in rows)]


def _cells(runs: Runs, of: str = "") -> list[tuple[str, str]]:
    """Titles and texts: what was run, and what is missing. ``of``: which variant, for the titles."""
    found = []
    if runs.kept:
        commits = ", ".join(f"{len([k for k in runs.kept if k.commit == c])} on {c}" for c in dict.fromkeys(k.commit for k in runs.kept))
        clock = sum(kept.seconds for kept in runs.kept) / 3600
        count = f"{len(runs.kept)} of {len(runs.defined)}"
        found.append((f"Cells run{of}", f"{count} ({commits}), {clock:.1f} hours of the clock, beside other work."))
    if runs.missing:
        rate = f", {runs.hours_missing:.1f} core hours by the clock of those that ran" if runs.kept else ""
        names, more = [cell.config.name for cell in runs.missing[:4]], len(runs.missing) - 4
        few = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        found.append((f"Missing{of}", f"{len(runs.missing)} {'cell' if len(runs.missing) == 1 else 'cells'}{rate}. {few}."))
    return found


def _cells_of(one: Tested) -> list[tuple[str, str]]:
    """The same of a claim's own runs; nothing where they are another's."""
    return _cells(one.runs) if one.runs and not one.claim.runs else []


def _words(one: Tested) -> tuple[tuple[str, str], ...]:
    claim = one.claim
    return ("The paper's numbers", claim.paper), ("What differs from the paper", claim.differs), ("Cause", claim.cause)


def _decided(one: Tested) -> str:
    """The verdict, and what keeps it open if it is undecided."""
    return f"{one.verdict}: {one.undecided_for}" if one.undecided_for else one.verdict


def _verdict(one: Tested) -> str:
    """The verdict in words: what became of the comparisons, and whose runs they are."""
    if one.claim.untestable:
        return one.claim.untestable
    states = [o.state for o in one.outcomes]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (HELD, AGAINST, OPEN, MISSING) if state in states)
    said = [f"Comparisons: {counts}."] if one.was_run else []
    said += [f"The runs are those of {one.claim.runs}."] if one.claim.runs else []
    ratio = one.claim.resampled
    said += [f"Seeds divide the same samples anew, {ratio:g} for testing to 1 for training, so variances are corrected."] if ratio else []
    return " ".join(said)


def _all_compared(one: Tested) -> tuple[Compared, ...]:
    return tuple(_compared(o) for o in one.outcomes) if one.runs else ()


def _compared(one: Outcome) -> Compared:
    return Compared(
        str(one.comparison),
        _difference(one),
        "–" if one.paper is None else f"{one.paper:+.1f}",
        "–" if math.isnan(one.detectable) else f"{one.detectable:.{_digits(one)}f}",
        str(len(one.differences)),
        "–" if math.isnan(one.p) else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}",
        one.state,
    )


def _held(one: Tested) -> str:
    return f"{sum(o.state == HELD for o in one.outcomes)} of {len(one.outcomes)}" if one.outcomes else "–"


def _hours(runs: Runs | None) -> str:
    if runs is None or not runs.missing:
        return "–"
    return f"{runs.hours_missing:.1f}" if runs.kept else "?"


def _difference(one: Outcome) -> str:
    if not one.differences:
        return "–"
    mean, low, high = (f"{value:+.{_digits(one)}f}" for value in (one.mean, one.mean - one.half, one.mean + one.half))
    return mean if math.isnan(one.half) else f"{mean} ({low} to {high})"


def _digits(one: Outcome) -> int:
    """After the point: of points of accuracy, or of a metric that the comparison names."""
    return 3 if one.comparison.metric else 1
