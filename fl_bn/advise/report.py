"""Make the tables of the advice, and write it to the files advice.md and advice.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_bn.advise.measure import Measured
from fl_bn.advise.pilot import Rung
from fl_bn.advise.regimes import BASELINE, Nearest, verdict, why
from fl_bn.support import durable

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Advice:
    """Hold the advice for a run's clients.

    Attributes:
        title: The heading.
        measured: The user's clients in numbers.
        nearest: The regime (a kind of federation in which the methods were run) that is most like the user's clients.
        candidates: The methods to try, the most promising first.
        left_out: The methods that cannot run with the user's run config, each with the reason.
        rungs: The rungs of the pilot, each with runs of the same number of rounds; empty: there was no pilot.
        metric: The name of the metric of the pilot.
        final: The metric of the final run; NaN: there was no final run.
    """

    title: str
    measured: Measured
    nearest: Nearest
    candidates: Sequence[str]
    left_out: dict[str, str]
    rungs: Sequence[Rung] = ()
    metric: str = ""
    final: float = math.nan

    @property
    def chosen(self) -> str:
        """Return the method that the pilot chose; empty: there was no pilot."""
        return self.rungs[-1].kept[0] if self.rungs else ""

    def clients(self) -> Rows:
        """Return the rows of the table of clients: a quantity, its value for the user's clients, its value in the nearest regime."""
        return [(name, _of(self.measured, name), _of(self.nearest.regime.measured, name)) for name in SHOWN]

    def methods(self) -> Rows:
        """Return the rows of the table of candidates: each method, and its result in the nearest regime.

        That is the known federation which is most like the user's.
        """
        known = self.nearest.regime.accuracies
        names = [(label, label.partition(":")[0]) for label in self.candidates]
        return [(label, why(self.nearest.regime, name) if known.get(name) else "not run there") for label, name in names]

    def sentences(self) -> list[str]:
        """Return sentences about the nearest regime, the baseline, and the methods that are left out."""
        regime, farthest = self.nearest.regime, self.nearest.farthest
        beside = f" They differ most in {farthest}." if farthest else ""
        lines = [f"Nearest regime: {regime.name}. {regime.problem}.{beside}", f"There: {verdict(regime)}."]
        if BASELINE not in self.candidates:
            lines.append(f"Compare with {BASELINE}, plain BatchNorm, in any case.")
        lines += [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]
        return lines

    def pilot(self) -> Rows:
        """Return the rows of the table of pilot runs: rounds, method, validation metric, and whether the method goes on."""
        return [
            (str(rung.rounds), name, "failed" if math.isnan(value) else f"{value:.4g}", "goes on" if name in rung.kept else "")
            for rung in self.rungs
            for name, value in rung.scores.items()
        ]


SHOWN = (
    "clients", "samples of a client", "classes of a client", "label skew", "distance of features", "of which labels and chance explain",
    "batch size", "participation", "local steps",
)  # fmt: skip
CLIENTS, METHODS, PILOT = ("", "your clients", "nearest regime"), ("method", "in that regime"), ("rounds", "method", "validation", "")
"""Headings of the three tables."""


def _of(measured: Measured, name: str) -> str:
    few = measured.smallest == measured.largest
    return {
        "clients": f"{measured.clients}",
        "samples of a client": f"{measured.middle}" if few else f"{measured.middle} ({measured.smallest} to {measured.largest})",
        "classes of a client": f"{measured.classes:.1f}",
        "label skew": f"{measured.label_skew:.2f}",
        "distance of features": f"{measured.distance:.3g}",
        "of which labels and chance explain": f"{measured.by_labels:.3g}",
        "batch size": f"{measured.batch_size}",
        "participation": f"{measured.participation:g}",
        "local steps": f"{measured.local_steps}",
    }[name]


def write(advice: Advice, folder: Path) -> list[Path]:
    """Write the advice to advice.md, for people, and to advice.json, for programs.

    Args:
        advice: The advice.
        folder: The folder, which is made if it does not exist.

    Returns:
        The paths of the two files.
    """
    parts = [f"# {advice.title}", _table(CLIENTS, advice.clients()), "\n".join(advice.sentences()), _table(METHODS, advice.methods())]
    if advice.rungs:
        metric = f"The metric is {advice.metric}, on validation samples; the test data had no part in the choice."
        parts += ["## Pilot", metric, _table(PILOT, advice.pilot())]
        if not math.isnan(advice.final):
            parts.append(f"{advice.chosen}, all rounds, on the test data: {advice.final:.4g}")
    content = {
        "measured": asdict(advice.measured),
        "nearest": advice.nearest.regime.name,
        "apart": dict(advice.nearest.apart),
        "candidates": list(advice.candidates),
        "left-out": advice.left_out,
        "pilot": [asdict(rung) for rung in advice.rungs],
        "chosen": advice.chosen,
        "final": None if math.isnan(advice.final) else advice.final,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "advice.md", folder / "advice.json"]
    for file, text in zip(files, ("\n\n".join(parts), json.dumps(content, indent=1)), strict=True):
        durable.write(file, (text + "\n").encode(), mode=0o666)
    return files


def _table(heading: Sequence[str], rows: Rows) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
