"""Time how long things take to start: the command line, the imports, and a run until its first round.

    python benchmarks/startup.py > benchmarks/results/startup.md
    python benchmarks/startup.py CHECKOUT              # measures another checkout, for comparison

Each figure is the median of several fresh processes with a warm disk cache. The floor is the time that the import
of torch alone takes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from common import table

ROOT = Path(__file__).resolve().parent.parent
SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
COMMAND = ("-m", "fl_bn.cli.main")
KEYS = "dataset='digits' rounds={rounds} local-steps=1 pictures=false output='{folder}' name='{name}'"


def seconds(tree: Path, *arguments: str) -> float:
    """Run a fresh Python process with the sources in ``tree``; return the wall-clock seconds that it takes."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=tree, env=_environment(tree), check=True, **SILENT)
    return time.perf_counter() - begin


def first_round(tree: Path, folder: Path, name: str) -> float:
    """Return the seconds from the start of `fl-bn run` until round 1 is in rounds.jsonl. Then the run is killed.

    Raises:
        RuntimeError: The command ended before that.
    """
    keys = KEYS.format(rounds=2, folder=folder, name=name)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *COMMAND, "run", "--run-config", keys], cwd=tree, env=_environment(tree), **SILENT)
    rounds = folder / name / "rounds.jsonl"
    while not (rounds.exists() and rounds.stat().st_size):
        if process.poll() is not None:
            raise RuntimeError(f"fl-bn run ended with exit status {process.returncode} before its first round")
        time.sleep(0.005)
    took = time.perf_counter() - begin
    process.kill()
    process.wait()
    return took


def measure(tree: Path, repetitions: int) -> list[float]:
    """Measure all rows of the table (``ROWS``) with the sources in ``tree``; return the seconds of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def median(*arguments: str) -> float:
            return statistics.median(seconds(tree, *arguments) for _ in range(repetitions))

        first_round(tree, folder, "warm")
        return [
            median(*COMMAND, "--help"),
            median("-c", "import fl_bn"),
            median("-c", "import torch"),
            statistics.median(first_round(tree, folder, f"r{i}") for i in range(repetitions)),
        ]


ROWS = (
    "`fl-bn --help`",
    '`python -c "import fl_bn"`',
    "floor: `import torch`",
    "first round of `fl-bn run` (digits, 10 clients, calibration included)",
)


def main(checkout: Annotated[Path, typer.Argument(help="the checkout to measure")] = ROOT, repetitions: int = 3) -> None:
    """Measure all rows, and print the table."""
    print(f"Seconds, median of {repetitions}; `python benchmarks/startup.py`.\n")
    found = measure(checkout.resolve(), repetitions)
    print("\n".join(table(["", "seconds"], [(row, f"{value:.2f}") for row, value in zip(ROWS, found, strict=True)])))


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}


if __name__ == "__main__":
    typer.run(main)
