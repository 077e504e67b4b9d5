"""Exchanges of statistics: HBN's and static BN's before each evaluation, for the evaluation alone. And calibration, before round 1."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_bn import Callback
from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS, Role
from fl_bn.methods import hbn as make_hbn
from tests.in_process import Run, Samples, WatchedGrid, client_app, identical, run
from tests.listed import COMMON, listed

Clients = Callable[..., list[Samples]]
HBN, STATIC = METHODS["hbn"](), METHODS["static-bn"]()
MEASURE = "query.statistics"


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def exchanges(ran: Run, round: int) -> int:
    """Return the number of exchanges of statistics of all clients."""
    return sum(m.metadata.message_type == MEASURE and m.metadata.group_id == str(round) for m in ran.grid.sent) / 3


def test_a_statistics_exchange_precedes_each_evaluation(clients: list[Samples]) -> None:
    exact = make_hbn(lam=1.0)
    for method, passes in ((HBN, 1), (make_hbn(evaluate="exact"), 2), (exact, 2), (make_hbn(lam=1.0, evaluate="hybrid"), 1), (STATIC, 2)):
        for how, number in (("auto", 1), ("passes", passes)):  # exact passes: one per BatchNorm layer
            assert exchanges(run(method, clients, 1, policy={"recalibration": how}), 1) == number
    seldom = run(HBN, clients, 3, policy={"evaluate_every": 2, "fraction": 0.4})
    assert seldom.grid.kinds() == ["query.hello 0", "train 1", "train 2", f"{MEASURE} 2", "train 3", f"{MEASURE} 3"]
    assert exchanges(seldom, 2) == 1  # every client is measured, though one trains
    assert run(METHODS["fbn"](), clients, 2).grid.kinds() == ["query.hello 0", "train 1", "train 2"]  # control: they do not lag


def test_a_client_missing_from_the_exchange_is_named(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    def disturb(client: int, what: str) -> None:
        if client == 1 and what == "measure 1":
            raise OSError("the disk is full")

    ran = run(HBN, clients, 1, grid=WatchedGrid(client_app(HBN, clients, disturb=disturb), 3))
    assert "client 1's statistics are missing" in log.text
    assert not identical(ran.trajectory[1], run(HBN, clients, 1).trajectory[1])


@listed("name", COMMON)
def test_calibration_measures_where_statistics_are_shared_and_nothing_else_changes(name: str, clients: list[Samples]) -> None:
    """As many times as it is told to. That it is exact is in the table of equivalences."""
    method = METHODS[name]()
    once, twice = (run(method, clients, 1, policy={"calibrate": n, "recalibration": "passes"}) for n in (1, 2))
    shared = method.has_statistics and method.shares(Role.STATISTIC)
    if not shared:
        assert exchanges(twice, 0) == 0
        return
    assert (exchanges(once, 0), exchanges(twice, 0)) == (1, 2)
    one, two, start = (ran.grid.train(1)[0] for ran in (once, twice, run(method, clients, 1)))
    assert identical(two["weights"], start["weights"])
    assert np.array_equal(one["statistics"]["1.running_var"], two["statistics"]["1.running_var"])
    assert not np.allclose(one["statistics"]["5.running_var"], two["statistics"]["5.running_var"], rtol=1e-3)  # measured under other ones


# Static BN


class StopsAt5(Callback):
    """Ends a run after round 5, as a run config names it; and notes the model of each evaluation."""

    evaluated: ClassVar[dict[int, dict[str, torch.Tensor]]] = {}

    def __init__(self, config: object = None, folder: object = None) -> None:
        self.evaluated.clear()

    def on_start(self, running: Any) -> None:
        self.running = running

    def on_evaluation(self, record: Any, rounds: int) -> None:
        self.evaluated[record.round] = dict(self.running.arrays())

    def on_round(self, record: Any, rounds: int) -> None:
        if record.round == 5:
            self.end()

    def end(self) -> None:
        self.running.stop("time is up")


class InterruptsAt5(StopsAt5):
    def end(self) -> None:
        raise KeyboardInterrupt


@listed(("name", "kind"), [(name, kind) for name in ("static-bn", "hbn", "fedavg") for kind in (StopsAt5, InterruptsAt5)])
def test_a_run_that_ends_early_has_the_model_of_its_last_evaluation(name: str, kind: type[StopsAt5], tmp_path: Path) -> None:
    """Else static BN's would have mean 0 and variance 1. Control: other methods need no measurement, and have round 5's."""
    of = {"method": name, "rounds": 8, "evaluate-every": 2, "clients": 2, "model": "mlp", "pictures": False, "local-steps": 2}
    with pytest.raises(KeyboardInterrupt) if kind is InterruptsAt5 else nullcontext():
        run_in_process({**of, "output": str(tmp_path), "name": "run", "callbacks": f"{__name__}:{kind.__name__}"})
    found, want = load_file(tmp_path / "run" / "model.safetensors"), StopsAt5.evaluated[4]
    differ = [key for key, tensor in want.items() if "tracked" not in key and not torch.equal(found[key], tensor)]
    assert (differ == []) == (name != "fedavg")
    assert not any((tensor == 0).all() for key, tensor in found.items() if key.endswith("running_mean"))
