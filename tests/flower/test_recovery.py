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

from fl_bn.conversion import convert
from fl_bn.federation.checkpoint import FORMAT, generators, set_generators
from fl_bn.federation.local import Samples
from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.federation.payload import to_numpy
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import BatchNormClient, BatchNormStrategy, Rounds, RunFailed, Site, make_client_app
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.wire.run_id import RunId
from fl_bn.methods import METHODS, Method
from fl_bn.support import durable
from fl_bn.support.durable import Damaged
from tests.in_process import CPU, TWO_STEPS, WatchedGrid, client_app, identical
from tests.kept import Kept
from tests.networks import seeded_network
from tests.noted import noted

Clients = Callable[..., list[Samples]]
FBN, FEDBN = METHODS["fbn"](), METHODS["fedbn"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


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


@pytest.mark.parametrize(
    ("every", "rounds", "expected"), [(1, 4, [1, 2, 3]), (2, 7, [2, 4, 6]), (2, 6, [2, 4]), (3, 2, []), (0, 4, []), (5, 5, [])]
)
def test_checkpoints_are_made_every_so_many_rounds_but_not_after_the_last(
    every: int, rounds: int, expected: list[int], clients: list[Samples]
) -> None:
    server = Server(FBN, WatchedGrid(client_app(FBN, clients), 3), rounds, every)
    server.run()
    assert [checkpoint.round for checkpoint in server.checkpoints] == expected


def test_what_a_checkpoint_says(clients: list[Samples]) -> None:
    server = Server(FEDBN, WatchedGrid(client_app(FEDBN, clients), 3))
    server.optimizer = lambda: server_optimizer("fedadam", 0.01)
    server.run()
    first, second = server.checkpoints
    assert identical({k: t.numpy() for k, t in second.arrays.items()}, server.trajectory[4])
    assert {name.partition("/")[0] for name in second.optimizer} == {"first", "second"}
    assert not identical({k: t.numpy() for k, t in first.arrays.items()}, server.trajectory[4])  # control
    assert dict(second.kept) == {0: 4, 1: 4, 2: 4}
    assert second.failed == 0


def test_a_checkpoint_is_a_value(clients: list[Samples]) -> None:
    """Whoever stores it may take its time."""
    server, made = Server(FEDBN, WatchedGrid(client_app(FEDBN, clients), 3), every=1), list[Checkpoint]()
    server.keep = lambda checkpoint: made.append(checkpoint) or 1  # type: ignore[method-assign,func-returns-value]
    server.run()
    assert [dict(checkpoint.kept) for checkpoint in made] == [dict.fromkeys(range(3), round) for round in range(1, 6)]
    assert all(identical({k: t.numpy() for k, t in c.arrays.items()}, server.trajectory[c.round]) for c in made)


def test_every_message_says_what_run_it_is_of_and_how_far_back_the_server_can_go(clients: list[Samples]) -> None:
    grid = WatchedGrid(client_app(FEDBN, clients), 3)
    server = Server(FEDBN, grid, 7, every=2)
    server.at_once = 2
    server.run()
    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    told = {m.metadata.group_id: RunId.of(m.content.config_records["fl-bn/config"]) for m in sent}
    assert len({run_id.run for run_id in told.values()}) == 1
    assert [told[str(round)].durable for round in range(1, 8)] == [0, 0, 2, 2, 2, 2, 4]
    grid.sent.clear()
    Server(FEDBN, grid, 4, every=0).run()
    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    told = {m.metadata.group_id: RunId.of(m.content.config_records["fl-bn/config"]) for m in sent}
    assert [told[str(round)].durable for round in range(1, 5)] == [0, 1, 2, 3]


# Back


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, "fedavgm") for name in ("fbn", "fedbn", "hbn", "fedtan", "fixbn")),
        ("fedavg", "fedadam"),
        ("hbn", "fedadagrad"),
        ("silobn", "fedyogi"),
        ("hbn", "fedacg"),
    ],
)
def test_a_resumed_run_is_the_run_itself_round_by_round(name: str, optimizer: str, clients: list[Samples], tmp_path: Path) -> None:
    method = METHODS[name]()
    whole = Server(method, with_files(method, clients, tmp_path), every=1)
    whole.optimizer = lambda: server_optimizer(optimizer, {"fedavgm": 0.5, "fedacg": 1.0}.get(optimizer, 0.05), 0.5)
    whole.run()
    back = whole.checkpoints[2]
    back.save(tmp_path / "checkpoint")
    again = Server(method, with_files(method, clients, tmp_path), every=2)
    again.optimizer = whole.optimizer
    # the first run's states of rounds 4 to 6 are there, too, and must not be read
    whole.trajectory, again.trajectory = {r: t for r, t in whole.trajectory.items() if r > 3}, {}
    again.run(Checkpoint.load(tmp_path / "checkpoint"))
    assert all(identical(whole.trajectory[round], again.trajectory[round]) for round in (4, 5, 6))
    assert [record.loss for record in again.records] == [record.loss for record in whole.records[3:]]
    assert again.grid.kinds()[:2] == ["query.hello 0", "train 4"]


def test_calibration_is_for_the_beginning(clients: list[Samples]) -> None:
    server = Server(FBN, WatchedGrid(client_app(FBN, clients), 3), every=1)
    server.policy["calibrate"] = 2
    server.run()
    server.grid.sent.clear()
    server.run(server.checkpoints[1])
    assert "query.statistics 0" not in server.grid.kinds()


def test_failed_rounds_in_a_row_are_counted_across_the_resume(clients: list[Samples]) -> None:
    def disturb(client: int, what: str) -> None:
        if what in ("train 3", "train 4"):
            raise OSError("no")

    server = Server(FBN, WatchedGrid(client_app(FBN, clients, disturb=disturb), 3), every=1)
    server.policy["max_failed"] = 3
    server.run()  # control: two in a row are not three
    assert [checkpoint.failed for checkpoint in server.checkpoints] == [0, 0, 1, 2, 0]
    server.policy["max_failed"] = 2
    with pytest.raises(RunFailed, match="2 rounds in a row"):
        server.run(server.checkpoints[2])
    server.policy["max_failed"] = 2
    with pytest.raises(RunFailed, match="2 rounds in a row"):
        server.run(replace(server.checkpoints[1]))


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


@pytest.mark.parametrize("at", [5, 6, 7])
def test_a_checkpoint_of_the_last_round_leaves_nothing_to_do(at: int, clients: list[Samples]) -> None:
    server = Server(FBN, WatchedGrid(client_app(FBN, clients), 3), every=1)
    server.run()
    back = replace(server.checkpoints[-1], round=at)
    if at < 6:
        server.run(back)
    else:
        with pytest.raises(RunFailed, match=f"there is nothing to resume: the checkpoint is of round {at}, and the run has only 6 rounds"):
            server.run(back)


def test_a_checkpoint_of_another_model_or_method_is_refused_by_name(clients: list[Samples]) -> None:
    server = Server(FBN, WatchedGrid(client_app(FBN, clients), 3), every=1)
    strategy = server.run()
    (back, *_), start = server.checkpoints, to_numpy(strategy.shared.tensors())
    name, tensor = next(iter(back.arrays.items()))
    wrong = {
        f"{name}: the run shares .*, but the checkpoint has nothing": {k: t for k, t in back.arrays.items() if k != name},
        "more: the run shares nothing, but the checkpoint has": {**back.arrays, "more": tensor},
        rf"{name}: the run shares .*, but the checkpoint has \(1,\)": {**back.arrays, name: torch.zeros(1)},
        f"{name}: the run shares .*, but the checkpoint has .* torch.float64": {**back.arrays, name: tensor.double()},
    }
    for told, arrays in wrong.items():
        with pytest.raises(RunFailed, match=f"the checkpoint is not of this model and method: {told}"):
            server.run(replace(back, arrays=arrays))
    assert identical(to_numpy(strategy.shared.tensors()), start)


# Clients that lost what they kept


@pytest.mark.parametrize("files", [True, False])
def test_a_client_that_lost_what_it_kept_is_named(
    files: bool, clients: list[Samples], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    grid = with_files(FEDBN, clients, tmp_path) if files else WatchedGrid(client_app(FEDBN, clients), 3)
    server = Server(FEDBN, grid, 4)

    def lose(round: int, rounds: int) -> float:
        if round == 3:
            for path in tmp_path.glob("run/state-*/client-1/*"):
                path.unlink()
            if not files:
                for name in list(grid.states()[1]):
                    del grid.states()[1][name]
        return 0.1

    server.policy["rate"] = lose
    server.run()
    assert "round 3: client 1 kept tensors in round 2, but started from none: the later ones were lost" in log.text
    assert log.text.count("but started from") == 1
    assert not [r for r in log.records if "client 0 kept" in r.getMessage()]


def test_a_client_that_goes_on_from_an_older_state_is_named(clients: list[Samples], tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    server = Server(FEDBN, with_files(FEDBN, clients, tmp_path), 5, every=4)

    def damage(round: int, rounds: int) -> float:
        if round == 4:
            max(tmp_path.glob("run/state-*/client-2/*")).write_bytes(b"")
        return 0.1

    server.policy["rate"] = damage
    server.run()
    assert "round 4: client 2 kept tensors in round 3, but started from those of round 2: the later ones were lost" in log.text
    assert log.text.count("but started from") == 1


@pytest.mark.parametrize("name", ["fedbn", "gn", "hbn"])
def test_nobody_is_named_where_nothing_was_lost(name: str, tmp_path: Path, tiny_clients: Clients, log: pytest.LogCaptureFixture) -> None:
    method = METHODS[name]()
    grid = with_files(method, tiny_clients((6, 4, 5, 4)), tmp_path)
    server = Server(method, grid, 8, every=2)
    server.policy |= {"clients": 4, "fraction": 0.5}
    server.run()
    server.run(server.checkpoints[2])
    server.run(server.checkpoints[2])
    assert "but started from" not in log.text
    for path in tmp_path.glob("run/state-*/client-*/*"):
        path.unlink()
    server.run(server.checkpoints[2])
    assert ("but started from none" in log.text) == (name != "gn")  # control: after a resume, too


# In a file


def checkpoint() -> Checkpoint:
    return Checkpoint(
        7,
        RunId("run/state-00000000", (("0a1b2c3d", 3), ("4e5f6071", 5)), 4),
        {"a.b": torch.tensor([1.5], dtype=torch.float64), "a/b": torch.tensor(3)},
        {"momentum_buffer/a/b": torch.ones(2), "step/a": torch.tensor(4.0)},
        2,
        {0: 7, 11: 3},
        {"rounds.csv": 1234},
        generators(),
    )


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    made = checkpoint()
    made.save(tmp_path / "file")
    back = Checkpoint.load(tmp_path / "file")
    for part in ("arrays", "optimizer"):
        mine, its = getattr(made, part), getattr(back, part)
        assert identical({k: t.numpy() for k, t in mine.items()}, {k: t.numpy() for k, t in its.items()})
    assert replace(back, arrays={}, optimizer={}) == replace(made, arrays={}, optimizer={})


def test_a_file_that_is_no_checkpoint_is_damaged(tmp_path: Path) -> None:
    durable.save_tensors(tmp_path / "other", {"a": torch.ones(1)}, {"what": "another thing"})
    with pytest.raises(Damaged, match=f"other: expected the format '{FORMAT}', but got 'a file without a format'"):
        Checkpoint.load(tmp_path / "other")
    durable.save_tensors(tmp_path / "newer", {}, {"format": "fl-bn checkpoint/2"})
    with pytest.raises(Damaged, match=f"newer: expected the format '{FORMAT}', but got 'fl-bn checkpoint/2'"):
        Checkpoint.load(tmp_path / "newer")
    full = {"format": FORMAT, "state": "{}", "run_id": "{}", "generators": ""}
    for wrong in ({"format": FORMAT}, full, full | {"state": "["}):
        durable.save_tensors(tmp_path / "wrong", {}, wrong)
        with pytest.raises(Damaged):
            Checkpoint.load(tmp_path / "wrong")


def test_generators_come_back_to_the_bit() -> None:
    before = generators()
    try:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        random.gauss(0, 1), np.random.standard_normal()  # each keeps a second number for next time
        state = generators()
        first = [random.gauss(0, 1), random.random(), np.random.standard_normal(), float(torch.randn(()))]
        assert generators() != state
        set_generators(state)
        assert first == [random.gauss(0, 1), random.random(), np.random.standard_normal(), float(torch.randn(()))]
    finally:
        set_generators(before)
    assert generators() == before
