"""Measure the cost of exact statistics for ResNet-50, by passes (a message per layer) and by a layer-wise exchange
(one message).

    python benchmarks/recalibration.py

*Deployed* is a kit of fl-bn on loopback with TLS: SuperLink, SuperNodes, the ServerApp and a ClientApp per message
are processes of their own. *In process* is the same run by the in-process engine. The network has random weights, the
images are random, and nobody trains. The last line compares float64 statistics with those of one process that has all
data.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from fl_bn.bn.roles import batch_norms
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import BatchNormStrategy, Rounds, run_in_process
from fl_bn.methods import METHODS
from fl_bn.models import build

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.deployment.federation import Federation, differing  # noqa: E402
from tests.in_process import WatchedGrid, client_app  # noqa: E402

Line = dict[str, Any]


def images(path: Path, count: int, size: int) -> Samples:
    """Write random images of three channels to an npz file, and return them."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (count, 3, size, size), dtype=np.uint8), np.arange(count) % 10
    last = x.transpose(0, 2, 3, 1)
    np.savez(path, x_train=last, y_train=y, x_test=last[:20], y_test=y[:20])
    return Samples(torch.from_numpy(x), torch.from_numpy(y))


def read(folder: Path) -> tuple[int, int, float]:
    """Return a finished run's messages per client, its number of exchanges, and its seconds."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return len(lines) - 1, sum(line["exchanges"] for line in lines), sum(line["seconds"] for line in lines)


def union(model: nn.Module, samples: Samples) -> dict[str, tuple[Tensor, Tensor]]:
    """Return layer -> mean and unbiased variance of every BatchNorm layer's input, over all samples as one batch.

    Each layer normalises with these statistics of its own input.
    """
    found = {}

    def hook(name: str) -> Any:
        def measure(layer: Any, args: tuple[Tensor, ...]) -> None:
            values = args[0].transpose(0, 1).flatten(1)
            layer.running_mean.copy_(values.mean(1)), layer.running_var.copy_(values.var(1))
            found[name] = values.mean(1), values.var(1)

        return measure

    for name, layer in batch_norms(model.eval()).items():
        layer.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        model(to_input(samples.x, torch.float64))
    return found


def deviation(samples: Samples, clients: int, size: int) -> float:
    """Return how far the statistics of a float64 exchange are from those of all samples together.

    The deviation of the means is in standard deviations, that of the variances is relative; the larger one is
    returned.
    """

    def network() -> nn.Module:
        return build("resnet50", classes=10, channels=3, image_size=size, seed=0).double()

    method, settings = METHODS["fedavg"](), LocalTraining(batch_size=16, steps=1)
    parts = [Samples(samples.x[i::clients], samples.y[i::clients]) for i in range(clients)]
    strategy = BatchNormStrategy(network(), method, Rounds(clients, calibrate=-1, recalibration="exchange"))
    strategy.start(WatchedGrid(client_app(method, parts, settings, model=network()), clients), num_rounds=0)
    found, true = running_statistics(strategy.transport.shared.model), union(network(), samples)
    means = max(float(((found[k].mean - mean).abs() / var.sqrt()).max()) for k, (mean, var) in true.items())
    return max(means, max(float((found[k].var / var - 1).abs().max()) for k, (_, var) in true.items()))


def main(clients: int = 3, samples: int = 32, size: int = 32, output: Path | None = None) -> None:
    """Measure all engines, and print the table.

    ``samples`` is the number per client. ``output`` is a file for the table, written after each line.
    """
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    lines = [
        f"ResNet-50 (torchvision, random weights, 53 BatchNorm layers, float32), {clients} clients of {samples} images of {size} x {size}, "
        f"torch {torch.__version__}, one thread per process.",
        "",
        "| engine | recalibration | messages per client | exchanges | seconds | with its start (s) | bits |",
        "|---|---|---:|---:|---:|---:|---|",
    ]

    def say(line: str) -> None:
        lines.append(line)
        Console().print(line, highlight=False, soft_wrap=True)
        if output is not None:
            output.write_text("\n".join([*lines, ""]))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = images(folder / "images.npz", clients * samples, size)
        config: Line = {
            "method": "fedavg", "model": "resnet50", "dataset": "npz", "data-path": str(folder / "images.npz"), "clients": clients,
            "partition": "iid", "rounds": 0, "calibrate": -1, "evaluate-every": 1000, "pictures": False, "device": "cpu",
            "wait-timeout": 900.0, "round-timeout": 900.0, "exchange-join-timeout": 300.0,
        }  # fmt: skip
        first: Path | None = None

        def tell(engine: str, how: str, made: Path, seconds: float) -> None:
            nonlocal first
            first = first or made
            same = "the first line's" if differing(made / "model.safetensors", first / "model.safetensors") == [] else "others"
            messages, exchanges, spent = read(made)
            say(f"| {engine} | {how} | {messages} | {exchanges} | {spent:.1f} | {seconds:.1f} | {same} |")

        with Federation(folder, [f"site{index}" for index in range(clients)]) as federation:
            federation.start_all()
            for how in ("auto", "passes"):
                begin = time.perf_counter()
                federation.run({**config, "recalibration": how, "name": how}, timeout=7200)
                tell("deployed", how, federation.result(how), time.perf_counter() - begin)
        for how in ("auto", "passes"):
            begin = time.perf_counter()
            made = run_in_process({**config, "recalibration": how, "name": how, "output": str(folder)})
            assert made is not None
            tell("in process", how, made, time.perf_counter() - begin)
    say("")
    say(f"In float64 the statistics by exchange are those of one process that has all data, up to {deviation(data, clients, size):.1g}.")


if __name__ == "__main__":
    typer.run(main)
