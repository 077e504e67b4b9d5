"""Callbacks: when each is called, from every door, and what TensorBoard has after every round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fl_bn import Callback, Federation, SeededBatches, methods
from fl_bn.federation.callbacks import Callbacks
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.run.config import ConfigError, RunConfig
from tests.experiment.resuming import small_run
from tests.in_process import WatchedGrid, client_app, run
from tests.kept import Kept

MADE: list[Told] = []


class Told(Kept):
    """As the run config ``callbacks`` makes them."""

    def __init__(self, config: RunConfig, folder: Path | None) -> None:
        super().__init__()
        self.config, self.folder, self.files = config, folder, list[set[str]]()
        MADE.append(self)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        super().on_round(record, rounds)
        if self.folder is not None:
            self.files.append(set(scalars(self.folder / "tensorboard").get("loss", {})))

    def on_end(self, error: BaseException | None) -> None:
        super().on_end(error)
        assert self.folder is None or (self.folder / "model.safetensors").exists()  # to be sent to a tracker


def none(config: RunConfig, folder: Path | None) -> str:
    return "no callback"


class NoCallback:
    """Has a callback's methods, but does not derive from one."""

    def __init__(self, config: RunConfig, folder: Path | None) -> None:
        raise AssertionError("it was made")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def federation(callbacks: list[Callback], **options: object) -> Federation:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    clients = [SeededBatches(x[i::3], torch.arange(8) % 2, batch_size=4) for i in range(3)]
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return Federation(net, methods.fixbn(), clients, test=clients[0], progress=False, callbacks=callbacks, **options)  # type: ignore[arg-type]


def test_of_a_federation() -> None:
    kept = Kept()
    list(federation([kept], evaluate_every=2).run(3))
    assert kept.calls == ["round 1/3", "evaluation 2/3", "round 2/3", "evaluation 3/3", "round 3/3", "end"]
    assert kept.ends == [None]


def test_a_federation_that_is_left_early_ends_without_an_error() -> None:
    kept = Kept()
    for _ in federation([kept]).run(3):
        break
    assert kept.calls[-1] == "end"
    assert kept.ends == [None]


def test_of_a_strategy(tiny_clients: Callable[..., list[Samples]]) -> None:
    kept = Kept()
    ran = run(methods.fedavg(), tiny_clients((3, 7, 5)), 2, policy={"evaluate_every": 2})
    ran.strategy.callbacks = Callbacks([kept])
    ran.strategy.evaluate = lambda model: {"accuracy": 0.5}
    ran.strategy.start(ran.grid, num_rounds=2)
    assert kept.calls == ["round 1/2", "evaluation 2/2", "round 2/2", "end"]


def test_a_run_that_fails_says_so(tiny_clients: Callable[..., list[Samples]]) -> None:
    def break_down(client: int, what: str) -> None:
        raise RuntimeError("no")

    clients, kept = tiny_clients((3, 7, 5)), Kept()
    ran = run(methods.fedavg(), clients, 1)
    ran.strategy.callbacks = Callbacks([kept])
    grid = WatchedGrid(client_app(methods.fedavg(), clients, disturb=break_down), 3)
    with pytest.raises(RunFailed):
        ran.strategy.start(grid, num_rounds=9)
    assert kept.calls == ["round 1/9", "round 2/9", "round 3/9", "end"]
    assert isinstance(kept.ends[0], RunFailed)


def test_everyone_is_told_of_the_end_also_where_another_fails() -> None:
    class Fails(Callback):
        def on_end(self, error: BaseException | None) -> None:
            raise OSError("the tracker is gone")

    before, after = Kept(), Kept()
    with pytest.raises(OSError, match="the tracker is gone"):
        list(federation([before, Fails(), after]).run(1))
    assert before.calls[-1] == after.calls[-1] == "end"


def test_of_a_run_config_with_tensorboard_written_every_round(tmp_path: Path) -> None:
    MADE.clear()
    values = small_run(tmp_path, callbacks=f"{__name__}:Told", pictures=True, checkpoint_every=0)
    path = run_in_process(values)
    (told,) = MADE
    assert path == told.folder == tmp_path / "run"
    assert told.config.callbacks == values["callbacks"]
    assert told.calls == [
        "round 1/5", "evaluation 2/5", "round 2/5", "round 3/5", "evaluation 4/5", "round 4/5", "evaluation 5/5", "round 5/5", "end"
    ]  # fmt: skip
    assert told.files == [set(range(1, n + 1)) for n in range(1, 6)]  # each round was on the disk when it was over
    found = scalars(path / "tensorboard")
    assert set(found["accuracy"]) == {2, 4, 5}
    assert found["loss"][3] == pytest.approx(told.records[2].loss, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:NoCallback", "must derive from fl_bn.Callback, but derives from object"),
        (f"{__name__}:nobody", "expected a function 'nobody' in"),
        ("no_such_module:Tracker", "there is no module 'no_such_module'"),
        ("os:system", "os is Python's own"),
        (f"{__name__}:Told,os:system", "os is Python's own"),  # the first is not made either
    ],
)
def test_a_name_that_is_no_callback_is_refused_before_there_is_a_folder(name: str, message: str, tmp_path: Path) -> None:
    MADE.clear()
    with pytest.raises(ConfigError, match=message):
        run_in_process(small_run(tmp_path, callbacks=name))
    assert not (tmp_path / "run").exists()
    assert not MADE


def test_a_function_that_makes_no_callback_is_refused_before_a_round(tmp_path: Path) -> None:
    """A function is called with the run's folder, so the folder is there: the control of the test above."""
    with pytest.raises(ConfigError, match="must make a fl_bn.Callback, but made a str"):
        run_in_process(small_run(tmp_path, callbacks=f"{__name__}:none"))
    assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run" / "model.safetensors").exists()
