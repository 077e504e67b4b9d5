"""Door 1 with its clients in worker processes: the bits of one after the other, whatever is defined where."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, methods
from tests.doors.test_federation import CLIENTS, TEST, net
from tests.doors.test_loaders import own_order

ROOT = Path(__file__).parents[2]


def with_dropout() -> nn.Module:
    return nn.Sequential(*net()[:3], nn.Dropout(0.3), net()[3])


def trained(method: str, order: str, workers: int, seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The networks of server and clients at the end, and the records but for the time that rounds took."""
    torch.manual_seed(workers)  # what this process draws itself decides nothing
    optimizer = partial(SGD, lr=0.05, momentum=0.9)
    options: dict[str, Any] = {"optimizer": optimizer, "test": TEST, "seed": seed, "workers": workers}
    fed = Federation(with_dropout(), methods.METHODS[method](), own_order(order, 7), **options)
    records = [{**vars(record), "seconds": 0.0} for record in fed.run(3)]
    models = {"server": fed.model, **{f"client {i}": fed.client_model(i) for i in range(3)}}
    return {f"{who} {name}": t for who, model in models.items() for name, t in model.state_dict().items()}, records


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(("method", "order"), [("hbn", "generator"), ("fedbn", "batch_sampler")])
def test_workers_give_the_bits_of_one_after_the_other(method: str, order: str) -> None:
    (one, records), (two, again) = (trained(method, order, workers) for workers in (1, 2))
    assert differing(one, two) == []
    assert repr(records) == repr(again)
    assert differing(one, trained(method, order, 1, seed=1)[0])  # control


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from fl_bn import Federation, Task, methods

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.norm(x))

scale = 2.0

class Smooth(Task):
    name, metric, higher_is_better = "smooth", "error", False
    def loss(self, output, targets):
        return scale * F.cross_entropy(output, targets, label_smoothing=0.1)
    def sums(self, output, targets):
        return {"error": (output.argmax(1) != targets).sum(), "samples": len(targets)}
    def metrics(self, sums):
        return {"error": float(sums["error"] / sums["samples"])}

class Batches:
    def __init__(self, client):
        self.client = client
    def __iter__(self):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.client))
        return iter([(x, (x[:, 0] > 0).long())] * 2)

def final(workers):
    torch.manual_seed(0)
    slower = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    fed = Federation(Mine(), methods.fbn(), [Batches(i) for i in range(3)], task=Smooth(), optimizer=optimizer, scheduler=slower,
                     workers=workers)
    list(fed.run(2))
    return fed.model.state_dict()

one, two = final(1), final(2)
print("same bits:", all(torch.equal(one[name], two[name]) for name in one))
"""


@pytest.mark.slow
def test_what_a_script_or_a_notebook_defines_works_without_a_guard(tmp_path: Path) -> None:
    """Network, task, loaders and lambdas of ``__main__``, which another process cannot import."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines() == ["same bits: True"], ran.stderr[-3000:]


def losses(workers: int, change: str) -> list[float]:
    """Of four rounds, between which the user's own code changes something."""
    labels, rate = [y.clone() for _, y in CLIENTS], {"lr": 0.5}
    loaders: list[Any] = [DataLoader(TensorDataset(x, y), batch_size=16) for (x, _), y in zip(CLIENTS, labels, strict=True)]
    weight = torch.ones(int(max(y.max() for y in labels)) + 1)
    fed = Federation(
        net(),
        methods.fedavg(),
        loaders,
        optimizer=lambda parameters: SGD(parameters, lr=rate["lr"]),
        loss=lambda output, y: nn.functional.cross_entropy(output, y, weight.to(output.dtype)),
        workers=workers,
    )
    found = []
    for record in fed.run(4):
        found.append(record.loss)
        rate["lr"] *= 0.1 if change == "rate" else 1
        if change == "loss":
            weight[0] += 3
    return found


@pytest.mark.parametrize("change", ["rate", "loss"])
def test_changes_between_rounds_reach_the_workers(change: str) -> None:
    """A worker has a copy of what the functions read. Before, it kept the copy of round 1."""
    assert losses(2, change) == losses(1, change) != losses(1, "nothing")
