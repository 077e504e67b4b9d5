"""Combinations that keep something everywhere, SIGKILL in the middle of a file's write, and two processes that go on with one run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import pytest

from fl_bn.flower import RunFailed
from fl_bn.run import run_directory
from fl_bn.support import locks
from tests.experiment.inside import durable
from tests.experiment.resuming import Values, ends_with, results, run, small_run, stopped
from tests.integration.runs import differences

CASES: dict[str, Values] = {
    "moon, adam, hbn, secure": {
        "method": "hbn", "objective": "moon", "server_optimizer": "fedadam", "server_learning_rate": 0.05, "secure_aggregation": True
    },
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


def test_a_kill_between_a_checkpoint_and_the_removal_of_the_old_one(whole: Whole, tmp_path: Path) -> None:
    case = "fedtan2 over replay"
    values = small_run(tmp_path / "pieces", **CASES[case])

    def play() -> None:
        unlink, removed = Path.unlink, 0

        def dies(self: Path, missing_ok: bool = False) -> None:
            nonlocal removed
            if self.parent.name == "checkpoints" and self.name.startswith("round-"):
                removed += 1
                if removed == 1:
                    kill()
            unlink(self, missing_ok)

        Path.unlink = dies  # type: ignore[method-assign]
        run(values)

    ends_with(signal.SIGKILL, play)
    assert len(list((tmp_path / "pieces/run/checkpoints").glob("round-*"))) == 3  # control: it was about to remove one
    assert differences(whole(case), results(run(values, resume="latest"))) == []


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
