"""Best model and early stop, in every door: a Federation, the application, a Flower app of one's own; and what they say."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fl_bn import Callback, EarlyStop, Federation, KeepBest, SeededBatches, methods
from fl_bn.federation.callbacks import Callbacks, Running
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import InProcessGrid, OwnAppStrategy, answer, run_in_process, training
from fl_bn.run.centralised import run_centralised
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.overrides import parse_overrides
from fl_bn.task import CLASSIFICATION, Regression, Task
from tests.experiment.resuming import small_run, stopped
from tests.in_process import run


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def federation(callbacks: list[Callback], method: str = "fedavg", **options: Any) -> Federation:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    clients = [SeededBatches(x[i::3], torch.arange(8) % 2, batch_size=4) for i in range(3)]
    return Federation(net(), methods.METHODS[method](), clients, test=clients[0], progress=False, callbacks=callbacks, **options)


class Scripted(Callback):
    """Replaces what was evaluated by values that the test names. It stands before the callbacks under test."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        record.evaluation["accuracy"] = self.values[min(record.round, len(self.values)) - 1]


class Models(Callback):
    """Keeps a copy of the model after every round."""

    def on_start(self, running: Running) -> None:
        self.running, self.models = running, dict[int, dict[str, torch.Tensor]]()

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        self.models[record.round] = dict(self.running.arrays())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_best_model_is_kept_and_loads_into_your_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models, path = Models(), tmp_path / "best.safetensors"
    with caplog.at_level(logging.INFO, logger="flwr"):
        list(federation([Scripted(0.5, 0.9, 0.7, math.nan, 0.9), models, KeepBest(path)]).run(5))
    kept = load_file(path)
    assert same(kept, models.models[2])
    assert not same(kept, models.models[5])  # control: the last
    net().load_state_dict(kept)
    assert "best accuracy: 0.9 in round 2" in caplog.text
    with safe_open(path, "pt") as file:
        assert file.metadata()["round"] == "2"


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_where_clients_keep_tensors_their_networks_are_kept_beside_it(method: str, tmp_path: Path) -> None:
    path, own = tmp_path / "best.safetensors", dict[int, dict[str, torch.Tensor]]()
    fed = federation([Scripted(0.5, 0.9, 0.7), KeepBest(path)], method)
    for record in fed.run(3):
        if record.round == 2:
            own = {i: fed.client_model(i).state_dict() for i in range(3)}
    for client, expected in own.items():
        kept = load_file(tmp_path / f"best-client-{client}.safetensors")
        assert same(kept, expected)
        assert not same(kept, fed.client_model(client).state_dict())  # control: those of the last round
        net().load_state_dict(kept)
    assert "1.running_mean" not in load_file(path)


@pytest.mark.parametrize(
    ("values", "patience", "rounds"),
    [
        ((0.1, 0.2, 0.3, 0.4, 0.5), 1, 5),
        ((0.1, 0.5, 0.4, 0.5, 0.9), 2, 4),  # as good is not better
        ((0.1, 0.5, 0.4, 0.6, 0.5), 2, 5),
        ((math.nan, math.nan, 0.9), 2, 2),  # no number is no best
        ((0.5, 0.4), 1, 2),
    ],
)
def test_a_run_ends_where_evaluations_do_not_improve(
    values: tuple[float, ...], patience: int, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        assert len([*federation([Scripted(*values), EarlyStop(patience)]).run(5)]) == rounds
    assert ("the run ends after round" in caplog.text) == (rounds < 5)


def test_by_another_metric_and_where_less_is_better() -> None:
    class Low(Task):
        name, metric, higher_is_better = "low", "error", False

    def told(callback: EarlyStop, metric: str, *values: float, task: Any = CLASSIFICATION) -> str:
        running = Running(task, dict)
        callback.on_start(running)
        for round, value in enumerate(values, 1):
            callback.on_evaluation(RoundRecord(round, "train", 0.1, evaluation={metric: value}), 9)
        return running.reason

    assert "loss did not improve in 1 evaluation; the best was 0.5, in round 1" in told(EarlyStop(1, "loss"), "loss", 0.5, 0.6)
    assert not told(EarlyStop(1, "loss"), "loss", 0.5, 0.4)
    assert told(EarlyStop(1), "error", 0.5, 0.6, task=Low)
    assert not told(EarlyStop(1), "error", 0.5, 0.4, task=Low)
    assert told(EarlyStop(1, "mae", higher_is_better=False), "mae", 0.5, 0.6, task=Regression())
    assert told(EarlyStop(1, least=0.1), "accuracy", 0.5, 0.55)
    assert not told(EarlyStop(1, least=0.01), "accuracy", 0.5, 0.55)
    with pytest.raises(ValueError, match="EarlyStop needs the metric 'auc', .* of round 1 are accuracy: set metric"):
        told(EarlyStop(1, "auc"), "accuracy", 0.5)
    with pytest.raises(ValueError, match="must be >= 1"):
        EarlyStop(0)
    with pytest.raises(ValueError, match="must be finite and >= 0"):
        EarlyStop(1, least=-1)


def test_a_federation_that_was_resumed_counts_the_rounds_before(tmp_path: Path) -> None:
    path, script = tmp_path / "state.safetensors", (0.9, 0.5, 0.6, 0.7, 0.8)
    fed = federation([Scripted(*script), EarlyStop(3)])
    for record in fed.run(5):
        if record.round == 2:
            fed.checkpoint(path)
    assert len(fed.history) == 4
    again = federation([Scripted(*script), EarlyStop(3)])
    again.resume(path)
    assert [record.round for record in again.run(5)] == [3, 4]
    fresh = federation([Scripted(*script[2:]), EarlyStop(3)])
    assert len([*fresh.run(5)]) == 5  # control: without them it goes on


def test_of_a_strategy_the_model_and_the_end(tiny_clients: Callable[..., list[Samples]]) -> None:
    """As in an own Flower app, whose strategies are these."""
    models = Models()
    ran = run(methods.fedavg(), tiny_clients((3, 7, 5)), 1)
    ran.strategy.callbacks = Callbacks([models, EarlyStop(2)])
    ran.strategy.evaluate = lambda model: {"accuracy": 0.5}
    result = ran.strategy.start(ran.grid, num_rounds=9)
    assert [*models.models] == [1, 2, 3]
    ran.strategy.server.source.load_state_dict(models.models[3])  # every tensor, by the names of your network
    travelled = {name: array.numpy() for name, array in result.arrays.items()}
    assert travelled
    assert all((models.models[3][name].numpy() == array).all() for name, array in travelled.items())


def test_of_a_flower_app_of_your_own(tmp_path: Path) -> None:
    """By the metrics of ``evaluate_fn``, whatever their names."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    app, method, path = ClientApp(), methods.fbn(), tmp_path / "best.safetensors"
    answer(app, net, method, lambda context: [(x, torch.arange(24) % 2)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), 0.05)
            nn.functional.cross_entropy(round.model(x), torch.arange(24) % 2).backward()
            optimizer.step()
        return round.message(24)

    def at_server(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"error": [0.9, 0.2, 0.3, 0.4, 0.5, 0.6][round]})

    models = Models()
    callbacks = [models, KeepBest(path, "error", higher_is_better=False), EarlyStop(2, "error", higher_is_better=False)]
    strategy = OwnAppStrategy(net(), method, fraction_evaluate=0, callbacks=callbacks)
    strategy.start(InProcessGrid(app, 3, {}), num_rounds=5, evaluate_fn=at_server)
    assert [*models.models] == [1, 2, 3]
    assert same(load_file(path), models.models[1])
    assert not same(load_file(path), models.models[3])  # control
    net().load_state_dict(load_file(path))


def test_where_nothing_is_evaluated_they_say_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fed = federation([EarlyStop(1), KeepBest(tmp_path / "best.safetensors")])
    silent = Federation(net(), methods.fedavg(), fed.clients, progress=False, callbacks=fed.callbacks)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        list(silent.run(2))
    assert "EarlyStop had no effect, because no round was evaluated" in caplog.text
    assert "KeepBest had no effect" in caplog.text
    assert not (tmp_path / "best.safetensors").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_of_the_application_by_two_keys(method: str, tmp_path: Path) -> None:
    values = small_run(tmp_path, method=method, rounds=30, evaluate_every=1, early_stop=2, keep_best=True, checkpoint_every=0)
    path = run_in_process({**values, "learning-rate": 0.0001})
    assert path is not None
    with (path / "rounds.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert 3 <= len(rows) < 30
    accuracies = [float(row["accuracy"]) for row in rows]
    best = accuracies.index(max(accuracies)) + 1
    assert len(rows) == best + 2
    summary = (path / "summary.md").read_text()
    assert f"**The run ended early** after {len(rows)} of 30 rounds: accuracy did not improve in 2 evaluations" in summary
    assert "the model of the best evaluation is in `best.safetensors`" in summary
    assert "chosen on the test data, so its number is optimistic" in summary
    with safe_open(path / "best.safetensors", "pt") as file:
        assert file.metadata()["round"] == str(best)
        names = set(file.keys())
    assert names == set(load_file(path / "model.safetensors"))
    assert len([*path.glob("clients/client-*.safetensors")]) == (0 if method == "fedavg" else values["clients"])


def test_a_run_of_the_application_that_was_resumed_counts_the_rounds_before(tmp_path: Path) -> None:
    keys = {"rounds": 30, "evaluate_every": 1, "early_stop": 4, "keep_best": True, "learning_rate": 0.0001}
    whole = run_in_process(small_run(tmp_path / "whole", **keys))
    values = small_run(tmp_path / "pieces", **keys)
    stopped(values, at=3)
    path = run_in_process({**values, "resume": "run", "name": ""})
    assert whole is not None
    assert path is not None
    assert (path / "rounds.csv").read_text().count("\n") == (whole / "rounds.csv").read_text().count("\n") < 30
    assert same(load_file(path / "best.safetensors"), load_file(whole / "best.safetensors"))
    assert same(load_file(path / "model.safetensors"), load_file(whole / "model.safetensors"))


def test_centralised_training_and_what_is_refused(tmp_path: Path) -> None:
    values = small_run(tmp_path, rounds=30, evaluate_every=1, early_stop=1, keep_best=True, checkpoint_every=0, method="fedavg")
    directory = run_centralised(RunConfig.from_mapping({**values, "learning-rate": 0.0001}))
    assert len(directory.records) < 30
    assert directory.path is not None
    assert (directory.path / "best.safetensors").exists()
    with pytest.raises(ConfigError, match="keep-best"):
        RunConfig.from_mapping({"keep-best": True, "output": ""})
    with pytest.raises(ConfigError, match="early-stop"):
        RunConfig.from_mapping({"early-stop": -1})


def test_accuracy_before_and_after_local_training_in_the_files(tmp_path: Path) -> None:
    values = small_run(tmp_path, rounds=2, local_evaluation=True, checkpoint_every=0)
    path = run_in_process(values)
    assert path is not None
    with (path / "clients.csv").open() as file:
        rows = [*csv.DictReader(file)]
    trained = [row for row in rows if row["steps"]]
    assert trained
    assert all(0 <= float(row[f"accuracy-{when}"]) <= 1 for row in trained for when in ("before", "after"))
    assert "before training, " in (path / "summary.md").read_text()
    for key in ("update='gradients' local-steps=1", "secure-aggregation=true"):
        with pytest.raises(ConfigError, match="local.evaluation"):
            RunConfig.from_mapping({"local-evaluation": True, **parse_overrides(key)})


class Losing(Callback):
    """Takes the metric away from the evaluations of some rounds, as clients do that do not send it. It stands before the others."""

    def __init__(self, *rounds: int) -> None:
        self.rounds = rounds

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        if record.round in self.rounds:
            del record.evaluation["accuracy"]


def test_an_evaluation_that_lacks_the_metric_is_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one client that did not send it ended the run."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    stop = EarlyStop(patience=2)
    records = list(federation([Scripted(0.5, 0.6, 0.6, 0.6, 0.6, 0.6), Losing(3), stop]).run(6))
    assert "round 3: EarlyStop leaves out this evaluation, which lacks the metric accuracy" in caplog.text
    assert (stop.round, len(records)) == (2, 5)  # rounds 4 and 5 are the two without an improvement
    with pytest.raises(ValueError, match="EarlyStop needs the metric 'accuracy', but the metrics of round 1 are loss"):
        list(federation([Losing(1), EarlyStop(patience=2)]).run(2))
