"""Write the pages of the map: the file that `fl-bn advise` reads, a heat map, and the tables in README.md and
choosing.md.

Run ``python benchmarks/own_map_pages.py``; it reads benchmarks/results/map/cells.csv, and takes seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parent))
import own_map
from own_map import COMMON, METHODS, PILOT, RATE_SEEDS, REGIMES, SEEDS, TEST, Accuracies, Place, accuracies, best_rate, keys, read

from experiments.marks import replaced
from experiments.pictures import draw_map
from fl_bn.app.advise import regimes
from fl_bn.app.advise.measure import Measured, measure
from fl_bn.app.advise.regimes import BASELINE, MATTERS, Regime
from fl_bn.app.config import RunConfig
from fl_bn.support import durable

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "benchmarks" / "results" / "map" / "cells.csv"
TABLE = CELLS.with_name("table.md")
PICTURE = ROOT / "docs" / "pictures" / "map.png"
PROBLEMS = {
    "IID": "Clients are alike",
    "Dirichlet 0.3": "Labels are skewed a little (Dirichlet 0.3)",
    "Dirichlet 0.1": "Labels are skewed more (Dirichlet 0.1)",
    "two classes": "Clients have two classes each",
    "one class": "Clients have one class each",
    "five domains": "Clients see the world differently: other cameras, other scanners",
    "five domains, Dirichlet 0.1": "The same, and labels are skewed",
    "batch of 4": "Labels are skewed a little, batches of 4",
    "10 % take part": "Labels are skewed a little, a tenth of the clients take part in a round",
    "1 local step": "Labels are skewed a little, 1 local step",
    "20 local steps": "Labels are skewed a little, 20 local steps",
}
ROWS = {
    "Scanners or cameras differ": {"five domains": "labels alike", "five domains, Dirichlet 0.1": "labels skewed, too"},
    "One or few classes per client": {"one class": "one", "two classes": "two"},
    "Tiny batches, one step per round, or twenty": {"batch of 4": "batches of 4", "1 local step": "one step", "20 local steps": "twenty"},
    "Few clients take part in a round": {"10 % take part": "a tenth"},
    "Otherwise": {
        "IID": "clients alike", "Dirichlet 0.3": "labels a little skewed", "Dirichlet 0.1": "more skewed",
    },
}  # fmt: skip
"""The user's problem -> the regimes that it covers, each with a word for the table."""
PAGES = {
    "fedavg": "others.md#fedavg-with-batchnorm", "gn": "others.md#group-layer-and-instance-normalisation",
    "fedwon": "others.md#networks-without-normalisation", "fixbn": "fixbn.md", "fedbn": "fedbn.md",
    "silobn": "fedbn.md#silobn-the-variant-with-shared-scale-and-shift", "hbn": "hbn.md", "fbn": "fbn.md", "fedtan": "fedtan.md",
}  # fmt: skip
WHERE = {ROOT / "README.md": "docs/methods/", ROOT / "docs" / "methods" / "choosing.md": ""}
"""Page with a table -> the folder of the methods' pages, relative to that page."""
MARK = "map"
COLOURED = 20.0  # points; larger differences have the colour of this one


def regimes_of(lines: Accuracies, measured: Mapping[str, Measured]) -> list[Regime]:
    """Return the regimes in which plain BatchNorm and another method were run. ``measured``: regime -> what is known of its clients."""
    found = []
    for name in REGIMES:
        tested = {method: (best_rate(lines, name, method)[0], accuracies(lines, TEST, name, method)) for method in METHODS}
        runs = {
            method: {seed: value for (seed, rate), value in sorted(own.items()) if rate == best} for method, (best, own) in tested.items()
        }
        runs = {method: own for method, own in runs.items() if own}
        rates = {method: tested[method][0] for method in runs}
        if BASELINE in runs and len(runs) > 1:
            margins = {method: margin(runs[method], runs[BASELINE]) for method in runs if method != BASELINE}
            found.append(Regime(name, PROBLEMS[name], measured[name], runs, rates, margins))
    return found


def margin(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return half of the width of the 95 % confidence interval of two methods' difference, paired by seed."""
    differences = [mine[seed] - theirs[seed] for seed in mine]
    return float(stdtrit(len(differences) - 1, 0.975)) * stdev(differences) / math.sqrt(len(differences))


def measured_regimes() -> dict[str, Measured]:
    """Measure the clients of every regime, on the partition of the data by the first seed."""
    return {name: measure(RunConfig.from_mapping(keys(Place(TEST, name, BASELINE, SEEDS[0], 0.1)))) for name in REGIMES}


def recommendation(found: Sequence[Regime], folder: str) -> str:
    """Return a Markdown table that recommends methods for five kinds of problems, and sentences about the runs behind it.

    Args:
        found: The regimes with runs.
        folder: The folder of the methods' pages, relative to the page with the table.
    """
    lines = ["| your problem | try (points above plain BatchNorm) |", "|---|---|"]
    for problem, words in ROWS.items():
        advice: dict[str, list[str]] = {}
        for regime in sorted(found, key=lambda one: [*words].index(one.name) if one.name in words else -1):
            if regime.name in words:
                advice.setdefault(_advice(regime, folder), []).append(words[regime.name])
        if advice:
            said = [f"{', '.join(which)}: {text}" if len(words) > 1 else text for text, which in advice.items()]
            lines.append(f"| {problem} | {'; '.join(said)} |")
    return "\n".join([*lines, "", *_read(found)]) + "\n"


def _advice(regime: Regime, folder: str) -> str:
    """Return the best method of a regime with what is as good; FedAvg where nothing is ahead of it for sure."""
    best, *others = regime.methods
    if best == BASELINE or regime.above(best) < max(MATTERS, regime.margins[best]):
        return f"{_link(BASELINE, folder)}, gains are within chance or {MATTERS:g} points"
    equals = ", ".join(_link(name, folder) for name in others if regime.above(best, name) < MATTERS)
    return f"{_link(best, folder)} ({regime.above(best):+.1f}){f', as good: {equals}' if equals else ''}"


def _read(found: Sequence[Regime]) -> list[str]:
    """Return the sentences below the table: how many rounds, seeds, methods and rates were run."""
    return [
        f"Bundled digits, {COMMON['rounds']} rounds, {len(SEEDS)} seeds, {len(found[0].methods)} methods, each at the best of its learning "
        f"rates. As good: less than {MATTERS:g} points behind.",
    ]


def _link(name: str, folder: str) -> str:
    return f"[`{name}`]({folder}{PAGES[name]})"


def table(found: Sequence[Regime], lines: Accuracies) -> str:
    """Return as Markdown every method's accuracy, best rate and difference to plain BatchNorm in each regime, and the pilots."""
    failed = [place for place, accuracy in lines.items() if place.phase == TEST and math.isnan(accuracy)]
    ended = sorted({f"{place.method} with {place.regime}" for place in failed})
    early = f"A run that ended early, because training diverged, counts as 0: there are some of {', '.join(ended)}. " if ended else ""
    edges = [best_rate(lines, regime.name, method)[1] for regime in found for method in regime.accuracies]
    said = [
        "# The map",
        "",
        f"Bundled digits, {COMMON['rounds']} rounds, ten clients, 5 local steps, batches of {COMMON['batch-size']}, unless the regime says "
        "otherwise. In each cell: test accuracy after the last round (%, mean, and standard deviation over seeds); the learning rate, the "
        "best on validation samples; points above plain BatchNorm, with half of the 95 % interval (paired by seed). "
        f"{sum(edges)} of {len(edges)} rates are the lowest or the highest that was tried. *Pilot*: by how many points the method that "
        f"`fl-bn advise --pilot` chooses in {own_map.PILOT_ROUNDS} rounds, of plain BatchNorm and the {own_map.PILOT_BEST} best, is behind "
        f"the best of the row, mean over {len(RATE_SEEDS)} pilots. {early}Made by `benchmarks/own_map.py` and `own_map_pages.py`.",
        "",
        f"| regime | seeds | {' | '.join(METHODS)} | pilot |",
        "|---|---:|" + "---:|" * (len(METHODS) + 1),
    ]
    for regime in found:
        values = " | ".join(_shown(regime, method) for method in METHODS)
        said.append(f"| {regime.name} | {len(regime.accuracies[BASELINE])} | {values} | {_pilot(regime, lines)} |")
    return "\n".join(said) + "\n"


def _shown(regime: Regime, method: str) -> str:
    runs = list(regime.accuracies[method].values())
    above = f"; {regime.above(method):+.1f} ± {regime.margins[method]:.1f}" if method in regime.margins else ""
    return f"{np.mean(runs):.1f} ({np.std(runs, ddof=1):.1f}); {regime.rates[method]:g}{above}"


def _pilot(regime: Regime, lines: Accuracies) -> str:
    """Return how far the methods that pilots choose are behind the best one in points, the mean over pilots."""
    by_method = {method: accuracies(lines, PILOT, regime.name, method) for method in regime.methods}
    chosen = [max(by_method, key=lambda name: by_method[name].get((seed, own_map.PILOT_RATE), -1.0)) for seed in RATE_SEEDS]
    return f"{fmean(regime.above(regime.methods[0], name) for name in chosen):.1f}"


def draw(found: Sequence[Regime], path: Path) -> None:
    """Draw a heat map: by how many points each method is above plain BatchNorm (rows) in each regime (columns)."""
    methods = [name for name in METHODS if name != BASELINE]
    values = np.array([[regime.above(name) if name in regime.rates else math.nan for regime in found] for name in methods])
    columns = [f"{regime.name} ({regime.mean(BASELINE):.0f})" for regime in found]
    x, bar = "regime (accuracy of plain BatchNorm, %)", "points above plain BatchNorm"
    figure = draw_map(values, columns, methods, x, "", bar, limit=COLOURED)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    """Write the map's file, its tables and its picture."""
    lines = read(CELLS)
    found = regimes_of(lines, measured_regimes())
    durable.write(regimes.FILE, regimes.dump(found).encode(), mode=0o666)
    durable.write(TABLE, table(found, lines).encode(), mode=0o666)
    draw(found, PICTURE)
    for page, folder in WHERE.items():
        durable.write(page, replaced(page.read_text(encoding="utf-8"), MARK, recommendation(found, folder)).encode(), mode=0o666)


if __name__ == "__main__":
    main()
