"""Run many clients in one process: seconds per round early and late, peak memory, size of the run directory.

    python benchmarks/scale.py                                  # 10,000 clients, 100 per round, 1,000 rounds
    python benchmarks/scale.py --clients 1000 --cohort 20 --rounds 100

The data are a few random pixels per client, so that the time is spent in fl-bn and not in training.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fl_bn.flower import run_in_process

TABLE = Path(__file__).parent / "results" / "scale.md"
SAMPLES, PIXELS, CLASSES = 4, 8, 10  # samples per client; side of an image in pixels; classes
EARLY = 10  # the first rounds that are averaged


def make(folder: Path, clients: int) -> Path:
    """Write ``clients`` x ``SAMPLES`` random images to an npz file."""
    rng, file = np.random.default_rng(0), folder / "made.npz"
    kinds = {"train": clients * SAMPLES, "test": 200}
    arrays: dict[str, Any] = {f"x_{kind}": rng.integers(0, 256, (n, PIXELS, PIXELS, 1), dtype=np.uint8) for kind, n in kinds.items()}
    arrays |= {f"y_{kind}": np.arange(n) % CLASSES for kind, n in kinds.items()}
    np.savez(file, **arrays)
    return file


def memory() -> float:
    """Return how much memory of this process is resident now, in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


class Watch:
    """Record the time and memory at the end of every round, from a thread that runs beside the federation.

    A round has ended when its line appears in ``file``. ``seen`` then gets the seconds since the start, the resident
    megabytes, and the seconds of processor time.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.begin, self.seen, self._over = file, time.perf_counter(), list[tuple[float, float, float]](), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        at, lines = 0, 0
        while not self._over.wait(0.02):
            if self.file.exists() and (size := self.file.stat().st_size) > at:
                with self.file.open("rb") as source:
                    source.seek(at)
                    new = source.read(size - at).count(b"\n")
                at, lines = size, lines + new
                self.seen += [(time.perf_counter() - self.begin, memory(), time.process_time())] * new


def main(
    clients: int = 10_000,
    cohort: int = 100,
    rounds: Annotated[int, typer.Option(min=2 * EARLY)] = 1_000,
    method: str = "fedavg",
    write: Annotated[bool, typer.Option(help="write the table to benchmarks/results")] = True,
) -> None:
    """Run the federation, and write the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "dataset": "npz", "data-path": str(make(folder, clients)), "model": "mnist-mlp", "partition": "iid", "method": method,
            "clients": clients, "fraction": cohort / clients, "rounds": rounds, "local-steps": 1, "batch-size": 4,
            "evaluate-every": rounds, "pictures": False, "output": str(folder / "runs"), "name": "scale",
        }  # fmt: skip
        with Watch(folder / "runs" / "scale" / "rounds.jsonl") as watch:
            run_in_process(config)
        whole = time.perf_counter() - watch.begin
        size = sum(file.stat().st_size for file in (folder / "runs" / "scale").rglob("*") if file.is_file()) / 1e6
        seconds = [json.loads(line)["seconds"] for line in (folder / "runs" / "scale" / "rounds.jsonl").read_text().splitlines()]
    early, late = sum(seconds[1:EARLY]) / (EARLY - 1), sum(seconds[-EARLY:-1]) / (EARLY - 1)
    worked = [after[2] - before[2] for before, after in zip(watch.seen, watch.seen[1:], strict=False)]  # per round, from the second on
    rows = {
        "seconds to the end of round 1": f"{watch.seen[0][0]:.2f}",
        f"seconds per round, rounds 2 to {EARLY}": f"{early:.4f}",
        f"seconds per round, the last {EARLY - 1} but one": f"{late:.4f}",
        "late / early": f"{late / early:.2f}",
        f"processor's seconds per round, rounds 2 to {EARLY}": f"{sum(worked[: EARLY - 1]) / (EARLY - 1):.4f}",
        f"processor's seconds per round, the last {EARLY - 1} but one": f"{sum(worked[-EARLY:-1]) / (EARLY - 1):.4f}",
        f"megabytes resident after round {EARLY}": f"{watch.seen[EARLY - 1][1]:.0f}",
        "megabytes resident after the last round": f"{watch.seen[-1][1]:.0f}",
        "megabytes at the peak": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f}",
        "run directory (MB)": f"{size:.2f}",
        "seconds after the last round": f"{whole - watch.seen[-1][0]:.2f}",
        "seconds in all": f"{whole:.1f}",
    }
    title = f"{clients:,} clients, {cohort} per round, {rounds:,} rounds, {method}, mnist-mlp, images of {PIXELS} pixels, in process."
    text = "\n".join([title, "", "| | |", "|---|---:|", *(f"| {label} | {value} |" for label, value in rows.items())]) + "\n"
    if write:
        TABLE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    typer.run(main)
