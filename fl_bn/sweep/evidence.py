"""Every claim that was tested at a larger scale: experiments/EVIDENCE.md, a picture and pages, from committed results alone."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_bn import durable
from fl_bn.report.difference_pictures import Difference, differences
from fl_bn.report.formats import to_markdown
from fl_bn.report.page import Report, report_page
from fl_bn.report.pictures import Picture
from fl_bn.report.settings import parse_settings
from fl_bn.report.write import report_of
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.claims import AGAINST, ELSEWHERE, HELD, MISSING, NOT_RUN, OPEN, UNTESTABLE, Claim, Outcome, outcome, parse_claim, verdict
from fl_bn.sweep.experiments import Experiment, find
from fl_bn.sweep.file import read
from fl_bn.sweep.kept import ANY_DATA, Kept, cells_of, load

VARIANT = "evidence"
RESULTS = "results"  # folder of the JSON lines
PAGE, PICTURE = "EVIDENCE.md", "evidence"


@dataclass(frozen=True)
class Tested:
    """One claim and all that is known of it. ``report``: None where no cell has been run."""

    experiment: Experiment
    claim: Claim
    defined: tuple[Cell, ...]
    kept: tuple[Kept, ...]
    report: Report | None

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome(one, self.report.layout if self.report else None) for one in self.claim.compare]

    @property
    def verdict(self) -> str:
        """With "so far" while cells are missing."""
        found = verdict(self.claim, self.outcomes)
        return found if found in (UNTESTABLE, ELSEWHERE, NOT_RUN) or not self.missing else f"{found}, so far"

    @property
    def missing(self) -> list[str]:
        there = {kept.name for kept in self.kept}
        return [cell.config.name for cell in self.defined if cell.config.name not in there]

    @property
    def anchor(self) -> str:
        return self.experiment.name.lower()


def gather(folder: Path, experiments: Sequence[Experiment] | None = None) -> list[Tested]:
    """Every experiment that has a claim, with its results in ``folder/results``.

    Raises:
        ConfigError: a result is not of the experiment as it is defined now, or a table [evidence] is wrong.
    """
    found = []
    for experiment in experiments or find():
        table = tomllib.loads(experiment.file.read_text(encoding="utf-8")).get("evidence")
        if table is None:
            continue
        claim = parse_claim(table, experiment.file.name)
        if VARIANT not in experiment.variants or experiment.program:
            found.append(Tested(experiment, claim, (), (), None))
            continue
        sweep = read(experiment.file, VARIANT, ANY_DATA)
        defined = cells_of(sweep)
        kept = load(folder / RESULTS / f"{experiment.name}.jsonl", defined)
        text = sweep.to_toml()
        settings = parse_settings(tomllib.loads(text), experiment.name, text)
        report = report_of(settings, [one.shown() for one in kept], experiment.name) if kept else None
        found.append(Tested(experiment, claim, tuple(defined), tuple(kept), report))
    return found


def markdown(claims: Sequence[Tested]) -> str:
    """EVIDENCE.md."""
    lines = [*HEAD, "", "| claim | verdict | comparisons that held | cells run | core hours that are missing |", "|---|---|---:|---:|---:|"]
    for one in claims:
        held = f"{sum(o.state == HELD for o in one.outcomes)} of {len(one.outcomes)}" if one.outcomes else "–"
        cells = f"{len(one.kept)} of {len(one.defined)}" if one.defined else "–"
        lines.append(f"| [{one.experiment.name}](#{one.anchor}): {one.claim.claim} | {one.verdict} | {held} | {cells} | {_hours(one)} |")
    if any(o.differences for one in claims for o in one.outcomes):
        lines += ["", f"![differences of every comparison]({PICTURE}.png)"]
    for one in claims:
        lines += ["", *_section(one)]
    return "\n".join(lines) + "\n"


HEAD = (
    "# Evidence",
    "",
    "One section per claim of a paper. Written by `fl-bn experiments evidence` from the files in `results`. No number is",
    "typed by hand, and a test compares both. A cell is one run. Differences are in points of test accuracy, paired by seed: the",
    "runs of a pair share the division of the data and the initial weights. A comparison *held* where a paired two-sided t-test has",
    "p < 0.05 in the claim's direction (where a distance is claimed: where the 95 % confidence interval lies within it). It is",
    "*contradicted* where the same holds of the opposite, and *not separated* else, also with one seed. A claim is *reproduced* if",
    "all its comparisons held, *partly* if some did, *not reproduced* if none did, *undecided* with a single seed. No correction is",
    "made for the number of comparisons.",
    "",
    "    python experiments/evidence_data.py SOURCE DATA     # its text says what SOURCE holds",
    "    fl-bn experiments run all --variant evidence --jobs 1 --data DATA --output RUNS     # resumable",
    "    fl-bn experiments compact RUNS --data DATA     # finished cells, into experiments/results",
    "    fl-bn experiments evidence     # this page; --pages FOLDER: one per claim",
)


def _section(one: Tested) -> list[str]:
    claim = one.claim
    lines = [
        f"## {one.experiment.name}",
        "",
        f"{claim.claim}. {one.experiment.paper}.",
        "",
        f"**Verdict: {one.verdict}.** {claim.untestable}{claim.elsewhere}".strip(),
    ]
    for title, text in (("The paper's numbers", claim.paper), ("What differs from the paper", claim.differs), ("Cause", claim.cause)):
        lines += ["", f"{title}: {text}"] if text else []
    if one.report:
        lines += ["", *to_markdown(one.report.table).rstrip().split("\n")[2:]]
    if one.outcomes:
        lines += ["", "| comparison | difference (95 % interval) | seeds | p | |", "|---|---:|---:|---:|---|"]
        lines += [f"| {o.comparison} | {_difference(o)} | {len(o.differences)} | {_p(o)} | {o.state} |" for o in one.outcomes]
    if one.kept:
        commits = ", ".join(f"{len([k for k in one.kept if k.commit == c])} on {c}" for c in dict.fromkeys(k.commit for k in one.kept))
        hours = sum(kept.seconds for kept in one.kept) / 3600
        lines += ["", f"Cells run: {len(one.kept)} of {len(one.defined)} ({commits}), {hours:.1f} hours of the clock, beside other work."]
    if one.missing:
        rate = f", {one.claim.hours:g} core hours each as measured on one core" if one.claim.hours else ""
        lines += ["", f"Missing: {len(one.missing)} cells{rate}. {_few(one.missing)}"]
    return lines


def _few(names: Sequence[str]) -> str:
    return f"`{'`, `'.join(names[:4])}`{f' and {len(names) - 4} more' if len(names) > 4 else ''}."


def _hours(one: Tested) -> str:
    return f"{len(one.missing) * one.claim.hours:.1f}" if one.missing and one.claim.hours else "?" if one.missing else "–"


def _difference(one: Outcome) -> str:
    if not one.differences:
        return "–"
    return f"{one.mean:+.1f}" + ("" if math.isnan(one.half) else f" ({one.mean - one.half:+.1f} to {one.mean + one.half:+.1f})")


def _p(one: Outcome) -> str:
    return "–" if math.isnan(one.p) else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"


def picture(claims: Sequence[Tested]) -> Picture | None:
    """Every comparison's difference with its confidence interval; None: there is none."""
    rows = [
        Difference(f"{one.experiment.name}: {o.comparison}", o.mean, o.half, o.state, o.comparison.within)
        for one in claims
        for o in one.outcomes
        if o.state != MISSING
    ]
    return differences(PICTURE, rows, (HELD, AGAINST, OPEN)) if rows else None


def write_evidence(folder: Path, pages: Path | None = None, experiments: Sequence[Experiment] | None = None) -> list[Path]:
    """EVIDENCE.md and the picture in ``folder``, and an HTML page per claim that has results in ``pages``; the files made."""
    claims = gather(folder, experiments)
    made = [folder / PAGE]
    durable.write(made[0], markdown(claims).encode(), mode=0o666)
    if drawn := picture(claims):
        made += drawn.save(folder, ["png"])
    for one in claims:
        if pages and one.report:
            pages.mkdir(parents=True, exist_ok=True)
            made.append(pages / f"{one.experiment.name}.html")
            durable.write(made[-1], report_page(one.report).encode(), mode=0o666)
    return made
