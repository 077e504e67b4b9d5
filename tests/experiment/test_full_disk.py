"""Two processes that go on with one run, and a disk that is full for a while: nothing half-written, and nothing lost that fits later."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import pytest

from fl_bn.flower import RunFailed
from tests.experiment.inside import refusing
from tests.experiment.resuming import AFTER, DISK, ROUNDS, Values, results, run, small_run, stopped
from tests.integration.runs import differences, table
from tests.test_durable import room_for


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return results(run(small_run(tmp_path_factory.mktemp("whole"), method="gn")))


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return small_run(tmp_path / "runs", method="gn", callbacks=DISK)


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
    (path / "rounds.csv").write_text("round")  # as a spreadsheet might leave it: it is made anew
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


def test_a_kernel_that_writes_half_a_line_leaves_none(plain: dict[str, bytes], values: Values, log: pytest.LogCaptureFixture) -> None:
    """For two rounds, no file may grow beyond the size that rounds.jsonl has after round 2, and a bit."""
    with ExitStack() as limits:
        AFTER[2] = lambda folder: limits.enter_context(room_for((folder / "rounds.jsonl").stat().st_size + 30))
        AFTER[4] = lambda folder: limits.close()
        assert differences(plain, results(run(values))) == []
    assert "bytes fit" in log.text
    assert "no checkpoint after round 3" in log.text


def test_clients_that_cannot_keep_their_own_say_so_and_do_not_count(values: Values) -> None:
    """What a client could not keep must not be in the average either: its own layers would be of another round."""

    def block(folder: Path) -> None:
        (file,) = folder.glob("state-*/client-1/round-000001*")
        file.with_name(file.name.replace("1", "2")).mkdir()  # no file can be there

    AFTER[1] = block
    AFTER[2] = lambda folder: [path.rmdir() for path in folder.glob("state-*/client-1/round-000002*")]
    path = run({**values, "method": "fedbn"})
    refused = {(row["round"], row["client"]): row["refused"] for row in table(path / "clients.csv") if row["refused"]}
    assert set(refused) == {("2", "1")}
    assert "directory" in refused["2", "1"]


def test_results_that_cannot_be_written_can_be_had_later(plain: dict[str, bytes], values: Values) -> None:
    AFTER[ROUNDS] = lambda folder: (folder / "model.safetensors").mkdir()
    with refusing("then resume or rerun", by=RunFailed):
        run(values)
    path = Path(str(values["output"])) / "run"
    assert not list(path.glob(".unfinished*"))
    assert len(list((path / "checkpoints").iterdir())) == 2
    (path / "model.safetensors").rmdir()
    assert differences(plain, results(run(values, resume="run"))) == []
