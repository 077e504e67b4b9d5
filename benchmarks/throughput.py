"""Compare the time of a round with a bare PyTorch loop: in one process, in several, and by Flower's simulation on
Ray.

    python benchmarks/throughput.py

The bare loop makes the same local steps on the same batches, averages the same tensors, and does nothing else. A
round's extra time is the price of messages, checks, records and evaluation. Ray's start is not counted. Every process
has one torch thread.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from simulation import on_ray
from torch.nn import functional as F

from fl_bn.data.batches import draw_batches
from fl_bn.federation.settings import seeded
from fl_bn.flower import run_in_process
from fl_bn.run.assembly import client_samples, source_model
from fl_bn.run.config import RunConfig


def bare_loop(config: RunConfig) -> float:
    """Return the seconds of ``config.rounds`` rounds of FedAvg with BatchNorm in a plain PyTorch loop."""
    torch.set_num_threads(1)
    clients = [client_samples(config, index)[0] for index in range(config.clients)]
    model = copy.deepcopy(source_model(config))
    shared = copy.deepcopy(model.state_dict())
    begin = time.perf_counter()
    for round in range(1, config.rounds + 1):
        parts = []
        for index, samples in enumerate(clients):
            model.load_state_dict(shared)
            model.train()
            optimizer = torch.optim.SGD(
                model.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
            )
            for batch in draw_batches(len(samples), config.batch_size, seeded(config.seed, index, round, 0), steps=config.local_steps):
                x, y = samples.batch(batch, next(model.parameters()))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            parts.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        shared = {
            name: torch.stack([p[name] for p in parts]).mean(0) if tensor.is_floating_point() else tensor for name, tensor in shared.items()
        }
    return time.perf_counter() - begin


def in_process(config: RunConfig) -> float:
    """Run fl-bn with ``config`` in this process; return the seconds of the whole run."""
    begin = time.perf_counter()
    run_in_process(config.to_mapping())
    return time.perf_counter() - begin


Variants = dict[str, dict[str, Any]]


def ratios(config: RunConfig, variants: Variants, repeat: int) -> dict[str, float]:
    """Return the time of every variant, divided by the time of the bare loop; the median over ``repeat`` measurements.

    Args:
        config: The run config.
        variants: Name of a variant -> the run-config keys that it changes.
        repeat: The number of measurements.
    """
    found = {name: list[float]() for name in variants}
    for _ in range(repeat):
        bare = bare_loop(config)
        for name, keys in variants.items():
            found[name].append(in_process(changed(config, keys)) / bare)
    return {name: median(values) for name, values in found.items()}


def above(config: RunConfig, variants: Variants, repeat: int) -> dict[str, float]:
    """Return by how many milliseconds per client and round every variant is slower than the bare loop.

    The time of ``config.rounds`` rounds is subtracted from that of five times as many, so that costs which occur once
    (start, evaluation) are not counted.
    """
    long = changed(config, {"rounds": 5 * config.rounds, "evaluate-every": 5 * config.rounds})
    found = {name: list[float]() for name in variants}
    for _ in range(repeat):
        bare = bare_loop(long) - bare_loop(config)
        for name, keys in variants.items():
            more = in_process(changed(long, keys)) - in_process(changed(config, keys)) - bare
            found[name].append(1000 * more / (long.rounds - config.rounds) / config.clients)
    return {name: median(values) for name, values in found.items()}


def changed(config: RunConfig, keys: Mapping[str, Any]) -> RunConfig:
    """Return a copy of ``config`` in which ``keys`` have other values."""
    return RunConfig.from_mapping({**config.to_mapping(), **keys})


def main(
    rounds: int = 20,
    repeat: Annotated[int, typer.Option(help="how often each variant is timed; the median counts")] = 3,
    ray: Annotated[bool, typer.Option(help="measure Flower's simulation on Ray, too")] = True,
    results: Path = Path(__file__).parent / "results" / "throughput.md",
) -> None:
    """Time all methods, and write the table."""
    base = RunConfig(method="fedavg", rounds=rounds, output="", pictures=False, evaluate_every=rounds, learning_rate=0.002, workers=1)
    methods: Variants = {name: {"method": name} for name in ("fedavg", "fixbn", "hbn", "fbn")}
    cores = os.cpu_count() or 1
    for keys in methods.values():  # load the data, warm up
        in_process(changed(base, {"rounds": 1, **keys}))
    lines = [
        "| engine | method | 10 steps of 32: time / bare loop | 5 steps of 16: time / bare loop | "
        "1 step of 16: ms above the bare loop, per client and round |",
        "|---|---|---:|---:|---:|",
    ]
    cells: dict[str, list[str]] = {name: [] for name in methods}
    for steps, size in ((10, 32), (5, 16), (1, 16)):
        config = changed(base, {"local-steps": steps, "batch-size": size, "calibrate": 0})
        found = ratios(config, methods, repeat) if steps > 1 else above(config, methods, repeat)
        for name, value in found.items():
            cells[name].append(f"{value:.2f}" if steps > 1 else f"{value:.1f}")
    lines += [f"| in process | {name} | {' | '.join(values)} |" for name, values in cells.items()]
    config = changed(base, {"local-steps": 10, "batch-size": 32})
    one, several = in_process(config), in_process(changed(config, {"workers": cores}))
    long = changed(config, {"rounds": 4 * rounds})
    one, several = (in_process(changed(long, {"workers": n})) - t for n, t in ((1, one), (cores, several)))
    workers = f"{3 * rounds} rounds of 10 steps of 32, start not counted: workers={cores} is {one / several:.2f} times as fast as "
    workers += f"workers=1 ({several:.1f} s against {one:.1f})."
    text = f"{rounds} rounds, {base.clients} clients, digits-cnn-small, {cores} cores, one torch thread per process; medians of {repeat} "
    text += "turns. The last column is of the rounds after the first, start and evaluation not counted. "
    text += "The bare loop does the same local steps on the same batches and averages the same tensors, with nothing around it.\n\n"
    text += "\n".join(lines) + f"\n\n{workers}\n"
    if ray:
        records, whole = on_ray(config)
        seconds, bare = sum(record["seconds"] for record in records), bare_loop(config)
        text += f"\nFlower's simulation on Ray, {cores} clients at a time: {seconds / bare:.2f} times the bare loop, "
        text += f"{whole:.0f} s with its start.\n"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(text)
    Console().print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
