"""Runs on a disk that is full for a while, or at the end: nothing half-written, and nothing lost that fits later."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fl_bn.flower import RunFailed
from tests.experiment.inside import RoundRecord, RunDirectory, durable, refusing
from tests.experiment.resuming import ROUNDS, Values, results, run, small_run
from tests.integration.runs import differences, table
from tests.test_durable import room_for


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return results(run(small_run(tmp_path_factory.mktemp("whole"), method="gn")))


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.log.LOGGER.propagate", True)


def at_round(monkeypatch: pytest.MonkeyPatch, what: dict[int, Any]) -> None:
    """Call ``what[round]`` just before ``round`` is written down."""
    on_round = RunDirectory.on_round

    def then(self: RunDirectory, entry: RoundRecord, rounds: int) -> None:
        if entry.round in what:
            what[entry.round]()
        on_round(self, entry, rounds)

    monkeypatch.setattr(RunDirectory, "on_round", then)


def test_a_kernel_that_writes_half_a_line_leaves_none(
    whole: dict[str, bytes], values: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a simulated failure: no file may grow beyond the size that rounds.csv has after round 2, and a bit."""
    limits = []

    def fill() -> None:
        limits.append(room_for((Path(str(values["output"])) / "run" / "rounds.csv").stat().st_size + 30))
        limits[0].__enter__()

    at_round(monkeypatch, {3: fill, 5: lambda: limits[0].__exit__(None, None, None)})
    assert differences(whole, results(run(values))) == []
    assert "bytes fit into" in caplog.text
    assert "no checkpoint after round 3" in caplog.text


def test_checkpoints_that_do_not_fit_are_said_and_the_run_is_the_same(
    whole: dict[str, bytes], values: Values, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    assert differences(whole, results(run(values, resume="run"))) == []
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
    file: str, whole: dict[str, bytes], values: Values, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_round(patch, {ROUNDS: lambda: disk.full.add(file)})
        with refusing("resume='run'", by=RunFailed):
            run(values)
    path = Path(str(values["output"])) / "run"
    if file != "model.safetensors":  # each is written if it can be: hours of training against a line of text
        assert {f"model.safetensors/{name}" for name in load_file(path / "model.safetensors")} <= whole.keys()
    assert not list(path.glob(".unfinished*"))
    assert len(list((path / "checkpoints").iterdir())) == 2
    disk.full.clear()
    assert differences(whole, results(run(values, resume="run"))) == []


def test_a_run_that_cannot_even_begin_says_why_and_holds_nothing(values: Values, disk: Disk) -> None:
    disk.full.add("rounds.csv")
    for _ in range(2):
        with refusing("No space left on device", by=OSError):
            run(values | {"name": ""})
