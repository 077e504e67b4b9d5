"""Static BN: nobody tracks statistics in training; those of the evaluation are exactly the union's, in every layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fl_bn import Callback
from fl_bn.conversion import convert
from fl_bn.federation.callbacks import Running
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.rounds import Rounds
from fl_bn.flower import BatchNormStrategy, run_in_process
from fl_bn.flower.hooks import RunResult
from fl_bn.methods import METHODS, Refresh, freeze
from fl_bn.methods.static_bn import StaticBatchNorm
from fl_bn.roles import batch_norms
from tests.federation import union
from tests.in_process import TWO_STEPS, Run, WatchedGrid, client_app, identical, run
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
STATIC = METHODS["static-bn"]()
EXACT = 1e-11


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


class Measuring(nn.BatchNorm2d):
    """Normalises with the statistics of its input, and keeps them, unbiased, as an evaluation would find them in the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean, self.running_var = x.mean((0, 2, 3)), x.transpose(0, 1).flatten(1).var(1)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def of_the_union(ran: Run, network: str, clients: list[Samples], rounds: int) -> dict[str, np.ndarray]:
    """Of all data in one batch through the final weights, each layer normalised by its own statistics."""
    model = seeded_network(network, dtype=torch.float64).eval()
    model.load_state_dict({k: torch.from_numpy(a.copy()) for k, a in ran.trajectory[rounds].items()}, strict=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Measuring
    together = union(clients)
    with torch.no_grad():
        model(together.batch(np.arange(len(together)), torch.zeros((), dtype=torch.float64))[0])
    return {k: t.numpy() for k, t in model.state_dict().items() if "running" in k}


def largest(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    return {k: float(np.abs(a[k] - b[k]).max()) for k in b}


@pytest.mark.parametrize("network", ["cnn", "resnet"])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_the_statistics_of_the_evaluation_are_the_unions(network: str, fraction: float, clients: list[Samples]) -> None:
    ran = run(STATIC, clients, 2, model=seeded_network(network, dtype=torch.float64), policy={"fraction": fraction})
    off = largest(ran.trajectory[2], of_the_union(ran, network, clients, 2))
    assert max(off.values()) < EXACT, off
    wrong = largest(ran.trajectory[2], of_the_union(ran, network, clients[:2], 2))
    assert min(wrong.values()) > EXACT  # control: one client's data are missing
    fedavg = run(METHODS["fedavg"](), clients, 2, model=seeded_network(network, dtype=torch.float64), policy={"fraction": fraction})
    assert min(largest(fedavg.trajectory[2], of_the_union(fedavg, network, clients, 2)).values()) > 1e-3  # control: averaged ones


class StopsAt5(Callback):
    """Ends a run after round 5, as a run config names it; and notes the model of each evaluation."""

    evaluated: ClassVar[dict[int, dict[str, torch.Tensor]]] = {}

    def __init__(self, config: object = None, folder: object = None) -> None:
        self.evaluated.clear()

    def on_start(self, running: Running) -> None:
        self.running = running

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        self.evaluated[record.round] = dict(self.running.arrays())

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        if record.round == 5:
            self.end()

    def end(self) -> None:
        self.running.stop("time is up")


class InterruptsAt5(StopsAt5):
    def end(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [StopsAt5, InterruptsAt5])
@pytest.mark.parametrize("name", ["static-bn", "hbn", "fedavg"])
def test_a_run_that_ends_early_has_the_model_of_its_last_evaluation(name: str, kind: type[StopsAt5], tmp_path: Path) -> None:
    """Else static BN's would have mean 0 and variance 1. Control: other methods need no measurement, and have round 5's."""
    of = {"method": name, "rounds": 8, "evaluate-every": 2, "clients": 2, "model": "mlp", "pictures": False, "local-steps": 2}
    interrupted = pytest.raises(KeyboardInterrupt) if kind is InterruptsAt5 else nullcontext()
    with interrupted:
        run_in_process({**of, "output": str(tmp_path), "name": "run", "callbacks": f"{__name__}:{kind.__name__}"})
    found, want = load_file(tmp_path / "run" / "model.safetensors"), StopsAt5.evaluated[4]
    differ = [key for key, tensor in want.items() if "tracked" not in key and not torch.equal(found[key], tensor)]
    assert (differ == []) == (name != "fedavg")
    assert not any((tensor == 0).all() for key, tensor in found.items() if key.endswith("running_mean"))


@pytest.mark.parametrize("kind", [StopsAt5, InterruptsAt5])
@pytest.mark.parametrize("name", ["static-bn", "hbn", "fedavg"])
def test_so_has_a_strategy(name: str, kind: type[StopsAt5], clients: list[Samples], tmp_path: Path) -> None:
    method, policy = METHODS[name](), Rounds(len(clients), evaluate_every=2, wait=0.0)
    strategy = BatchNormStrategy(seeded_network("cnn"), method, policy, callbacks=[kind()], evaluate=lambda model: {"loss": 1.0})
    grid = WatchedGrid(client_app(method, clients, TWO_STEPS), len(clients))
    results: list[RunResult] = []
    with pytest.raises(KeyboardInterrupt) if kind is InterruptsAt5 else nullcontext():
        results.append(strategy.start(grid, num_rounds=8))
    strategy.save(tmp_path / "model")
    for one in [load_file(tmp_path / "model"), *(result.arrays.to_torch_state_dict() for result in results)]:
        differ = [key for key in one if "tracked" not in key and not torch.equal(one[key], StopsAt5.evaluated[4][key])]
        assert (differ == []) == (name != "fedavg")


def test_one_exchange_per_layer_and_no_fewer(clients: list[Samples]) -> None:
    model = seeded_network("cnn", dtype=torch.float64)
    ran = run(STATIC, clients, 2, model=model, policy={"evaluate_every": 2, "recalibration": "passes"})
    kinds = [f"{m.metadata.message_type} {m.metadata.group_id}" for m in ran.grid.sent]
    assert kinds.count("query.statistics 1") == 0
    assert kinds.count("query.statistics 2") == 2 * 3  # layers x clients
    once = run(replace(STATIC, refresh=Refresh.HYBRID), clients, 2, model=model)  # one exchange
    off = largest(once.trajectory[2], of_the_union(once, "cnn", clients, 2))
    assert max(off["1.running_mean"], off["1.running_var"]) < EXACT
    assert min(off["5.running_mean"], off["5.running_var"]) > 1e-6  # control: exact in the first layer alone


def test_training_neither_tracks_nor_reports_nor_depends_on_statistics(clients: list[Samples]) -> None:
    often, seldom = (run(STATIC, clients, 3, policy={"evaluate_every": every}) for every in (1, 3))
    for round in (1, 2, 3):
        for reply in often.grid.train(round, replies=True):
            assert set(reply) == {"weights"}
            assert not any("running" in name for name in reply["weights"])
        (sent, *_) = often.grid.train(round)
        assert all((a == (0 if "mean" in k else 1)).all() for k, a in sent["statistics"].items())  # as torch starts them
    assert identical(often.trajectory[3], seldom.trajectory[3])
    assert not (often.trajectory[1]["1.running_var"] == 1).all()  # control: the evaluation has others


def test_the_layer_normalises_with_its_batch_and_forgets_it() -> None:
    plain = seeded_network("plain", dtype=torch.float64)
    model = convert(plain, STATIC)
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(model.train()(x), plain.train()(x))
    for name, layer in batch_norms(model).items():
        assert isinstance(layer, StaticBatchNorm)
        assert not layer.running_mean.any()
        assert plain.get_submodule(name).running_mean.any()  # control
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        convert(nn.Sequential(nn.BatchNorm1d(3)), STATIC)(torch.randn(1, 3))


def test_there_is_nothing_to_freeze() -> None:
    with pytest.raises(ValueError, match="static-bn has no running statistics in training"):
        freeze(STATIC, 3)
