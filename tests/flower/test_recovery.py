"""Checkpoints out, one back in, and clients that lost what they kept: the strategy alone, over a grid in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn

from fl_bn import convert
from fl_bn.federation.checkpoint import FORMAT, generators, set_generators
from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.flower import BatchNormClient, BatchNormStrategy, Rounds, RunFailed, Site, make_client_app
from fl_bn.methods import METHODS, Method
from fl_bn.support import durable
from fl_bn.support.durable import Damaged
from tests.flower.inside import Checkpoint, RoundRecord, RunId, Samples, to_numpy
from tests.in_process import CPU, TWO_STEPS, WatchedGrid, client_app, identical
from tests.kept import Kept
from tests.listed import listed
from tests.networks import seeded_network
from tests.noted import noted

FBN, FEDBN = METHODS["fbn"](), METHODS["fedbn"]()


def with_files(method: Method, clients: Sequence[Samples], folder: Path) -> WatchedGrid:
    """Clients that keep what they keep in files, as they do with a state-dir."""
    converted = convert(seeded_network("cnn"), method)

    def build(context: Context) -> BatchNormClient:
        index = int(context.node_config["partition-id"])
        site = Site(index, len(clients), clients[index], clients[index], CPU, state=folder)
        return BatchNormClient(converted, method, TWO_STEPS, site, context.state)

    return WatchedGrid(make_client_app(build), len(clients))


class Server:
    """One strategy at a time, whose checkpoints outlive it."""

    def __init__(self, method: Method, grid: WatchedGrid, rounds: int = 6, every: int = 2, **options: Any) -> None:
        self.method, self.grid, self.rounds, self.options = method, grid, rounds, options
        self.policy: dict[str, Any] = {"clients": 3, "wait": 0.0, "checkpoint_every": every}
        self.optimizer: Callable[[], ServerOptimizer] = lambda: server_optimizer("fedavg", 1.0)
        self.checkpoints: list[Checkpoint] = []
        self.at_once = 99  # how many it can still go back to
        self.records: list[RoundRecord] = []
        self.trajectory: dict[int, dict[str, np.ndarray]] = {}

    def keep(self, checkpoint: Checkpoint) -> int:
        self.checkpoints.append(replace(checkpoint, kept=dict(checkpoint.kept)))
        return self.checkpoints[-self.at_once :][0].round

    def run(self, resume: Checkpoint | None = None, model: nn.Module | None = None) -> BatchNormStrategy:
        strategy = BatchNormStrategy(
            model or seeded_network("cnn"),
            self.method,
            Rounds(**self.policy),
            optimizer=self.optimizer(),
            callbacks=[Kept(self.records)],
            keep_checkpoint=self.keep,
            save_clients="run",
            **self.options,
        )
        found = noted(strategy)
        try:
            strategy.start(self.grid, num_rounds=self.rounds, resume=resume)
        finally:
            self.trajectory |= found
        return strategy


# When


@listed(("every", "rounds", "expected"), [(1, 4, [1, 2, 3]), (2, 7, [2, 4, 6]), (2, 6, [2, 4]), (3, 2, []), (0, 4, [])])
def test_checkpoints_are_made_every_so_many_rounds_but_not_after_the_last(
    every: int, rounds: int, expected: list[int], clients: list[Samples]
) -> None:
    """A checkpoint is a value: whoever stores it may take its time."""
    server, made = Server(FEDBN, WatchedGrid(client_app(FEDBN, clients), 3), rounds, every), list[Checkpoint]()
    server.keep = lambda checkpoint: made.append(checkpoint) or 1  # type: ignore[method-assign,func-returns-value]
    server.run()
    assert [(checkpoint.round, dict(checkpoint.kept)) for checkpoint in made] == [(n, dict.fromkeys(range(3), n)) for n in expected]
    assert all(identical({k: t.numpy() for k, t in c.arrays.items()}, server.trajectory[c.round]) for c in made)


@pytest.mark.parametrize(("every", "back"), [(2, [0, 0, 2, 2, 2, 2, 4]), (0, [0, 1, 2, 3, 4, 5, 6])])
def test_every_message_says_what_run_it_is_of_and_how_far_back_the_server_can_go(
    every: int, back: list[int], clients: list[Samples]
) -> None:
    grid = WatchedGrid(client_app(FEDBN, clients), 3)
    server = Server(FEDBN, grid, 7, every)
    server.at_once = 2
    server.run()
    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    told = {m.metadata.group_id: RunId.of(m.content.config_records["fl-bn/config"]) for m in sent}
    assert len({run_id.run for run_id in told.values()}) == 1
    assert [told[str(round)].durable for round in range(1, 8)] == back


# Back


def test_what_a_users_own_code_draws_goes_on_as_it_was(clients: list[Samples]) -> None:
    drawn: list[tuple[float, float, float]] = []

    def draw(model: nn.Module) -> dict[str, float]:
        drawn.append((random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))))
        return {"accuracy": 0.5}

    server = Server(FBN, WatchedGrid(client_app(FBN, clients), 3), every=1, evaluate=draw)
    before = generators()
    try:
        server.run()
        whole, drawn[:] = drawn[3:], []
        server.run(server.checkpoints[2])
        assert drawn == whole
        drawn.clear()
        server.run(replace(server.checkpoints[2], generators=""))
        assert drawn != whole  # control
    finally:
        set_generators(before)


def test_a_checkpoint_of_another_model_or_of_a_later_round_is_refused_by_name(clients: list[Samples]) -> None:
    server = Server(FBN, WatchedGrid(client_app(FBN, clients), 3), every=1)
    strategy = server.run()
    back, start = server.checkpoints[0], to_numpy(strategy.transport.shared.tensors())
    name, tensor = next(iter(back.arrays.items()))
    wrong = {
        f"{name}: the run shares": replace(back, arrays={k: t for k, t in back.arrays.items() if k != name}),
        "more: the run shares nothing": replace(back, arrays={**back.arrays, "more": tensor}),
        "(1,)": replace(back, arrays={**back.arrays, name: torch.zeros(1)}),
        "torch.float64": replace(back, arrays={**back.arrays, name: tensor.double()}),
        "round 6": replace(back, round=6),  # there is nothing to resume
    }
    for field, other in wrong.items():
        with pytest.raises(RunFailed) as told:
            server.run(other)
        assert field in str(told.value)
    server.run(replace(back, round=5))  # control
    assert identical(to_numpy(strategy.transport.shared.tensors()), start)


# Clients that lost what they kept


@pytest.mark.parametrize(("kept", "lost"), [("memory", "all"), ("files", "all"), ("files", "the last")])
def test_a_client_that_lost_what_it_kept_is_named(
    kept: str, lost: str, clients: list[Samples], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    grid = with_files(FEDBN, clients, tmp_path) if kept == "files" else WatchedGrid(client_app(FEDBN, clients), 3)
    server = Server(FEDBN, grid, 5, every=4)

    def lose(round: int, rounds: int) -> float:
        if round == 4:
            files = list(tmp_path.glob("run/state-*/client-1/*"))
            for path in files if lost == "all" else [max(files)]:
                path.write_bytes(b"")
            if kept == "memory":
                for name in list(grid.states()[1]):
                    del grid.states()[1][name]
        return 0.1

    server.policy["rate"] = lose
    server.run()
    assert "round 4: client 1 kept tensors in round 3, but started from " + ("none" if lost == "all" else "those of round 2") in log.text
    assert log.text.count("but started from") == 1


# In a file


@listed(
    "about",
    [
        {"what": "another thing"},
        {"format": "fl-bn checkpoint/2"},
        {"format": FORMAT},
        {"format": FORMAT, "state": "{}", "run_id": "{}", "generators": ""},
        {"format": FORMAT, "state": "[", "run_id": "{}", "generators": ""},
    ],
)
def test_a_file_that_is_no_checkpoint_is_damaged(about: dict[str, str], tmp_path: Path) -> None:
    durable.save_tensors(tmp_path / "wrong", {"a": torch.ones(1)}, about)
    with pytest.raises(Damaged):
        Checkpoint.load(tmp_path / "wrong")
