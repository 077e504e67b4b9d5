"""Two processes that go on with one run, and a disk that is full for a while: nothing half-written, and nothing lost that fits later."""

from __future__ import annotations

import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower import RunFailed
from fl_bn.run import run_directory
from tests.experiment.inside import RoundRecord, RunDirectory, durable, refusing
from tests.experiment.resuming import ROUNDS, Values, results, run, small_run, stopped
from tests.integration.runs import differences, table
from tests.test_durable import room_for


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return results(run(small_run(tmp_path_factory.mktemp("whole"), method="gn")))


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


def goes_on(values: Values, gate: Path, verdict: Path) -> None:
    """Wait for ``gate``, go on with the run, and write down what came of it."""
    while not gate.exists():
        time.sleep(0.001)
    try:
        run(values | {"resume": "run"})
        verdict.write_text("finished")
    except (RunFailed, ValueError) as error:
        verdict.write_text(f"refused: {error}")


def test_of_those_that_go_on_with_one_run_at_once_one_does(plain: dict[str, bytes], values: Values, tmp_path: Path) -> None:
    path, gate, verdicts = stopped(values, 3, dies=True), tmp_path / "gate", [tmp_path / f"verdict-{number}" for number in range(3)]
    children = [get_context("fork").Process(target=goes_on, args=(values, gate, verdict)) for verdict in verdicts]
    for child in children:
        child.start()
    gate.touch()
    for child in children:
        child.join()
    finished, *others = sorted(verdict.read_text() for verdict in verdicts)
    assert finished == "finished"
    assert all(other.startswith("refused: ") for other in others), others
    assert differences(plain, results(path)) == []


def test_a_lock_that_its_holder_removed_holds_nobody_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the holder's end and locked after it, the file is gone from the folder: another could lock a new one beside it."""
    flock, tries = durable.fcntl.flock, 0

    def slow(lock: object, how: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            (tmp_path / run_directory.LOCK).unlink()  # by the holder, who then lets go of it
        flock(lock, how)  # type: ignore[arg-type]

    monkeypatch.setattr(durable.fcntl, "flock", slow)
    held = run_directory._locked(tmp_path)
    assert tries == 2
    with pytest.raises(RunFailed):
        run_directory._locked(tmp_path)
    held.close()


# A full disk


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


def test_clients_that_cannot_keep_their_own_say_so_and_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client could not keep must not be in the average either: its own layers would be of another round."""
    write = durable.write

    def full(path: Path, data: bytes, mode: int = 0o600) -> None:
        if "client-1" in str(path):
            raise OSError(28, "No space left on device")
        write(path, data, mode)

    at_round(monkeypatch, {n: partial(monkeypatch.setattr, durable, "write", how) for n, how in ((1, full), (3, write))})
    path = run(small_run(tmp_path / "runs", method="fedbn"))
    refused = {(row["round"], row["client"]): row["refused"] for row in table(path / "clients.csv") if row["refused"]}
    assert set(refused) == {("2", "1"), ("3", "1")}
    assert all("No space left on device" in reason for reason in refused.values())


def test_results_that_cannot_be_written_can_be_had_later(
    plain: dict[str, bytes], values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(str(values["output"])) / "run"
    with monkeypatch.context() as patch:
        at_round(patch, {ROUNDS: (path / "model.safetensors").mkdir})  # no file can be there
        with refusing("resume='run'", by=RunFailed):
            run(values)
    assert not list(path.glob(".unfinished*"))
    assert len(list((path / "checkpoints").iterdir())) == 2
    (path / "model.safetensors").rmdir()
    assert differences(plain, results(run(values, resume="run"))) == []
