"""Door 1 with its clients in worker processes: the bits of one after the other, whatever is defined where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from fl_bn import Federation, methods
from tests.doors.test_checkpoints import federation, same, shown
from tests.doors.test_federation import CLIENTS, net
from tests.doors.test_loaders import own_order

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("method", "order"), [("hbn", "generator"), ("fedbn", "batch_sampler")])
def test_workers_give_the_bits_of_one_after_the_other(method: str, order: str) -> None:
    """With dropout, and loaders whose every pass depends on the passes before."""
    made = []
    for workers, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(workers)  # what this process draws itself decides nothing
        made.append(federation(method, clients=own_order(order, 7), workers=workers, seed=seed))
        list(made[-1].run(3))
    one, two, other = made
    assert same(two, one)
    assert shown(two.history) == shown(one.history)
    assert not same(other, one)  # control


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from fl_bn import Federation, methods

class Mine(nn.Sequential):
    pass

class Batches:
    def __init__(self, client):
        self.client = client
    def __iter__(self):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.client))
        return iter([(x, (x[:, 0] > 0).long())] * 2)

scale = 2.0

def final(workers):
    torch.manual_seed(0)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    options = {"optimizer": optimizer, "loss": lambda output, y: scale * F.cross_entropy(output, y)}
    fed = Federation(Mine(nn.BatchNorm1d(4), nn.Linear(4, 2)), methods.fbn(), [Batches(i) for i in range(3)], workers=workers, **options)
    list(fed.run(2))
    return fed.model.state_dict()

one, two = final(1), final(2)
print("same bits:", all(torch.equal(one[name], two[name]) for name in one))
"""


@pytest.mark.slow
def test_what_a_script_or_a_notebook_defines_works_without_a_guard(tmp_path: Path) -> None:
    """Network, loaders and lambdas of ``__main__``, which another process cannot import."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines() == ["same bits: True"], ran.stderr[-3000:]


def test_changes_between_rounds_reach_the_workers() -> None:
    """The user's own code changes what functions read. A worker has a copy of that; before, it kept the copy of round 1."""

    def losses(workers: int, lower: float = 0.1) -> list[float]:
        rate, found = {"lr": 0.5}, []
        optimizer = lambda parameters: SGD(parameters, lr=rate["lr"])  # noqa: E731
        fed = Federation(net(), methods.fedavg(), [[client] for client in CLIENTS], optimizer=optimizer, workers=workers)
        for record in fed.run(4):
            found.append(record.loss)
            rate["lr"] *= lower
        return found

    assert losses(2) == losses(1) != losses(1, lower=1)
