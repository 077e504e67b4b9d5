"""Compare robust rules of fl_bn with ByzFL's and Flower's: time, memory and agreement, on one machine with one
thread.

    python benchmarks/robust.py

Every rule of every library is measured on every input, in a process of its own: the first call for memory, the
fastest of several for time. Memory is the peak of the resident set, which counts NumPy's and torch's memory alike.
The rows are Gaussian, float32, in a list of separate arrays as a server has them (tensors for "ByzFL, torch").
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from robust_cells import FLOWER, NUMPY, OURS, PRELOAD, TORCH, Cell, Measured, measure

CASES = "10x270000,10x11000000,50x270000,100x270000,100x2700000"
QUICK = "10x10000,20x10000"
RULES = "median,trimmed-mean,nnm+trimmed-mean,multi-krum,geometric-median"
LIBRARIES = (OURS, TORCH, NUMPY, FLOWER)
NOT_IN_FLOWER = ("nnm+trimmed-mean", "geometric-median")
MARGIN = 1 << 30  # bytes of memory that stay free
SETUP = 300.0  # seconds for a process to make its input
MEASURED = ("time / fl_bn", "extra memory / input", "beside the result (MB)", "difference")
FIELDS = ("n", "d", "f", "rule", "library", "milliseconds", *MEASURED, "note")


def byzantine(n: int) -> int:
    """Return f, the assumed number of Byzantine rows among ``n``: 3 for ten rows, else a fifth of them, rounded down."""
    return 3 if n == 10 else n // 5


def available() -> int:
    """Return how many bytes of memory a new process can use."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def measured(cell: Cell, enough: float, limit: float) -> Measured | str:
    """Measure ``cell`` in a process of its own; return its numbers, or the reason why there are none.

    Args:
        cell: The cell.
        enough: The seconds for which the call is repeated.
        limit: The process is killed if one call takes longer than this number of seconds.
    """
    if cell.bytes + cell.need > available() - MARGIN:
        return f"needs {cell.need / 1e9:.0f} GB"
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(theirs, cell, enough))
    process.start()
    theirs.close()
    wait = SETUP
    try:
        while ours.poll(wait):
            answer: Any = ours.recv()
            if isinstance(answer, Measured):
                return answer
            if answer.startswith("fails"):
                return str(answer)
            wait = SETUP if answer == "timed" else limit
        return f"> {wait:.0f} s"
    except EOFError:
        return "ended without an answer (out of memory?)"
    finally:
        process.kill()
        process.join()


def row_of(cell: Cell, result: Measured | str, ours: Measured | str) -> dict[str, str]:
    """Return one line of the table, column -> text.

    Args:
        cell: The cell.
        result: Its numbers, or the reason why there are none.
        ours: The numbers of fl_bn's own rule on the same input.
    """
    row: dict[str, str] = dict.fromkeys(FIELDS, "")
    row |= {"n": str(cell.n), "d": str(cell.d), "f": str(cell.f), "rule": cell.rule, "library": cell.library}
    if isinstance(result, str):
        return row | {"note": result}
    row |= {"milliseconds": f"{1e3 * result.seconds:.2f}", "extra memory / input": f"{result.extra / cell.bytes:.2f}"}
    row["beside the result (MB)"] = f"{max(0.0, 1e-6 * (result.extra - 4 * cell.d)):.1f}"
    if isinstance(ours, Measured):
        row["time / fl_bn"] = f"{result.seconds / ours.seconds:.1f}"
    return row | ({} if cell.library == OURS else {"difference": f"{result.difference:.0e}"})


def markdown(rows: list[dict[str, str]]) -> str:
    """Return the results as Markdown, with one table per input."""
    lines, case = [machine()], ""
    for row in rows:
        n, d, f = int(row["n"]), int(row["d"]), row["f"]
        title = f"{n} rows of {d:,} numbers ({4e-6 * n * d:,.1f} MB), f = {f}"
        if title != case:
            case = title
            lines += ["", f"### {case}", "", f"| rule | library | time (ms) | {' | '.join(MEASURED)} |"]
            lines.append("|---" * 7 + "|")
        cells = [row["rule"], row["library"], row["note"] or row["milliseconds"], *(row[field] for field in MEASURED)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Describe the machine and the libraries."""
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "byzfl", "flwr"))
    return f"{models[0] if models else platform.machine()}, one thread; Python {platform.python_version()}, {libraries}."


def cases_of(text: str) -> list[tuple[int, int]]:
    """Parse ``"10x270000,50x270000"`` to pairs (n, d).

    Raises:
        typer.BadParameter: The text has another form, or a case has fewer than 3 rows or no column.
    """
    try:
        pairs = [(int(n), int(d)) for n, d in (case.split("x") for case in text.split(","))]
    except ValueError:
        raise typer.BadParameter(f"expected cases ROWSxCOLUMNS, separated by commas, such as {CASES}, but got {text!r}") from None
    if any(n < 3 or d < 1 or n < 2 * byzantine(n) + 3 for n, d in pairs):
        raise typer.BadParameter(f"expected at least 3 rows and 1 column in every case, but got {text!r}")
    return pairs


def main(
    cases: str = CASES,
    rules: str = RULES,
    quick: bool = False,
    limit: float = 120.0,
    output: Path = Path(__file__).parent / "results",
) -> None:
    """Measure all rules, and write the table.

    ``--cases 10x270000,50x270000`` (rows x columns); ``--rules median,multi-krum``; ``--quick``: small inputs, to see
    that it runs.
    """
    unknown = set(rules.split(",")) - set(RULES.split(","))
    if unknown:
        raise typer.BadParameter(f"--rules: expected some of {RULES}, but got {', '.join(sorted(unknown))}")
    for name in ("OPENBLAS", "OMP", "MKL"):
        os.environ[f"{name}_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(PRELOAD)
    console = Console()
    cells = [
        Cell(rule, library, n, d, byzantine(n))
        for n, d in cases_of(QUICK if quick else cases)
        for rule in rules.split(",")
        for library in LIBRARIES
        if not (library == FLOWER and rule in NOT_IN_FLOWER)
    ]
    rows: list[dict[str, str]] = []
    ours: Measured | str = ""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(cells))
        for cell in cells:
            progress.update(task, description=f"{cell.n} x {cell.d:,} {cell.rule}, {cell.library}")
            result = measured(cell, 0.05 if quick else 2.0, limit)
            ours = result if cell.library == OURS else ours
            rows.append(row_of(cell, result, ours))
            progress.console.print(" | ".join(rows[-1].values()))
            progress.advance(task)
    output.mkdir(parents=True, exist_ok=True)
    with (output / "robust.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    (output / "robust.md").write_text(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
