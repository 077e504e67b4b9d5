"""Stop runs, continue them, and compare what a run's seed determines, bit by bit."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from fl_bn import Callback
from fl_bn.app.config import RunConfig
from fl_bn.app.former import renewed
from fl_bn.app.run_directory import LOCK, RunDirectory, environment
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import run_in_process
from tests.experiment.small_data import small_config
from tests.integration.runs import bits, table

Values = dict[str, str | int | float | bool]
ROUNDS, THE_SAME = 5, environment()


AFTER: dict[int, Callable[[Path], object]] = {}
"""What happens to the run's folder when a round has been written down, if the run has the callback ``DISK``."""
DISK = f"{__name__}:Disk"


class Disk(Callback):
    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        if record.round in AFTER:
            AFTER.pop(record.round)(self.folder)


class Stopped(BaseException):
    """Stop a run; nothing catches this exception."""


def network(classes: int, channels: int, image_size: int) -> nn.Module:
    """Build two convolutions with BatchNorm and, between them, dropout, which uses the random generator."""
    first = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
    second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Flatten())
    return nn.Sequential(first, second, nn.Linear(4 * image_size**2, classes))


def small_run(folder: Path, **overrides: str | int | float | bool) -> Values:
    """Return a config that runs in a fraction of a second; ``overrides`` are keys with ``_`` for ``-``."""
    folder.mkdir(exist_ok=True)
    values: Values = {
        **small_config(folder),
        "model": "tests.experiment.resuming:network",
        "clients": 3,
        "rounds": ROUNDS,
        "local-steps": 2,
        "partition": "iid",
        "evaluate-every": 2,
        "checkpoint-every": 1,
        "pictures": False,
        "learning-rate-schedule": "exponential",
        "learning-rate-decay": 0.8,
        "output": str(folder),
        "name": "run",
    }
    return renewed(values | {name.replace("_", "-"): value for name, value in overrides.items()})


def stopped(values: Values, at: int, dies: bool = False) -> Path:
    """Run until round ``at``, before its checkpoint, and stop by an error, or by SIGKILL; return the run directory."""
    on_round = RunDirectory.on_round

    def stop(self: RunDirectory, entry: RoundRecord, rounds: int) -> None:
        on_round(self, entry, rounds)
        if entry.round == at:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "on_round", stop)
        if dies:
            ends_with(signal.SIGKILL, partial(run, values))
        else:
            with pytest.raises(Stopped):
                run(values)
    return Path(str(values["output"])) / str(values["name"])


def run(values: Values, **overrides: str | int | float | bool) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_bn.app.run_directory.environment", lambda: THE_SAME)  # takes as long as a round
        path = run_in_process(values | {name.replace("_", "-"): value for name, value in overrides.items()})
    assert path is not None
    return path


def ends_with(signal_number: int, play: Callable[[], object]) -> None:
    """Call ``play`` in a process of its own, and check that the signal ``signal_number`` ends it."""
    child = os.fork()
    if child == 0:
        try:
            play()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # it should have been killed
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the process ended by itself, with status {status}"
    assert os.WTERMSIG(status) == signal_number


def in_pieces(values: Values, stops: Sequence[int]) -> Path:
    """Run, stop at each round in ``stops``, and continue each time; return the run directory of the finished run.

    The stops are alternately those of a killed process and of an orderly end.
    """
    for number, at in enumerate(stops):
        stopped(values if number == 0 else values | {"resume": values["name"]}, at, dies=number % 2 == 0)
    return run(values, resume="latest")


def results(path: Path) -> dict[str, bytes]:
    """Return everything that a seed determines, as bytes: saved tensors, rounds, clients, and the names of the files."""
    found = bits(path)
    for name in ("rounds.csv", "clients.csv"):
        for row in table(path / name):
            found[f"{name} {row['round']} {row.get('client')}"] = repr(
                {k: v for k, v in row.items() if k not in ("seconds", "waited")}
            ).encode()
        found[f"{name} in all"] = str(len(table(path / name))).encode()
    left = (path / "disclosure.csv").read_text().splitlines()
    found["disclosure.csv"] = "\n".join(line for line in left if ",introduction," not in line).encode()  # share-label-counts may differ
    found["files"] = repr(sorted(file.name for file in path.iterdir() if file.name != LOCK)).encode()
    return found
