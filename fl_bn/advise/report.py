"""Write advice as tables, and as the files advice.md and advice.json."""

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
        measured: The clients in numbers.
        nearest: The nearest regime of the map.
        candidates: The methods worth a try, the best first.
        left_out: Method -> the reason why it cannot run.
        rungs: The rungs of the pilot; empty without one.
        metric: The metric of the pilot's runs.
        final: The metric of the final run; NaN without one.
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
        """Return the method that the pilot chose; empty without one."""
        return self.rungs[-1].kept[0] if self.rungs else ""

    def clients(self) -> Rows:
        """Return rows of the clients' numbers beside those of the nearest regime: name, here, there."""
        return [(name, _of(self.measured, name), _of(self.nearest.regime.measured, name)) for name in SHOWN]

    def methods(self) -> Rows:
        """Return rows of the candidates and their results in the nearest regime."""
        known = self.nearest.regime.accuracies
        names = [(label, label.partition(":")[0]) for label in self.candidates]
        return [(label, why(self.nearest.regime, name) if known.get(name) else "not in the map") for label, name in names]

    def sentences(self) -> list[str]:
        """Return sentences about the regime, the baseline and the methods that cannot run."""
        regime, farthest = self.nearest.regime, self.nearest.farthest
        beside = f" They differ most in {farthest}." if farthest else ""
        lines = [f"Nearest regime of the map: {regime.name}. {regime.problem}.{beside}", f"There: {verdict(regime)}."]
        if BASELINE not in self.candidates:
            lines.append(f"Compare with {BASELINE}, plain BatchNorm, in any case.")
        lines += [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]
        return lines

    def pilot(self) -> Rows:
        """Return rows of the pilot's runs: rounds, method, metric on validation samples, and whether it goes on."""
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
    """Write advice.md, for people, and advice.json, for programs; return their paths."""
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
