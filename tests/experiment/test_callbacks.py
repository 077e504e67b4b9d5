"""Callbacks: when each is called; the best model and the early end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_bn import Callback, EarlyStop, Federation, KeepBest, SeededBatches
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.methods import METHODS, Role
from tests.experiment.inside import RoundRecord, RunConfig, config, refusing, run_centralised
from tests.experiment.resuming import run as run_of_keys
from tests.experiment.resuming import small_run, stopped
from tests.integration.runs import table
from tests.kept import Kept
from tests.listed import listed

MADE: list[Told] = []
Tensors = dict[str, Tensor]


class Told(Kept):
    """As the run config ``callbacks`` makes them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__()
        self.config, self.folder, self.lines = config, folder, list[int]()
        MADE.append(self)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        super().on_round(record, rounds)
        self.lines.append(len((self.folder / "rounds.jsonl").read_text().splitlines()))

    def on_end(self, error: BaseException | None) -> None:
        super().on_end(error)
        assert (self.folder / "model.safetensors").exists()  # to be sent to a tracker


class Scripted(Callback):
    """Replaces what was evaluated by values that the test names; None: no value. It stands before the callbacks under test."""

    def __init__(self, *values: float | None, metric: str = "accuracy") -> None:
        self.values, self.metric = values, metric

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        value = self.values[min(record.round, len(self.values)) - 1]
        record.evaluation.pop(self.metric, None)
        if value is not None:
            record.evaluation[self.metric] = value


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def federation(callbacks: list[Callback], method: str = "fedavg", **options: Any) -> Federation:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    clients = [SeededBatches(x[i::3], torch.arange(8) % 2, batch_size=4) for i in range(3)]
    return Federation(net(), METHODS[method](), clients, callbacks=callbacks, test=clients[0], **options)


def test_of_a_federation_that_ends_and_of_one_that_is_left_early() -> None:
    kept, left = Kept(), Kept()
    list(federation([kept], evaluate_every=2).run(3))
    assert kept.calls == ["round 1/3", "evaluation 2/3", "round 2/3", "evaluation 3/3", "round 3/3", "end"]
    next(iter(federation([left]).run(3)))
    assert left.calls[-1] == "end"
    assert kept.ends == left.ends == [None]


def test_of_a_run_config(tmp_path: Path) -> None:
    MADE.clear()
    values = small_run(tmp_path, callbacks=f"{__name__}:Told", pictures=True, checkpoint_every=0)
    path = run_in_process(values)
    with pytest.raises(RunFailed) as failed:
        run_in_process({**values, "name": "failed", "learning-rate": 1e30, "max-failed-rounds": 1})
    told, left = MADE
    assert path == told.folder == tmp_path / "run"
    assert told.config.callbacks == values["callbacks"]
    assert [call for call in told.calls if "round" not in call] == ["evaluation 2/5", "evaluation 4/5", "evaluation 5/5", "end"]
    assert told.lines == [1, 2, 3, 4, 5]  # each round was on the disk when it was over
    assert (told.ends, left.ends) == ([None], [failed.value])


@listed(
    ("name", "about"),
    [
        ("tests.networks:SmallCNN", "fl_bn.Callback"),
        (f"{__name__}:nobody", "'nobody'"),
        (f"{__name__}:Told,os:system", "os"),  # the first is not made either
    ],
)
def test_a_name_that_is_no_callback_is_refused_before_there_is_a_folder(name: str, about: str, tmp_path: Path) -> None:
    MADE.clear()
    with refusing(about):
        run_in_process(small_run(tmp_path, callbacks=name))
    assert not (tmp_path / "run").exists()
    assert not MADE


# The best model, and the early end


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_the_best_model_is_kept_and_where_clients_keep_tensors_their_networks_beside_it(method: str, tmp_path: Path) -> None:
    path, states = tmp_path / "best.safetensors", dict[int, list[Tensors]]()
    fed = federation([Scripted(0.5, 0.9, 0.7, math.nan, 0.9), KeepBest(path)], method)
    for record in fed.run(5):
        states[record.round] = [{name: tensor.clone() for name, tensor in fed.client_model(i).state_dict().items()} for i in range(3)]
    kept, personal = load_file(path), METHODS[method]().keeps(Role.STATISTIC)
    for client in range(3):
        whole = load_file(tmp_path / f"best-client-{client}.safetensors") if personal else kept
        assert same(whole, states[2][client])
        assert not same(whole, states[5][client])  # control: the last
    assert ("1.running_mean" in kept) != personal
    with safe_open(path, "pt") as file:
        assert file.metadata()["round"] == "2"


@listed(
    ("callback", "metric", "values", "rounds"),
    [
        (EarlyStop(2), "accuracy", (0.1, 0.5, 0.4, 0.5, 0.9), 4),  # as good is not better
        (EarlyStop(2), "accuracy", (0.1, 0.5, 0.4, 0.6, 0.5), 6),
        (EarlyStop(2), "accuracy", (math.nan, math.nan, 0.9), 2),  # no number is no best
        (EarlyStop(2), "accuracy", (0.5, 0.6, None, 0.6, 0.6), 5),  # an evaluation that lacks the metric is left out
        (EarlyStop(1, least=0.1), "accuracy", (0.5, 0.55), 2),
        (EarlyStop(1, "loss"), "loss", (0.5, 0.4, 0.6), 3),  # less is better
        (EarlyStop(1, "mae", higher_is_better=False), "mae", (0.5, 0.4, 0.6), 3),
    ],
)
def test_a_run_ends_where_evaluations_do_not_improve(
    callback: EarlyStop, metric: str, values: tuple[float | None, ...], rounds: int
) -> None:
    assert len(list(federation([Scripted(*values, metric=metric), callback]).run(9))) == rounds


def test_what_early_stop_cannot_watch_is_refused() -> None:
    for callback, named in ((EarlyStop(1, "auc"), "'auc'"), (EarlyStop(1), "'accuracy'")):
        with refusing(named, by=ValueError):
            list(federation([Scripted(None, 0.5), callback]).run(2))
    with refusing("patience", by=ValueError):
        EarlyStop(0)


ENDING = {"rounds": 30, "evaluate_every": 1, "keep_best": True, "learning_rate": 0.0001}


def test_of_the_application_by_two_keys_also_when_it_is_resumed(tmp_path: Path) -> None:
    """The rounds before the stop count."""
    values = small_run(tmp_path, method="fedbn", early_stop=4, **ENDING)
    path = run_of_keys(values)
    accuracies = [float(row["accuracy"]) for row in table(path / "rounds.csv")]
    best = accuracies.index(max(accuracies)) + 1
    assert len(accuracies) == best + 4 < 30
    summary = (path / "summary.md").read_text()
    assert f"**The run ended early** after {len(accuracies)} of 30 rounds" in summary
    assert "chosen on the test data, so its number is optimistic" in summary
    with safe_open(path / "best.safetensors", "pt") as file:
        assert file.metadata()["round"] == str(best)
        assert set(file.keys()) == set(load_file(path / "model.safetensors"))
    stopped(values | {"name": "pieces"}, at=3)
    again = run_of_keys({**values, "resume": "pieces", "name": ""})
    assert len(table(again / "rounds.csv")) == len(accuracies)
    for file in ("best.safetensors", "model.safetensors"):
        assert same(load_file(again / file), load_file(path / file))


def test_of_centralised_training(tmp_path: Path) -> None:
    directory = run_centralised(config(small_run(tmp_path, early_stop=1, checkpoint_every=0, method="fedavg", **ENDING)))
    assert len(directory.records) < 30
    assert (tmp_path / "run" / "best.safetensors").exists()
