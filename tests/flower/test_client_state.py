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
from fl_bn.support import durable
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


# In memory


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


# In files


def files(state: FileState) -> list[str]:
    return sorted(path.name for path in state.folder.iterdir())


def test_files_come_back_bit_for_bit_and_belong_to_one_client_alone(tmp_path: Path) -> None:
    state = FileState(tmp_path, RUN, 3, "mine")
    assert state.read(1) == NOTHING
    state.write(1, TENSORS)
    kept = FileState(tmp_path, RUN, 3, "mine").read(2)
    assert kept.round == 1
    assert same(kept, TENSORS)
    assert FileState(tmp_path, RUN, 4, "mine").read(2) == NOTHING
    assert FileState(tmp_path, RunId("run/state-11111111"), 3, "mine").read(2) == NOTHING
    (file,) = (tmp_path / "run" / "state-00000000" / "client-3").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600  # they are the client's own


@listed(("durable_round", "kept"), [(0, [1, 3, 4, 6, 7, 8]), (3, [3, 4, 6, 7, 8]), (4, [4, 6, 7, 8]), (6, [6, 7, 8]), (7, [7, 8])])
def test_states_that_nobody_can_go_back_to_are_deleted(durable_round: int, kept: list[int], tmp_path: Path) -> None:
    """The server can go back to ``durable`` and to any round after it, so the newest up to it must stay."""
    for round in (1, 3, 4, 6, 7):
        FileState(tmp_path, RUN, 0, "mine").write(round, one(round))
    state = FileState(tmp_path, RunId(RUN.run, durable=durable_round), 0, "mine")
    state.write(8, one(8))
    assert files(state) == [f"round-{round:06}.0.safetensors" for round in kept]


def newest(state: FileState) -> Path:
    return max(state.folder.glob("round-*.safetensors"))


@listed("damage", ["flipped", "short", "empty", "no safetensors", "another client's", "another model's", "another run's"])
def test_a_file_that_is_no_use_is_set_aside_and_the_one_before_it_read(damage: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    state = FileState(tmp_path, RUN, 0, "mine")
    for round in (1, 2):
        state.write(round, one(round))
    assert value(state.read(3)) == (2, 2.0)  # control
    data, path = newest(state).read_bytes(), newest(state)
    strangers = {
        "another client's": FileState(tmp_path / "x", RUN, 1, "mine"),
        "another model's": FileState(tmp_path / "x", RUN, 0, "another"),
        "another run's": FileState(tmp_path / "x", RunId("run/state-11111111"), 0, "mine"),
    }
    if damage in strangers:
        strangers[damage].write(2, one(2))
        newest(strangers[damage]).replace(path)
    else:
        middle = bytes([data[-1] ^ 1])
        path.write_bytes({"flipped": data[:-1] + middle, "short": data[:-3], "empty": b"", "no safetensors": b"x" * 99}[damage])
    damaged = path.read_bytes()
    assert value(state.read(3)) == (1, 1.0)
    aside = path.with_name(f"{path.name}.set-aside-1")
    assert aside.read_bytes() == damaged  # kept for who wants to look
    assert not path.exists()
    assert value(state.read(3)) == (1, 1.0)
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

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.checkpoints: list[Checkpoint] = []
        self.line: list[dict[int, int]] = []
        self.written = 0

    @initialize(every=st.integers(1, 3))
    def start(self, every: int) -> None:
        self.every = every
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


def test_a_resumed_server_knows_whose_replies_changed_the_model() -> None:
    """In round 2, clients kept tensors, but the server could not use the round."""
    before, after, made = KeptTensors(SHARED), KeptTensors(SHARED), list[Checkpoint]()
    before.rounds, before.counted = {0: 2, 1: 1}, {0: 1}
    Recovery("run", before, 1, lambda checkpoint: made.append(checkpoint) or 0).after_round(  # type: ignore[func-returns-value]
        2, ROUNDS, SHARED.tensors(), SHARED, optimizer(), 1
    )
    Recovery("run", after, 1).go_back(made[0], ROUNDS, SHARED, optimizer())
    assert (after.rounds, after.counted) == (before.rounds, before.counted)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files: nothing here cuts the power, and nothing draws."""
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("fl_bn.flower.recovery.generators", str)


@pytest.mark.usefixtures("unsynced")
def test_clients_always_read_the_state_of_the_line_they_are_on() -> None:
    run_state_machine_as_test(Timelines, settings=settings(max_examples=40, stateful_step_count=25))


# Which run a message belongs to

NONE = (
    *("../x/state-00000000", "../../etc/state-00000000", "a/../../b/state-00000000", "/etc/x/state-00000000", "./state-00000000"),
    *(".ssh/state-00000000", "a/b/state-00000000", "../state-00000000", "/state-00000000", "run", "run/authorized_keys"),
    *("run/state-0000000", "run/state-000000000", "run/state-ABCDEF00", "run/state-zzzzzzzz", "run\0/state-00000000"),
    *("run\n/state-00000000", "run/state-00000000\n", "run\\..\\x/state-00000000", "r" * 300 + "/state-00000000"),
    *("~/state-00000000", " /state-00000000", "-rf/state-00000000"),
)


@listed("name", NONE, ids=repr)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="state-"):
        FORM.read({"run": name})
    assert RunId.of(FORM.read({"run": "run/state-00000000"})).run == "run/state-00000000"  # control


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
