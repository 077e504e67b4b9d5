"""Measure what FedTAN's layer-wise exchange costs: its latency, and the time of a round compared with a round of
FedAvg.

    python benchmarks/exchange.py

Latency is measured over loopback, with client processes that only exchange. Rounds are timed in Flower's simulation
on Ray, with ResNet-20, all clients at once and one torch thread per client. The profile divides the extra time of a
round of FedTAN among its causes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
import typer
from rich.console import Console
from simulation import on_ray
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import convert
from fl_bn.exchange.call import Answer, Key, Layer, Quantity
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.session import Session
from fl_bn.methods.fedtan import exchanging, fedtan
from fl_bn.models import build
from fl_bn.run.config import RunConfig

CHANNELS = 64  # channels of ResNet-20's widest layers
WARM = 20


def one_client(address: str, token: str, exchanges: int, together: Barrier, seconds: Queue[list[float]]) -> None:
    """Time the exchanges of one client; put the list of their seconds into the queue ``seconds``.

    The first ``WARM`` exchanges are not in the list.

    Args:
        address: The address of the exchange service, ``HOST:PORT``.
        token: The token of the client.
        exchanges: The number of exchanges that are timed.
        together: The barrier at which all clients wait before the first exchange.
        seconds: The queue.
    """
    torch.set_num_threads(1)
    values, key, taken = torch.ones(2 * CHANNELS), Key("layer", Quantity.MOMENTS), []
    together.wait()
    exchange = GrpcExchange(address, token, 32)
    for _ in range(exchanges + WARM):
        begin = time.perf_counter()
        exchange(key, values, 100)
        taken.append(time.perf_counter() - begin)
    exchange.close()
    seconds.put(taken[WARM:])


def latency(clients: int, exchanges: int) -> tuple[float, float]:
    """Return the 50th and the 99th percentile of the time of one exchange of ``clients`` clients, in milliseconds."""
    spawn = multiprocessing.get_context("spawn")
    service = ExchangeService("127.0.0.1", 0, 8 * CHANNELS).start()
    session = Session(range(clients), {"layer": Layer(CHANNELS, torch.float32)})
    together, seconds = spawn.Barrier(clients), spawn.Queue()
    address, tokens = f"127.0.0.1:{service.port}", service.open(session)
    processes = [spawn.Process(target=one_client, args=(address, tokens[i], exchanges, together, seconds)) for i in range(clients)]
    for process in processes:
        process.start()
    taken = np.concatenate([seconds.get() for _ in processes]) * 1e3
    for process in processes:
        process.join()
    service.stop()
    return float(np.percentile(taken, 50)), float(np.percentile(taken, 99))


class Alone:
    """Stand in for the exchange: answer at once, without other clients.

    A step with this exchange shows what FedTAN's layer costs, apart from the exchanges.
    """

    batch = 32
    seconds = 0.0

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Answer with the client's own values."""
        return Answer(local.clone(), count, self.batch)

    def close(self, error: str = "") -> None:
        """Do nothing."""
        pass


def step_milliseconds(model: nn.Module, context: Callable[[], contextlib.AbstractContextManager[None]], repeats: int = 7) -> float:
    """Return the median time of a forward and backward pass on 32 images of 32 x 32 pixels, in milliseconds.

    Args:
        model: The network.
        context: Makes a context manager, in which each pass runs.
        repeats: The number of passes that are timed.
    """
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    model.train()
    taken = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        with context():
            F.cross_entropy(model(x), y).backward()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:]) * 1e3


def rounds_of(method: str, clients: int, rounds: int, schedule: str) -> tuple[float, float, int]:
    """Run a method in Flower's simulation on Ray.

    Args:
        method: The name of the method.
        clients: The number of clients, all of which train in each round.
        rounds: The number of rounds that are timed.
        schedule: The value of the key ``fedtan-schedule``.

    Returns:
        The median seconds of a round, the median seconds that the longest-waiting client spent in exchanges, and the
        number of exchanges in a round.
    """
    config = RunConfig(
        method=method, clients=clients, rounds=rounds + 2, model="resnet20", image_size=32, batch_size=32, local_steps=5, partition="iid",
        learning_rate=0.01, evaluate_every=1000, pictures=False, device="cpu", options=(("fedtan-schedule", schedule),),
    )  # fmt: skip
    records, _ = on_ray(config, cpus_per_client=(os.cpu_count() or 1) / clients)
    middle = records[1:-1]  # the first warms up, the last evaluates
    waited = statistics.median(record["waited"] for record in middle)
    return statistics.median(record["seconds"] for record in middle), waited, middle[-1]["exchanges"]


def main(
    rounds: int = 12, clients: int = 5, exchanges: int = 500, results: Path = Path(__file__).parent / "results" / "exchange.md"
) -> None:
    """Measure latency and rounds, and write the table."""
    console, cores = Console(), os.cpu_count() or 1
    lines = [f"{cores} cores, loopback, torch {torch.__version__}.\n", "| clients | p50 (ms) | p99 (ms) |\n|---|---|---|"]
    p50 = {}
    for n in (2, 5, 20):
        p50[n], p99 = latency(n, exchanges)
        lines.append(f"| {n} | {p50[n]:.2f} | {p99:.2f} |")
        console.print(lines[-1])
    torch.set_num_threads(1)
    plain = build("resnet20", classes=10, seed=0)
    cohort = convert(plain, fedtan())
    step = step_milliseconds(plain, contextlib.nullcontext)
    alone = step_milliseconds(cohort, lambda: exchanging(cohort, Alone()))
    lines.append(f"\n{clients} clients, ResNet-20, batches of 32, 5 local steps, {rounds} rounds each:\n")
    lines.append("| method | exchanges | round (s) | time / FedAvg | in exchanges (s) |\n|---|---|---|---|---|")
    runs: list[tuple[str, float, float, int]] = []
    for method, schedule in (("fedavg", "merged"), ("fedtan", "merged"), ("fedtan", "paper"), ("fedavg", "merged")):
        runs.append((method if schedule == "merged" else f"{method} ({schedule})", *rounds_of(method, clients, rounds, schedule)))
        console.print(runs[-1])
    base = statistics.mean(seconds for name, seconds, _, _ in runs if name == "fedavg")
    for name, seconds, waited, count in runs:
        lines.append(f"| {name} | {count} | {seconds:.2f} | {seconds / base:.2f} | {waited:.2f} |")
    _, seconds, waited, count = runs[1]
    one = p50.get(clients, p50[5])
    extra, floor, layer = 1e3 * (seconds - base), count * one, (alone - step) * clients / cores
    lines.append(
        f"\nProfile of FedTAN's extra {extra:.0f} ms per round (merged): {count} exchanges of {one:.2f} ms (as above, otherwise idle) "
        f"are {floor:.0f} ms; the layer (a first step of {alone:.0f} ms, not {step:.0f}) for {clients} clients on {cores} cores "
        f"{layer:.0f} ms; the other {extra - floor - layer:.0f} ms are cores idle at the barriers, and noise: the two runs of FedAvg, "
        f"first and last, differ by {1e3 * abs(runs[0][1] - runs[-1][1]):.0f} ms. Most of the {waited:.2f} s that a client spends in "
        f"exchanges it waits for others that compute on the same cores, as FedAvg's clients do."
    )
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("\n".join(lines) + "\n")
    console.print(results.read_text())


if __name__ == "__main__":
    typer.run(main)
