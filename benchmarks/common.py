"""What several benchmarks share: a bare loop to compare with, memory of a call, files that go on where they ended, tables."""

from __future__ import annotations

import csv
import ctypes
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RESULTS = Path(__file__).parent / "results"
Batches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # round -> the batches on which one client trains in that round


def bare_loop(model: nn.Module, clients: Sequence[Batches], rounds: int, **sgd: Any) -> Iterator[float]:
    """Train by FedAvg with BatchNorm in a plain PyTorch loop, and yield the seconds of each round.

    Args:
        model: The network.
        clients: The batches of each client.
        rounds: The number of rounds.
        sgd: The options of ``torch.optim.SGD``.
    """
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for round in range(1, rounds + 1):
        begin, parts = time.perf_counter(), list[dict[str, Tensor]]()
        for batches in clients:
            model.load_state_dict(shared)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), **sgd)
            for x, y in batches(round):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            parts.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        shared = {n: torch.stack([p[n] for p in parts]).mean(0) if t.is_floating_point() else t for n, t in shared.items()}
        yield time.perf_counter() - begin


def _status(field: str) -> int:
    """Return the bytes of this process's memory: now (``VmRSS``) or at its peak (``VmHWM``)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak(call: Callable[[], Any]) -> tuple[int, float, Any]:
    """Call ``call``; return by how many bytes memory rose to its peak meanwhile, the seconds that it took, and its result."""
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system: else what the call takes of it would not be counted
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - begin
    return _status("VmHWM") - before, seconds, value


def machine() -> str:
    """Return the processor's name, the operating system and the version of torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {platform.system()}, torch {torch.__version__}, one thread"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are aligned to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]


def shown(values: Sequence[float]) -> str:
    """Format accuracies as their mean and, of several, the standard deviation: ``81.3 (0.4)``; ``-`` if there are none."""
    if not values:
        return "-"
    return f"{mean(values):.1f} ({stdev(values):.1f})" if len(values) > 1 else f"{values[0]:.1f}"


def append(output: Path, rows: Iterable[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Append rows to a CSV file, each as soon as it is made."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if not file.tell():
            writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()
            print(row, flush=True)
