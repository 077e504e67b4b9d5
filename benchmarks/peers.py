"""Compare a round of federated averaging with a bare PyTorch loop and with other simulators, each in a process of its own.

    pip install --no-deps --target PFL "pfl==0.6.0" multiprocess dill "dp-accounting>=0.4,<0.6" prv-accountant absl-py mpmath attrs
    python benchmarks/peers.py --pfl PFL      # on a quiet machine, about 15 minutes

All programs make the same local steps of the same network on the same samples, with torch's SGD or fl-bn's, and average. Without its
folder, pfl-research is left out. Flower on Ray is an app of Flower's own ``FedAvg`` in this file, without fl-bn. pfl-research draws no
batches (it cuts each client's samples once), and averages only parameters, not running statistics.

The time of a round is the median over the rounds after the first. The whole time is that of the process, with imports, start and end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from common import RESULTS, Batches, bare_loop, table
from torch import nn
from torch.nn import functional as F

CLIENTS, CLASSES = 10, 10
NETWORKS = {"digits-cnn-small": 16, "simple-cnn": 32}  # pixels of an image's side
SIZES = ((10, 32), (5, 16))  # local steps, samples of a batch
RATE, MOMENTUM = 0.002, 0.9
BARE, BARE_LAST = "bare loop", "bare loop, channels-last"
OURS, OURS_WORKERS = "fl-bn, as it is by default with workers=1", "fl-bn, workers=2"
PFL, RAY = "pfl-research 0.6.0", "Flower's FedAvg on Ray"

Case = dict[str, Any]
"""One federation to time: its ``network``, ``steps`` per round, ``batch`` size, number of ``rounds``, and ``file`` of samples."""


def make(file: Path, pixels: int, samples: int) -> None:
    """Write random images to an npz file: ``samples`` for every client, and some to test on."""
    rng = np.random.default_rng(0)
    kinds = {"train": CLIENTS * samples, "test": 200}
    arrays: dict[str, Any] = {f"x_{kind}": rng.integers(0, 256, (n, pixels, pixels, 3), dtype=np.uint8) for kind, n in kinds.items()}
    arrays |= {f"y_{kind}": np.arange(n) % CLASSES for kind, n in kinds.items()}
    np.savez(file, **arrays)


def run_config(case: Case) -> dict[str, Any]:
    """Return the run-config keys with which fl-bn runs ``case``. All other keys have their defaults."""
    return {
        "method": "fedavg",
        "dataset": "npz",
        "data-path": case["file"],
        "model": case["network"],
        "clients": CLIENTS,
        "partition": "iid",
        "rounds": case["rounds"],
        "local-steps": case["steps"],
        "batch-size": case["batch"],
        "learning-rate": RATE,
        "momentum": MOMENTUM,
        "weight-decay": 0.0,
        "evaluate-every": case["rounds"],
        "output": tempfile.mkdtemp(dir=Path(case["file"]).parent),
        "name": "run",
        "pictures": False,
    }


def network_and_clients(case: Case) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the initial network, and every client's inputs and labels, all as fl-bn makes them."""
    from fl_bn.app.assembly import client_samples, source_model
    from fl_bn.app.config import RunConfig

    config = RunConfig.from_mapping(run_config(case))
    model, found = source_model(config), list[tuple[torch.Tensor, torch.Tensor]]()
    for index in range(CLIENTS):
        samples = client_samples(config, index)[0]
        found.append(samples.batch(np.arange(len(samples)), next(model.parameters())))
    return model, found


def bare(case: Case, layout: torch.memory_format = torch.contiguous_format) -> list[float]:
    """Return the seconds of every round of FedAvg with BatchNorm in a plain PyTorch loop."""
    torch.set_num_threads(1)
    model, clients = network_and_clients(case)
    rng = torch.Generator().manual_seed(0)

    def batches_of(x: torch.Tensor, y: torch.Tensor) -> Batches:
        x = x.contiguous(memory_format=layout)
        return lambda round: ((x[batch], y[batch]) for batch in torch.randint(0, len(x), (case["steps"], case["batch"]), generator=rng))

    batches = [batches_of(x, y) for x, y in clients]
    return list(bare_loop(model.to(memory_format=layout), batches, case["rounds"], lr=RATE, momentum=MOMENTUM))


def ours(case: Case, **keys: Any) -> list[float]:
    """Return the seconds of every round of fl-bn in this process; ``keys`` are further run-config keys."""
    from fl_bn.flower import run_in_process

    folder = run_in_process({**run_config(case), **keys})
    assert folder is not None
    return [json.loads(line)["seconds"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def pfl_research(case: Case) -> list[float]:
    """Return the seconds of every central iteration of pfl-research's ``FederatedAveraging``."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    network, clients = network_and_clients(case)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            self.train(not eval)
            return F.cross_entropy(self.net(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x, y, True)) * len(x), len(x))}

    ends = list[float]()

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
            ends.append(time.perf_counter())
            return False, Metrics()

    model = Wrapped()
    wanted = case["steps"] * case["batch"]
    users = {
        str(index): [tensor.repeat(-(-wanted // len(x)), *[1] * (tensor.dim() - 1))[:wanted] for tensor in (x, y)]
        for index, (x, y) in enumerate(clients)
    }
    dataset = FederatedDataset(lambda user: Dataset(raw_data=users[user]), get_user_sampler("minimize_reuse", list(users)))
    steps, batch = case["steps"], case["batch"]
    train = NNTrainHyperParams(local_num_epochs=None, local_num_steps=steps, local_learning_rate=RATE, local_batch_size=batch)
    parameters = NNAlgorithmParams(case["rounds"], evaluation_frequency=case["rounds"] + 1, train_cohort_size=CLIENTS, val_cohort_size=0)
    wrapped = PyTorchModel(
        model=model,
        local_optimizer_create=lambda tensors, lr: torch.optim.SGD(tensors, lr=lr, momentum=MOMENTUM),
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    begin = time.perf_counter()
    backend, evaluation = SimulatedBackend(dataset, dataset), NNEvalHyperParams(batch)
    FederatedAveraging().run(parameters, backend, wrapped, train, evaluation, [Clock()], send_metrics_to_platform=False)
    return [end - start for start, end in zip([begin, *ends], ends, strict=False)]


_HERE: dict[str, Any] = {}


def flower(case: Case) -> list[float]:
    """Return the seconds of every round of Flower's own ``FedAvg`` in its simulation on Ray, two clients at a time."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, ends = ClientApp(), ServerApp(), list[float]()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        if not _HERE:  # as Flower's own apps with Flower Datasets do: the data stay in the process
            torch.set_num_threads(1)
            _HERE["model"], _HERE["clients"] = network_and_clients(case)
            _HERE["rng"] = torch.Generator().manual_seed(0)
        model = _HERE["model"]
        x, y = _HERE["clients"][int(context.node_config["partition-id"])]
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        for batch in torch.randint(0, len(x), (case["steps"], case["batch"]), generator=_HERE["rng"]):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            found = super().aggregate_train(server_round, replies)
            ends.append(time.perf_counter())
            return found

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model, _ = network_and_clients(case)
        ends.append(time.perf_counter())
        strategy = Timed(fraction_evaluate=0.0, min_evaluate_nodes=0)
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=case["rounds"])

    run_simulation(server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}})
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


WAYS: dict[str, Callable[[Case], list[float]]] = {
    BARE: bare,
    BARE_LAST: lambda case: bare(case, torch.channels_last),
    OURS: lambda case: ours(case, workers=1),
    OURS_WORKERS: lambda case: ours(case, workers=2),
    PFL: pfl_research,
    RAY: flower,
}


def measured(way: str, case: Case, folder: Path | None) -> tuple[float, float]:
    """Run one simulator in a process of its own.

    Args:
        way: The name of the simulator, a key of ``WAYS``.
        case: The network, samples, steps, batch size and rounds.
        folder: The folder in which the simulator is installed; None: the environment of this process.

    Returns:
        The median seconds of a round, without the first round, and the seconds of the whole process.

    Raises:
        RuntimeError: The process failed, or reported the times of too few or too many rounds.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([*([str(folder)] if folder else []), root])
    environment = {**os.environ, "PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as output:
        file = Path(output) / "rounds.json"
        begin = time.perf_counter()
        command = [sys.executable, __file__, "--cell", way, "--case", json.dumps(case), "--into", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"{way} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        rounds = json.loads(file.read_text())
    if len(rounds) != case["rounds"]:
        raise RuntimeError(f"{way}: expected the times of {case['rounds']} rounds, but got {len(rounds)}")
    return median(rounds[1:]), whole


def main(
    rounds: int = 20,
    turns: Annotated[int, typer.Option(help="how often each simulator is timed; the median counts")] = 2,
    pfl: Annotated[Path | None, typer.Option(help="folder in which pfl-research is installed; default: left out")] = None,
    results: Path = RESULTS / "peers.md",
    cell: Annotated[str, typer.Option("--cell", hidden=True)] = "",
    case: Annotated[str, typer.Option("--case", hidden=True)] = "",
    into: Annotated[str, typer.Option("--into", hidden=True)] = "",
) -> None:
    """Time all simulators alternately, and write the table."""
    if cell:
        Path(into).write_text(json.dumps(WAYS[cell](json.loads(case))))
        return
    ways = [way for way in WAYS if way != PFL or pfl]
    found: dict[tuple[str, int, int, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for network, pixels in NETWORKS.items():
                for steps, batch in SIZES:
                    file = Path(folder) / f"{network}.npz"
                    make(file, pixels, max(s * b for s, b in SIZES))
                    one = {"network": network, "steps": steps, "batch": batch, "rounds": rounds, "file": str(file)}
                    for way in ways:
                        seconds = measured(way, one, pfl if way == PFL else None)
                        found.setdefault((network, steps, batch, way), []).append(seconds)
                        said = f"{network}, {steps} x {batch}, {way}: {seconds[0]:.3f} s per round, {seconds[1]:.1f} s in all"
                        print(f"turn {turn + 1}: {said}", flush=True)
    text = f"{rounds} rounds, {CLIENTS} clients, FedAvg, {os.cpu_count()} cores, one torch thread per process, torch {torch.__version__}; "
    text += f"medians of {turns} turns. A round is given as a multiple of the bare loop's in the same turn.\n\n"
    for network in NETWORKS:
        heads = [f"{s} x {b}: {what}" for s, b in SIZES for what in ("round / bare loop's", "ms per round", "whole s")]
        rows = []
        for way in ways:
            cells = [way]
            for steps, batch in SIZES:
                own, bare_ones = found[network, steps, batch, way], found[network, steps, batch, BARE]
                ratio = median(a / b for (a, _), (b, _) in zip(own, bare_ones, strict=True))
                cells += [f"{ratio:.2f}", f"{1000 * median(a for a, _ in own):.0f}", f"{median(b for _, b in own):.1f}"]
            rows.append(cells)
        text += "\n".join([f"**{network}**", "", *table(["way", *heads], rows), "", ""])
    results.write_text(text.rstrip() + "\n")
    print(text)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
