"""Compare the time of fl-bn in this process with that of a bare PyTorch loop, method by method.

    python benchmarks/throughput.py

The bare loop makes the same local steps on the same batches, averages the same tensors, and does nothing else. What a run
takes longer is the price of messages, checks, records and evaluation. ``peers.py`` has other simulators.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from common import RESULTS, Batches, bare_loop, table

from fl_bn.app.assembly import client_samples, source_model
from fl_bn.app.config import RunConfig
from fl_bn.data.batches import draw_batches
from fl_bn.federation.settings import seeded
from fl_bn.flower import run_in_process

METHODS = ("fedavg", "fixbn", "hbn", "fbn")


def bare(config: RunConfig) -> float:
    """Return the seconds of ``config.rounds`` rounds of the bare loop on the batches that fl-bn draws."""
    torch.set_num_threads(1)
    model = source_model(config)

    def batches_of(index: int) -> Batches:
        samples, like = client_samples(config, index)[0], next(model.parameters())

        def batches(round: int) -> Any:
            draw = draw_batches(len(samples), config.batch_size, seeded(config.seed, index, round, 0), steps=config.local_steps)
            return (samples.batch(batch, like) for batch in draw)

        return batches

    sgd = {"lr": config.learning_rate, "momentum": config.momentum, "weight_decay": config.weight_decay}
    return sum(bare_loop(model, [batches_of(index) for index in range(config.clients)], config.rounds, **sgd))


def ours(config: RunConfig, method: str) -> float:
    """Return the seconds of a whole run of ``method``."""
    begin = time.perf_counter()
    run_in_process({**config.to_mapping(), "method": method})
    return time.perf_counter() - begin


def ratios(config: RunConfig, repeat: int) -> list[float]:
    """Return the time of each method, divided by that of the bare loop; the medians of ``repeat`` turns."""
    turns = []
    for _ in range(repeat):
        loop = bare(config)
        turns.append([ours(config, method) / loop for method in METHODS])
    return [median(values) for values in zip(*turns, strict=True)]


def changed(config: RunConfig, **keys: Any) -> RunConfig:
    """Return a copy of ``config`` in which ``keys`` have other values."""
    return RunConfig.from_mapping({**config.to_mapping(), **{name.replace("_", "-"): value for name, value in keys.items()}})


def main(
    rounds: int = 20,
    repeat: Annotated[int, typer.Option(help="how often each method is timed; the median counts")] = 3,
    results: Path = RESULTS / "throughput.md",
) -> None:
    """Time all methods, and write the table."""
    base = RunConfig(output="", pictures=False, rounds=rounds, evaluate_every=rounds, learning_rate=0.002, workers=1, calibrate=0)
    for method in METHODS:  # load the data, warm up
        ours(changed(base, rounds=1), method)
    columns = [[f"{value:.2f}" for value in ratios(changed(base, local_steps=n, batch_size=b), repeat)] for n, b in ((10, 32), (5, 16))]
    head = ["method", "10 steps of 32: time / bare loop", "5 steps of 16: time / bare loop"]
    text = f"{rounds} rounds, {base.clients} clients, digits-cnn-small, {os.cpu_count()} cores, one torch thread; medians of {repeat} "
    text += "turns. The bare loop does the same local steps on the same batches and averages the same tensors, with nothing around it.\n\n"
    text += "\n".join(table(head, zip(METHODS, *columns, strict=True))) + "\n"
    results.write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
