"""Time HBN's layer alone, forward and backward, compared with nn.BatchNorm2d: in training, float32, one thread.

    python benchmarks/layers.py                                          # on a quiet machine
    nice -n -10 python benchmarks/layers.py --output benchmarks/results/layers.md

All layers are timed in one process. They take turns, in an order drawn anew each time, so that other load on the
machine hits all of them alike. The clock is this process's processor time, which stops while another process has the
core. One turn is a number of calls that take about ``SECONDS`` together. The table has the median and the
quartiles of the time per call, and of its ratio to nn.BatchNorm2d in the same turn. ``plain formula`` is HBN's layer
without its kernels: equations 9 and 10 on tensors, differentiated by autograd.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import machine, table
from torch import Tensor, nn

from fl_bn.bn.hybrid import plain
from fl_bn.bn.layers import FederatedBatchNorm, HybridBatchNorm
from fl_bn.bn.moments import channel_moments

SHAPES = ((32, 64, 32, 32), (4, 16, 32, 32))
REFERENCE = "nn.BatchNorm2d"
SECONDS = 0.01  # of a turn


class PlainHybrid(HybridBatchNorm):
    """HBN's layer computed by its formula, without kernels."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` by equations 9 and 10."""
        return plain(x, (self.weight, self.bias), self.mixing_logit, (self.running_mean, self.running_var), channel_moments(x), self.eps)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    REFERENCE: nn.BatchNorm2d,
    "HybridBatchNorm": HybridBatchNorm,
    "plain formula": PlainHybrid,
    "FederatedBatchNorm": FederatedBatchNorm,
}


def calls(layer: nn.Module, x: Tensor, upstream: Tensor, count: int) -> float:
    """Return the processor seconds of one forward and backward pass, as a mean over ``count`` passes. Gradients add up."""
    begin = time.process_time()
    for _ in range(count):
        layer(x).backward(upstream)
    return (time.process_time() - begin) / count


def measured(shape: tuple[int, ...], turns: int) -> dict[str, list[float]]:
    """Time all layers on random inputs of ``shape``; return layer -> its seconds per call in each of ``turns``."""
    torch.manual_seed(0)
    layers = {name: make(shape[1]).train() for name, make in LAYERS.items()}
    x, upstream, order = torch.randn(shape).requires_grad_(), torch.randn(shape), random.Random(0)
    counts = {name: max(1, round(SECONDS / min(calls(layer, x, upstream, 5) for _ in range(3)))) for name, layer in layers.items()}
    found: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(turns):
        for name in order.sample(list(layers), len(layers)):
            found[name].append(calls(layers[name], x, upstream, counts[name]))
    return found


def rows_of(found: dict[str, list[float]]) -> Iterator[list[str]]:
    """Yield the rows of the table: each layer's times, and their ratios to those of the reference in the same turn."""
    for name, seconds in found.items():
        low, middle, high = (1e6 * value for value in statistics.quantiles(seconds, n=4))
        ratio = statistics.quantiles([one / other for one, other in zip(seconds, found[REFERENCE], strict=True)], n=4)
        yield [name, f"{middle:.1f} ({low:.1f} to {high:.1f})", f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"]


def main(
    output: Annotated[Path | None, typer.Option(help="Write the tables to this file, too.")] = None,
    turns: Annotated[int, typer.Option(min=4, help="How often each layer is timed.")] = 200,
) -> None:
    """Time all layers, and print the tables."""
    torch.set_num_threads(1)
    command = f"python benchmarks/layers.py --turns {turns}"
    lines = ["# A layer alone", "", f"`{command}`: forward and backward in training, float32. {machine()}.", ""]
    for shape in SHAPES:
        found = measured(shape, turns)
        head = ["layer", "microseconds (quartiles)", "ratio (quartiles)"]
        lines += [f"{shape}, {turns} turns:", "", *table(head, rows_of(found)), ""]
    text = "\n".join(lines)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    typer.run(main)
