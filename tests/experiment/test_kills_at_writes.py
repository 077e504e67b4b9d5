"""SIGKILL in the middle of a file's write, two processes that go on with one run, and a disk that is full for a while."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fl_bn.flower import RunFailed
from fl_bn.run import run_directory
from fl_bn.support import locks
from tests.experiment.inside import RoundRecord, RunDirectory, durable, refusing
from tests.experiment.resuming import ROUNDS, Values, ends_with, results, run, small_run, stopped
from tests.integration.runs import differences, table
from tests.test_durable import room_for

CASES: dict[str, Values] = {
    "fedtan2 over replay": {"method": "fedtan2", "exchange": "replay"},
    "moon, yogi, fedbn, local momentum": {
        "method": "fedbn", "objective": "moon", "server_optimizer": "fedyogi", "server_learning_rate": 0.05, "maintain_momentum": "local"
    },
}  # fmt: skip
Whole = Callable[[str], dict[str, bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The results of a case that nobody stopped."""

    @lru_cache
    def made(case: str) -> dict[str, bytes]:
        return results(run(small_run(tmp_path_factory.mktemp("whole"), **CASES[case], checkpoint_every=0)))

    return made


STAGES = ("half written", "synced", "renamed", "done")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_a_write(values: Values, below: str, number: int, stage: str) -> None:
    """The run, killed at ``stage`` of write ``number`` (from 1) of a file below a folder called ``below``."""
    write, written = durable.write, 0

    def at(path: Path, data: bytes, mode: int = 0o600) -> None:
        nonlocal written
        if not any(part.startswith(below) for part in path.parts):
            return write(path, data, mode)
        written += 1
        if written != number:
            return write(path, data, mode)
        if stage == "half written":
            (path.parent / f"{durable.UNFINISHED}0123").write_bytes(data[: len(data) // 2])
            kill()
        with pytest.MonkeyPatch.context() as patch:
            if stage == "synced":
                patch.setattr(Path, "replace", lambda self, target: kill())
            elif stage == "renamed":
                patch.setattr(durable, "sync_folder", lambda folder: kill())
            write(path, data, mode)
        return kill()

    durable.write = at
    run(values)


@pytest.mark.sample("half written", "renamed")
@pytest.mark.parametrize("below", ["checkpoints", "state-"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_in_the_middle_of_a_write(stage: str, below: str, whole: Whole, tmp_path: Path) -> None:
    """Of the second checkpoint, and of a client's file of round 3; then, of the run that goes on, of the next one."""
    case = "moon, yogi, fedbn, local momentum" if below == "state-" else "fedtan2 over replay"
    values = small_run(tmp_path / "pieces", **CASES[case])
    number = {"checkpoints": 2, "state-": 8}[below]  # three clients: 7, 8, 9 are of round 3
    ends_with(signal.SIGKILL, partial(dies_in_a_write, values, below, number, stage))
    assert list((tmp_path / "pieces/run/checkpoints").glob("round-*"))
    ends_with(signal.SIGKILL, partial(dies_in_a_write, values | {"resume": "latest"}, below, 2, stage))
    path = run(values, resume="latest")
    assert differences(whole(case), results(path)) == []
    assert not list(path.rglob(f"{durable.UNFINISHED}*"))


# Two writers


def goes_on(values: Values, gate: Path, verdict: Path) -> None:
    """Waits for ``gate``, goes on with the run, and writes down what came of it."""
    while not gate.exists():
        time.sleep(0.001)
    try:
        run(values | {"resume": "run"})
        verdict.write_text("finished")
    except (RunFailed, ValueError) as error:
        verdict.write_text(f"refused: {error}")


def test_of_two_that_go_on_with_one_run_at_once_one_does(whole: Whole, tmp_path: Path) -> None:
    case = "fedtan2 over replay"
    values = small_run(tmp_path / "pieces", **CASES[case])
    path, gate = stopped(values, 3, dies=True), tmp_path / "gate"
    children = []
    for number in range(3):
        if (child := os.fork()) == 0:
            try:
                goes_on(values, gate, tmp_path / f"verdict-{number}")
            finally:
                os._exit(0)
        children.append(child)
    gate.touch()
    for child in children:
        os.waitpid(child, 0)
    verdicts = sorted((tmp_path / f"verdict-{number}").read_text() for number in range(3))
    assert verdicts[0] == "finished"
    assert all(verdict.startswith("refused: ") for verdict in verdicts[1:]), verdicts
    assert differences(whole(case), results(path)) == []


def test_a_lock_that_its_holder_removed_holds_nobody_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the holder's end and locked after it, the file is gone from the folder: another could lock a new one beside it."""
    flock, tries = locks.fcntl.flock, 0

    def slow(lock: object, how: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            (tmp_path / run_directory.LOCK).unlink()  # by the holder, who then lets go of it
        flock(lock, how)  # type: ignore[arg-type]

    monkeypatch.setattr(locks.fcntl, "flock", slow)
    held = run_directory._locked(tmp_path)
    assert tries == 2
    with pytest.raises(RunFailed):
        run_directory._locked(tmp_path)
    held.close()


# A full disk: nothing half-written, and nothing lost that fits later


class Disk:
    """Files whose path has one of ``full`` in it cannot be written."""

    def __init__(self) -> None:
        self.full: set[str] = set()

    def check(self, path: object) -> None:
        if any(part in str(path) for part in self.full):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made, write, open_file = Disk(), durable.write, Path.open

    def write_if_it_fits(path: Path, data: bytes, mode: int = 0o600) -> None:
        made.check(path)
        write(path, data, mode)

    def open_if_it_fits(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode != "r" and "b" in mode or "w" in mode:
            made.check(self)
        return open_file(self, mode, *args, **options)

    monkeypatch.setattr(durable, "write", write_if_it_fits)
    monkeypatch.setattr(Path, "open", open_if_it_fits)
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return results(run(small_run(tmp_path_factory.mktemp("whole"), method="gn")))


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.compat.LOGGER.propagate", True)


def at_round(monkeypatch: pytest.MonkeyPatch, what: dict[int, Any]) -> None:
    """Call ``what[round]`` just before ``round`` is written down."""
    on_round = RunDirectory.on_round

    def then(self: RunDirectory, entry: RoundRecord, rounds: int) -> None:
        if entry.round in what:
            what[entry.round]()
        on_round(self, entry, rounds)

    monkeypatch.setattr(RunDirectory, "on_round", then)


def test_a_kernel_that_writes_half_a_line_leaves_none(
    plain: dict[str, bytes], values: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a simulated failure: no file may grow beyond the size that rounds.csv has after round 2, and a bit."""
    limits = []

    def fill() -> None:
        limits.append(room_for((Path(str(values["output"])) / "run" / "rounds.csv").stat().st_size + 30))
        limits[0].__enter__()

    at_round(monkeypatch, {3: fill, 5: lambda: limits[0].__exit__(None, None, None)})
    assert differences(plain, results(run(values))) == []
    assert "bytes fit into" in caplog.text
    assert "no checkpoint after round 3" in caplog.text


def test_checkpoints_that_do_not_fit_are_said_and_the_run_is_the_same(
    plain: dict[str, bytes], values: Values, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that then dies goes on from the last checkpoint that fitted."""

    def die() -> None:
        disk.full.add("/run/")  # which must not hide the error that ends the run
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_round(patch, {3: lambda: disk.full.add("/checkpoints/"), 5: die})
        with pytest.raises(KeyboardInterrupt):
            run(values)
    path = Path(str(values["output"])) / "run"
    assert sorted(file.name for file in (path / "checkpoints").iterdir()) == ["round-000001.safetensors", "round-000002.safetensors"]
    disk.full.clear()
    assert differences(plain, results(run(values, resume="run"))) == []
    for round in (3, 4):
        assert f"no checkpoint after round {round}: [Errno 28] No space left on device" in caplog.text


def test_clients_that_cannot_keep_their_own_say_so_and_do_not_count(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client could not keep must not be in the average either: its own layers would be of another round."""
    values = small_run(tmp_path / "runs", method="fedbn")
    at_round(monkeypatch, {1: lambda: disk.full.add("client-1"), 3: lambda: disk.full.discard("client-1")})
    path = run(values)
    refused = {(row["round"], row["client"]): row["refused"] for row in table(path / "clients.csv") if row["refused"]}
    assert set(refused) == {("2", "1"), ("3", "1")}
    assert all("OSError: [Errno 28] No space left on device" in reason for reason in refused.values())


@pytest.mark.parametrize("file", ["model.safetensors", "rounds.csv"])
def test_results_that_do_not_fit_can_be_had_later(
    file: str, plain: dict[str, bytes], values: Values, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_round(patch, {ROUNDS: lambda: disk.full.add(file)})
        with refusing("resume='run'", by=RunFailed):
            run(values)
    path = Path(str(values["output"])) / "run"
    if file != "model.safetensors":  # each is written if it can be: hours of training against a line of text
        assert {f"model.safetensors/{name}" for name in load_file(path / "model.safetensors")} <= plain.keys()
    assert not list(path.glob(".unfinished*"))
    assert len(list((path / "checkpoints").iterdir())) == 2
    disk.full.clear()
    assert differences(plain, results(run(values, resume="run"))) == []


def test_a_run_that_cannot_even_begin_says_why_and_holds_nothing(values: Values, disk: Disk) -> None:
    disk.full.add("rounds.csv")
    for _ in range(2):
        with refusing("No space left on device", by=OSError):
            run(values | {"name": ""})
