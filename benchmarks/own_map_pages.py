"""Write the pages of the map: the file that `fl-bn advise` reads, a heat map, and the tables in README.md and
choosing.md.

Run ``python benchmarks/own_map_pages.py``; it reads benchmarks/results/map/cells.csv, and takes seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parent))
from own_map import COMMON, METHODS, REGIMES, SEEDS, TEST, Accuracies, Place, best_rate, keys, read

from experiments.marks import replaced
from experiments.pictures import draw_map
from fl_bn.app.advise import regimes
from fl_bn.app.advise.measure import Measured, measure
from fl_bn.app.advise.regimes import BASELINE, Regime, finite
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
    "Tiny batches, or one step per round": {"batch of 4": "batches of 4", "1 local step": "one step"},
    "Few clients take part in a round": {"10 % take part": "a tenth"},
    "Otherwise": {
        "IID": "clients alike", "Dirichlet 0.3": "labels a little skewed", "Dirichlet 0.1": "more skewed", "20 local steps": "20 steps",
    },
}  # fmt: skip
"""The user's problem -> the regimes that it covers, each with a word for the table."""
PAGES = {
    "fedavg": "others.md#fedavg-with-batchnorm", "gn": "others.md#group-layer-and-instance-normalisation", "fixbn": "fixbn.md",
    "fedbn": "fedbn.md", "silobn": "fedbn.md#silobn-the-variant-with-shared-scale-and-shift", "hbn": "hbn.md", "fbn": "fbn.md",
    "fedtan": "fedtan.md",
}  # fmt: skip
WHERE = {ROOT / "README.md": "docs/methods/", ROOT / "docs" / "methods" / "choosing.md": ""}
"""Page with a table -> the folder of the methods' pages, relative to that page."""
MARK = "map"
ONE_SEED = 10.0  # the difference in points that separates two methods where there is one seed
COLOURED = 20.0  # points; larger differences have the colour of this one


def regimes_of(lines: Accuracies, measured: Mapping[str, Measured]) -> list[Regime]:
    """Return the regimes in which plain BatchNorm and at least one other method were run.

    Args:
        lines: The finished cells.
        measured: Regime -> what was measured about its clients.
    """
    found = []
    for name in REGIMES:
        runs = {method: {seed: _of(lines, name, method, seed) for seed in SEEDS} for method in METHODS}
        there = {method: {seed: value for seed, value in by_seed.items() if value is not None} for method, by_seed in runs.items()}
        rates = {method: rate for method in METHODS if (rate := best_rate(lines, name, method))}
        regime = Regime(name, PROBLEMS[name], measured[name], there, rates, separable(there))
        if BASELINE in regime.methods and len(regime.methods) > 1:
            found.append(regime)
    return found


def separable(accuracies: Mapping[str, Mapping[int, float]]) -> float:
    """Return the smallest difference, in points, that separates two methods with 95 % confidence.

    It is Fisher's least significant difference, from an analysis of variance of methods and seeds, over the seeds that
    all methods have. With one seed or one method there is no estimate, so the value is ``ONE_SEED``.
    """
    methods = [name for name, runs in accuracies.items() if runs]
    seeds = sorted(set.intersection(*(set(accuracies[name]) for name in methods))) if methods else []
    freedom = (len(methods) - 1) * (len(seeds) - 1)
    if min(len(methods), len(seeds)) < 2:
        return ONE_SEED
    values = {(name, seed): finite(accuracies[name][seed]) for name, seed in product(methods, seeds)}
    whole = fmean(values.values())
    by_method = {name: fmean(values[name, seed] for seed in seeds) for name in methods}
    by_seed = {seed: fmean(values[name, seed] for name in methods) for seed in seeds}
    residual = sum((values[name, seed] - by_method[name] - by_seed[seed] + whole) ** 2 for name, seed in values)
    return float(stdtrit(freedom, 0.975)) * math.sqrt(2 * residual / freedom / len(seeds))


def level(regime: Regime, method: str) -> list[str]:
    """Return ``method`` and all methods whose accuracy does not differ significantly from that of ``method``."""
    return [method, *(name for name in regime.methods if name != method and abs(regime.above(method, name)) < regime.separable)]


def seeds_of(regime: Regime) -> list[int]:
    """Return the seeds with which every method was run."""
    return sorted(set.intersection(*(set(regime.accuracies[name]) for name in regime.methods)))


def _of(lines: Accuracies, regime: str, method: str, seed: int) -> float | None:
    accuracy = lines.get(Place(TEST, regime, method, seed, best_rate(lines, regime, method)))
    return 0.0 if accuracy is not None and math.isnan(accuracy) else accuracy


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
    return "\n".join([*lines, "", *_read(found, folder)]) + "\n"


def _advice(regime: Regime, folder: str) -> str:
    """Return the best method of a regime with what is as good; FedAvg where nothing is ahead of it for sure."""
    best = regime.methods[0]
    equals = level(regime, best)
    one = "one seed, " if len(seeds_of(regime)) == 1 else ""
    if BASELINE in equals:
        return f"{one}{_link(BASELINE, folder)}, gains are within chance"
    others = ", ".join(_link(name, folder) for name in equals if name != best)
    return f"{one}{_link(best, folder)} ({regime.above(best):+.1f}){f', as good: {others}' if others else ''}"


def _read(found: Sequence[Regime], folder: str) -> list[str]:
    """Return the sentences below the table: how many rounds, seeds, methods and rates were run, and what is older."""
    seeds = max(len(seeds_of(regime)) for regime in found)
    return [
        f"Bundled digits, {COMMON['rounds']} rounds, {seeds} seeds, {len(METHODS)} methods, each at the best of three rates. "
        f"`fixbn` has a [newer default]({folder}fixbn.md#the-learning-rate-after-the-freeze), which learns more.",
    ]


def _link(name: str, folder: str) -> str:
    return f"[`{name}`]({folder}{PAGES[name]})"


def table(found: Sequence[Regime], lines: Accuracies) -> str:
    """Return as Markdown every method's accuracy, standard deviation and best rate in each regime."""
    failed = [place for place, accuracy in lines.items() if place.phase == TEST and math.isnan(accuracy)]
    ended = sorted({f"{place.method} with {place.regime}" for place in failed})
    early = f"A run that ended early, because training diverged, counts as 0: there are some of {', '.join(ended)}. " if ended else ""
    said = [
        "# The map",
        "",
        f"Bundled digits, {COMMON['rounds']} rounds, ten clients, 5 local steps, batches of {COMMON['batch-size']}, unless the regime says "
        "otherwise. In each cell: test accuracy after the last round (%, mean, and standard deviation over seeds); the learning rate, the "
        "best of three on validation samples. *Separable*: the least difference that tells two methods apart (95 %, analysis of variance "
        f"of methods and seeds; 10 points with one seed). {early}Made by `benchmarks/own_map.py` and `benchmarks/own_map_pages.py`.",
        "",
        f"| regime | {' | '.join(METHODS)} | separable |",
        "|---|" + "---:|" * (len(METHODS) + 1),
    ]
    for regime in found:
        values = " | ".join(_shown(regime, method) for method in METHODS)
        said.append(f"| {regime.name} | {values} | {regime.separable:.1f} |")
    return "\n".join(said) + "\n"


def _shown(regime: Regime, method: str) -> str:
    runs = list(regime.accuracies[method].values())
    if not runs:
        return "-"
    spread = f" ({np.std(runs, ddof=1):.1f})" if len(runs) > 1 else ""
    return f"{np.mean(runs):.1f}{spread}; {regime.rates[method]:g}"


def draw(found: Sequence[Regime], path: Path) -> None:
    """Draw a heat map: by how many points each method is above plain BatchNorm (rows) in each regime (columns)."""
    methods = [name for name in METHODS if name != BASELINE]
    values = np.array([[regime.above(name) for regime in found] for name in methods])
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
