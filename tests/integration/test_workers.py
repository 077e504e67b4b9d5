"""Clients in worker processes: the same bits as one after the other, and what becomes of a worker that dies."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fl_bn.federation.engines.workers import WorkerDied, Workers
from fl_bn.support.wire import WireError
from tests.integration import tasks
from tests.integration.runs import tiny


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fedbn", {"setup": "experiments.papers:Papers", "maintain-momentum": "local", "momentum": 0.9}),
        ("hbn", {}),
        ("fbn", {"fraction": 0.5}),
        ("fedtan", {}),
        ("fedavg", {"secure-aggregation": True}),
    ],
)
def test_workers_give_the_bits_of_one_after_the_other(method: str, keys: dict[str, object], tmp_path: Path) -> None:
    one, two = (load_file(tiny(tmp_path / str(n), method, workers=n, **keys) / "model.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    for name, array in one.items():
        assert np.array_equal(array, two[name]), name


def test_results_errors_and_logs_come_in_order(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(2)
    with caplog.at_level(logging.WARNING, "flwr"):
        done = list(workers.run(tasks.double, [(x,) for x in range(5)]))
    workers.close()
    assert [d.value for d in done] == [0, 2, 4, None, 8]
    assert str(done[3].error) == "not three"
    assert [r.getMessage() for r in caplog.records if "doubling" in r.getMessage()] == [f"doubling {x}" for x in range(5)]


def test_an_error_that_cannot_be_unpickled_comes_by_name_and_ends_no_process(tmp_path: Path) -> None:
    workers = Workers(2)
    done = list(workers.run(tasks.stumble, [(x, str(tmp_path)) for x in range(4)]))
    workers.close()
    assert [d.value for d in done] == [0, None, None, 3]
    odd, wire = done[1].error, done[2].error
    assert (type(odd), str(odd)) == (RuntimeError, "Odd: 7: no such file")
    assert isinstance(wire, WireError)  # control: it can
    assert str(wire) == str(WireError("weights", "0.bias" * 50, "is missing"))
    assert (wire.section, wire.problem) == ("weights", "is missing")
    for error, line in ((odd, 'raise Odd(7, "no such file")'), (wire, 'raise WireError("weights"')):
        assert line in error.__notes__[0]  # type: ignore[union-attr]
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == list("0123")  # each task ran once


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_own_task_alone(tmp_path: Path) -> None:
    workers = Workers(2)
    done = list(workers.run(tasks.perish, [(x, str(tmp_path / str(x))) for x in range(4)]))
    again = list(workers.run(tasks.double, [(1,)]))
    workers.close()
    assert [d.value for d in done] == [0, None, 2, 3]
    assert isinstance(done[1].error, WorkerDied)
    assert again[0].value == 2


STARTED = """
import os, time
from fl_bn.federation.engines.workers import Workers
workers = Workers(2)
print(*{done.value for done in workers.run(os.getpid, [()] * 8)}, flush=True)
time.sleep(60)
"""


@pytest.mark.sample("[SIGTERM]")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_workers_end_soon_after_a_process_that_is_killed(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert workers
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)
        parent.send_signal(end)
        parent.wait()
        for _ in range(100):
            if not any(Path(f"/proc/{pid}").exists() for pid in workers):
                return
            time.sleep(0.1)
    raise AssertionError(f"{workers} still run 10 s after their parent")
