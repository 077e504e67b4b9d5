"""Rounds per second: a bare PyTorch loop, the in-process engine, and Flower's simulation on Ray, in one run on one machine.

    python benchmarks/throughput.py

The bare loop does the same local steps on the same batches and averages the same tensors, with nothing around it: what is above it is the
price of messages, checks, records and evaluation. Ray's rounds are counted without its start; one torch thread per process everywhere.
"""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from simulation import on_ray
from torch.nn import functional as F

from fl_bn.data.batches import draw_batches
from fl_bn.federation.settings import seeded
from fl_bn.flower import run_in_process
from fl_bn.run.assembly import client_samples, source_model
from fl_bn.run.config import RunConfig


def bare_loop(config: RunConfig) -> float:
    """Seconds for the rounds of plain FedAvg with BatchNorm, by hand."""
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
    begin = time.perf_counter()
    run_in_process(config.to_mapping())
    return time.perf_counter() - begin


def main(
    rounds: int = 60, local_steps: int = 10, batch_size: int = 32, results: Path = Path(__file__).parent / "results" / "throughput.md"
) -> None:
    base = RunConfig(
        method="fedavg", rounds=rounds, local_steps=local_steps, batch_size=batch_size, output="", pictures=False, evaluate_every=rounds
    )
    bare_loop(RunConfig.from_mapping({**base.to_mapping(), "rounds": 3}))  # load the data, warm up
    bare = bare_loop(base)
    rows = [("bare PyTorch loop", "fedavg", bare, bare)]
    for method in ("fedavg", "fixbn", "hbn", "fbn"):
        seconds = in_process(RunConfig.from_mapping({**base.to_mapping(), "method": method}))
        rows.append(("run_in_process", method, seconds, seconds))
    records, whole = on_ray(base)
    rows.append(("flower-simulation on Ray", "fedavg", sum(record["seconds"] for record in records), whole))
    table, lines = Table("engine", "method", "rounds/s", "time / bare loop", "in all (s)"), []
    for engine, method, seconds, whole in rows:
        cells = (engine, method, f"{rounds / seconds:.2f}", f"{seconds / bare:.2f}", f"{whole:.1f}")
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    Console().print(table)
    head = (
        f"{rounds} rounds, {base.clients} clients, {local_steps} steps on batches of {batch_size}, digits-cnn-small, "
        f"{os.cpu_count()} cores.\n\n"
    )
    columns = "| engine | method | rounds/s | time / bare loop | in all (s) |\n|---|---|---|---|---|\n"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(head + columns + "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
