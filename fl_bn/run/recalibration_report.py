"""Report the passes that only measured statistics, as ``recalibration.csv`` and in words."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from fl_bn.federation.recalibration import Pass

COLUMNS = (
    "pass",
    "clients",
    "layer",
    "mean-moved",
    "variance-factor",
)  # mean-moved: in standard deviations before the pass; variance-factor: new / old


def write_passes(passes: Sequence[Pass], path: Path) -> None:
    """Write a CSV file with one line per pass and layer."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = ((one.number, one.clients, *movement) for one in passes for movement in one.movements)
        csv.writer(file).writerows([COLUMNS, *rows])


def passes_in_words(passes: Sequence[Pass], clients: int) -> list[str]:
    """Return sentences on how many passes were made, why they ended, and how far they moved the statistics.

    Args:
        passes: The passes.
        clients: The number of clients. If not all of them answered, the last sentence is a warning.
    """
    if not passes:
        return ["no pass was made"]
    last, layers = passes[-1], len(passes[-1].movements)
    if last.exchanges:
        end = f"layer by layer, with {last.exchanges} exchanges, which makes all of them exact"
    elif last.settled:
        end = f"stopped at pass {last.number}, which moved nothing"
    elif last.number == layers:
        end = "one per BatchNorm layer, which makes all of them exact"
    else:
        end = f"fewer than the {layers} layers, and the last pass still moved statistics: layers 1 to {last.number} are exact"
    lines = [f"{len(passes)} pass{'es' * (len(passes) != 1)} over {layers} BatchNorm layers: {end}"]
    for one in dict.fromkeys((passes[0], last)):
        layer, mean, variance = one.largest
        lines.append(
            f"pass {one.number} moved a mean by up to {mean:.3g} sd ({layer or 'model'}; its layer's variance by a factor {variance:.3g})"
        )
    if any(one.clients < clients for one in passes):
        fewest = min(one.clients for one in passes)
        lines.append(
            f"**not all clients were measured** (in one pass {fewest} of {clients}): the statistics lack the missing ones. Run it again"
        )
    return lines
