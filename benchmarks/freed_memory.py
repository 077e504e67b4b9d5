"""Time a training step of each network in two modes of Linux's C library: it keeps freed memory, or returns it to the
system.

    python benchmarks/freed_memory.py

Each measurement is a process of its own with one thread, because an allocator's speed depends on earlier allocations.
The two modes are measured alternately.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch.nn import functional as F

from fl_bn.federation.eager import SGD
from fl_bn.models import build

KEPT = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 96 << 20, "MALLOC_TOP_PAD_": 1 << 20}  # bytes
CASES = (
    ("digits-cnn-small", 16, 16),
    ("simple-cnn", 4, 32),
    ("simple-cnn", 50, 32),
    ("simple-cnn", 128, 32),
    ("resnet20", 32, 16),
    ("alexnet-bn-small", 32, 64),
)


def turn(name: str, size: int, pixels: int) -> tuple[float, float, float]:
    """Time training steps of one network in this process.

    Args:
        name: The name of the network.
        size: The batch size.
        pixels: The side of the images in pixels.

    Returns:
        Milliseconds of processor time per step, page faults per step, and the peak memory in MB.
    """
    torch.set_num_threads(1)
    model = build(name, classes=10, channels=3, image_size=pixels, seed=0).train().to(memory_format=torch.channels_last)
    x, y = torch.randn(size, 3, pixels, pixels), torch.randint(0, 10, (size,))
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    steps, begin, faults = max(20, 1000 // size), 0.0, 0
    for step in range(-10, steps):
        if step == 0:
            begin, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (time.process_time() - begin) / steps, (usage.ru_minflt - faults) / steps, usage.ru_maxrss / 1024


def main(
    turns: Annotated[int, typer.Option(help="processes per mode and network; the table has their medians")] = 5,
    results: Path = Path(__file__).parent / "results" / "freed-memory.md",
    only: Annotated[str, typer.Option(hidden=True, help="time only this network, in this process: NAME,BATCH,PIXELS")] = "",
) -> None:
    """Time all networks, and write the table."""
    if only:
        network, batch, edge = only.split(",")
        print(*turn(network, int(batch), int(edge)))
        return
    text = f"Medians of {turns} processes, one thread; torch {torch.__version__}, {platform.machine()}, "
    text += f"{' '.join(platform.libc_ver())}.\n\n"
    text += "| network | batch | pixels | ms per step: given back | kept | times as fast | page faults per step: given back | kept "
    text += f"| MB at the peak: given back | kept |\n|---|{'---:|' * 9}\n"
    for name, size, pixels in CASES:
        found: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(turns):
            for keep, of in found.items():
                command = [sys.executable, __file__, "--only", f"{name},{size},{pixels}"]
                environment = {**os.environ, **({key: str(value) for key, value in KEPT.items()} if keep else {})}
                said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
                of.append([float(value) for value in said.split()])
        (ms, faults, peak), (kept, fewer, more) = ([median(values) for values in zip(*of, strict=True)] for of in found.values())
        text += f"| {name} | {size} | {pixels} | {ms:.2f} | {kept:.2f} | {ms / kept:.2f} | {faults:.0f} | {fewer:.0f} "
        text += f"| {peak:.0f} | {more:.0f} |\n"
    results.write_text(text)
    Console().print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
