"""What a client keeps between rounds: in memory, in files, of which run; against a reference that plays out crashes and resumes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.federation.shared_model import SharedModel
from fl_bn.flower.handlers import NOTHING, ClientState, FileState, MemoryState
from fl_bn.flower.population import KeptTensors
from fl_bn.flower.recovery import Recovery
from fl_bn.flower.wire.codec import RunId
from fl_bn.flower.wire.messages import RUN as FORM
from fl_bn.methods import METHODS
from tests.flower.inside import Checkpoint
from tests.listed import listed

RUN = RunId("run/state-00000000")
TENSORS = {
    "local": {"norm.weight": torch.tensor([1.5, -2.0]), "norm.num_batches_tracked": torch.tensor(7)},
    "momentum": {"a/b": torch.tensor([[0.1]], dtype=torch.float64)},
}


def one(value: float) -> dict[str, dict[str, Tensor]]:
    return {"local": {"x": torch.tensor(value, dtype=torch.float64)}}


def value(kept: ClientState) -> tuple[int, float] | None:
    """The round, and the number that was kept in it."""
    return None if kept == NOTHING else (kept.round, float(kept.get("local")["x"]))


def same(a: ClientState, sections: dict[str, dict[str, Tensor]]) -> bool:
    return a.sections.keys() == sections.keys() and all(
        a.get(s).keys() == sections[s].keys()
        and all(torch.equal(a.get(s)[k], t) and a.get(s)[k].dtype == t.dtype for k, t in sections[s].items())
        for s in sections
    )


def test_memory_holds_the_newest_and_the_one_before() -> None:
    """A client that is asked again, since its reply was lost, starts from where it started."""
    record = RecordDict()
    state = MemoryState(record, "mine")
    assert state.read(1) == NOTHING
    state.write(1, TENSORS)
    assert state.read(2).round == 1
    assert same(state.read(2), TENSORS)
    for round in (2, 4):
        state.write(round, one(round))
    assert set(record.array_records) == {"fl-bn/local", "fl-bn/previous/local"}
    state = MemoryState(record, "mine")  # a client is built anew for every message
    assert [value(state.read(before)) for before in (5, 4)] == [(4, 4.0), (2, 2.0)]
    state.write(4, one(40))  # asked again
    assert [value(state.read(before)) for before in (5, 4)] == [(4, 40.0), (2, 2.0)]
    assert MemoryState(record, "another model or method").read(5) == NOTHING


def test_files_belong_to_one_client_of_one_run_alone(tmp_path: Path) -> None:
    FileState(tmp_path, RUN, 3, "mine").write(1, TENSORS)
    assert same(FileState(tmp_path, RUN, 3, "mine").read(2), TENSORS)
    assert FileState(tmp_path, RUN, 4, "mine").read(2) == NOTHING
    assert FileState(tmp_path, RunId("run/state-11111111"), 3, "mine").read(2) == NOTHING
    (file,) = (tmp_path / "run" / "state-00000000" / "client-3").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600  # they are the client's own


def test_states_that_nobody_can_go_back_to_are_deleted(tmp_path: Path) -> None:
    """The server can go back to round 5 and to any after it, so the newest up to it must stay."""
    for round in (1, 3, 4, 6):
        FileState(tmp_path, RUN, 0, "mine").write(round, one(round))
    state = FileState(tmp_path, RunId(RUN.run, durable=5), 0, "mine")
    state.write(8, one(8))
    assert sorted(path.name for path in state.folder.iterdir()) == [f"round-{round:06}.0.safetensors" for round in (4, 6, 8)]


STRANGERS = {
    "another client's": (RUN, 1, "mine"),
    "another model's": (RUN, 0, "another"),
    "another run's": (RunId("run/state-11111111"), 0, "mine"),
}


@listed("damage", ["short", *STRANGERS])
def test_a_file_that_is_no_use_is_set_aside_and_the_one_before_it_read(damage: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    def newest(state: FileState) -> Path:
        return max(state.folder.glob("round-*.safetensors"))

    state = FileState(tmp_path, RUN, 0, "mine")
    for round in (1, 2):
        state.write(round, one(round))
    assert value(state.read(3)) == (2, 2.0)  # control
    path = newest(state)
    if damage in STRANGERS:
        stranger = FileState(tmp_path / "x", *STRANGERS[damage])
        stranger.write(2, one(2))
        newest(stranger).replace(path)
    else:
        path.write_bytes(path.read_bytes()[:-3])
    damaged = path.read_bytes()
    assert [value(state.read(3)) for _ in range(2)] == [(1, 1.0)] * 2
    aside = path.with_name(f"{path.name}.set-aside-1")
    assert aside.read_bytes() == damaged  # kept for who wants to look
    assert not path.exists()
    assert log.text.count(f"renamed to {aside.name}") == 1  # said once
    state.write(2, one(20))
    assert value(state.read(3)) == (2, 20.0)


# Against a reference

SHARED = SharedModel(nn.Linear(1, 1), METHODS["gn"]())
CLIENTS, ROUNDS = 3, 10**6


def optimizer() -> ServerOptimizer:
    return server_optimizer("fedavg", 1.0)


class Timelines(RuleBasedStateMachine):
    """One server with its two last checkpoints, clients that take part or not, crashes at any moment, and a checkpoint that is damaged.

    By hand: the rounds that led here, each with what every client kept in it. A crash forgets those after the checkpoint.
    """

    @initialize(every=st.integers(1, 3))
    def start(self, every: int) -> None:
        self.temporary = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None)  # thousands of files
        self.folder, self.every, self.written = Path(self.temporary.name), every, 0
        self.checkpoints: list[Checkpoint] = []
        self.line: list[dict[int, int]] = []
        self.recovery = Recovery("run", KeptTensors(SHARED), every, self.store)

    def store(self, checkpoint: Checkpoint) -> int:
        self.checkpoints = [*self.checkpoints, checkpoint][-2:]
        return self.checkpoints[0].round

    def train(self, clients: Sequence[int]) -> dict[int, int]:
        """Everyone reads what it should, and some train."""
        round, kept = len(self.line) + 1, {}
        for client in range(CLIENTS):
            config = self.recovery.run_id.to_config()  # as it travels
            state = FileState(self.folder, RunId.of(config), client, "mine")
            known = [(number, then[client]) for number, then in enumerate(self.line, 1) if client in then]
            assert value(state.read(round)) == (known[-1] if known else None)
            if client in clients:
                self.written += 1
                state.write(round, one(self.written))
                kept[client] = self.written
                assert value(state.read(round + 1)) == (round, self.written)
        return kept

    @rule(clients=st.sets(st.integers(0, CLIENTS - 1)))
    def round(self, clients: set[int]) -> None:
        self.line.append(self.train(sorted(clients)))
        self.recovery.after_round(len(self.line), ROUNDS, SHARED.tensors(), SHARED, optimizer(), 0)

    @precondition(lambda self: self.checkpoints)
    @rule(clients=st.sets(st.integers(0, CLIENTS - 1)), damaged=st.booleans())
    def crash(self, clients: set[int], damaged: bool) -> None:
        """Some have trained in the round that never ends."""
        if clients:
            self.train(sorted(clients))
        if damaged and len(self.checkpoints) > 1:
            self.checkpoints.pop()
        back = self.checkpoints[-1]
        self.recovery = Recovery("run", KeptTensors(SHARED), self.every, self.store)
        self.recovery.go_back(back, ROUNDS, SHARED, optimizer())
        self.line = self.line[: back.round]

    def teardown(self) -> None:
        self.temporary.cleanup()


def test_clients_always_read_the_state_of_the_line_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.recovery.generators", str)  # a thousand checkpoints, and nothing draws
    run_state_machine_as_test(Timelines, settings=settings(max_examples=40, stateful_step_count=25))


# Which run a message belongs to

NAMES = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        ["", "..", "/", "../../x", "münchen", "ärzte", "Ω", "20250101-120000-fedbn-my.package:data-seed0", "a b (2)", "_x", "-x", "x" * 255]
    ),
)


@settings(max_examples=200)
@given(name=NAMES)
def test_every_name_of_a_run_makes_one_that_clients_take(name: str) -> None:
    made = RunId.new(name)
    assert RunId.of(FORM.read(made.to_config())) == made
    folder, _, state = made.run.partition("/")
    assert folder not in ("", ".", "..")
    assert "/" not in state
    assert not folder.startswith(".")
