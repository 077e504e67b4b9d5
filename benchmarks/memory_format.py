"""Time a training step of each network in contiguous and in channels-last memory.

A step is forward, backward and SGD on one thread. Run ``python benchmarks/memory_format.py``.
"""

from __future__ import annotations

import copy
import platform
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from fl_bn.federation.eager import SGD
from fl_bn.federation.network import MEMORY_FORMATS
from fl_bn.models import build

CASES = (
    ("digits-cnn-small", 16, 16),
    ("digits-cnn-small", 32, 16),
    ("lenet-cnn-bn", 20, 32),
    ("simple-cnn", 4, 32),
    ("simple-cnn", 50, 32),
    ("resnet20", 32, 16),
    ("alexnet-bn-small", 32, 64),
)


def milliseconds(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    """Return the milliseconds of processor time per training step."""
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    begin = 0.0
    for step in range(-2, steps):
        if step == 0:
            begin = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return 1000 * (time.process_time() - begin) / steps


def main(
    turns: Annotated[int, typer.Option(help="measurements per network and memory layout; the fastest counts")] = 7,
    results: Path = Path(__file__).parent / "results" / "memory-format.md",
) -> None:
    """Time all networks, and write the table."""
    torch.set_num_threads(1)
    text = f"ms of processor time per training step, one thread, the least of {turns} turns; torch {torch.__version__}, "
    text += f"{platform.machine()}.\n\n"
    text += f"| network | batch | pixels | {' | '.join(MEMORY_FORMATS)} | times as fast |\n|---|---:|---:|---:|---:|---:|\n"
    for name, size, pixels in CASES:
        model = build(name, classes=10, channels=3, image_size=pixels, seed=0).train()
        x, y = torch.randn(size, 3, pixels, pixels), torch.randint(0, 10, (size,))
        found: dict[str, float] = {}
        for _ in range(turns):
            for layout, memory_format in MEMORY_FORMATS.items():
                took = milliseconds(copy.deepcopy(model).to(memory_format=memory_format), x, y, max(4, 400 // size))
                found[layout] = min(took, found.get(layout, took))
        usual, last = found.values()
        text += f"| {name} | {size} | {pixels} | {usual:.2f} | {last:.2f} | {usual / last:.2f} |\n"
    results.write_text(text)
    Console().print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
