"""Clients of Flower apps of one's own, as others write them: options, objectives, loaders, loops and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, default_collate

from fl_bn import Federation, flower, methods
from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FixBN, InProcessGrid, OwnAppStrategy, RunFailed
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Objective, Scaffold
from tests.flower import own_apps as apps
from tests.flower.own_apps import CLIENTS, SAMPLES, data, epoch, equal, net, own_app, ran, refused, tensors, with_objective
from tests.in_process import WatchedGrid
from tests.listed import listed

"""The beginning of the names of fl-bn's records."""


# Options of the method, and objectives


@listed(
    ("strategy", "method"),
    [
        (FBN(net(), momentum=0.1), methods.fbn()),
        (HBN(net(), lam=0.5), methods.hbn()),
        (FixBN(net(), freeze_after=1, freeze_what="affine"), methods.fixbn(freeze_after=1)),
        (flower.FedTAN(net(), schedule="paper"), methods.fedtan()),
        (OwnAppStrategy(net(), methods.gn(groups=2)), methods.gn(groups=3)),
    ],
)
def test_an_option_that_differs_at_the_clients_is_refused(strategy: Any, method: Method) -> None:
    refused(lambda: ran(strategy, own_app(method)), RunFailed, "client 0", "option")


OBJECTIVES: list[Objective] = [FedProx(mu=1.0), FedSAM(), Scaffold()]


@listed(("server", "client"), [*((one, PLAIN) for one in OBJECTIVES), (FedProx(mu=1.0), FedProx(mu=0.5)), (PLAIN, Scaffold())])
def test_another_objective_at_the_clients_is_refused_by_name(server: Objective, client: Objective) -> None:
    strategy = FedAvgBN(net(), objective=server)
    word = "control variates" if server is PLAIN else type(server).__name__
    refused(lambda: ran(strategy, own_app("fedavg", loop=with_objective, objective=client)), RunFailed, word)


def test_hbn_tracks_more_slowly_where_a_part_of_the_clients_trains(log: pytest.LogCaptureFixture) -> None:
    """Without its fraction, a warning says so, in each interface."""
    app, part = own_app("hbn"), {"fraction_train": 0.67, "fraction_evaluate": 0}
    told = ran(OwnAppStrategy(net(), methods.hbn(fraction=0.67), **part), app, rounds=2)
    assert equal(ran(HBN(net(), **part), app, rounds=2), told)
    assert "fraction=0.67" not in log.text
    assert not equal(ran(OwnAppStrategy(net(), methods.hbn(), **part), app, rounds=2), told)
    Federation(net(), methods.hbn(), [data(i) for i in range(CLIENTS)], fraction=0.67)
    assert log.text.count("fraction=0.67") == 2


# Numbers


def test_numpy_s_numbers_and_texts_are_rates() -> None:
    """Before, a text was no rate for fl-bn, so that FixBN's frozen rounds were not lowered."""
    app = own_app(methods.fixbn(freeze_after=1), rate=apps.lr)
    strategies = [FixBN(net(), freeze_after=1, fraction_evaluate=0) for _ in range(3)]
    rates = [ConfigRecord({"lr": kind(0.1)}) for kind in (float, np.float64, str)]
    results = [ran(one, app, rounds=3, train_config=config) for one, config in zip(strategies, rates, strict=True)]
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert [record.learning_rate < 0.1 for record in results[2].records] == [False, True, True]


@listed(("told", "metrics", "loss"), [(None, {}, float("nan")), (None, {"loss": 0.75}, 0.75), (0.5, {}, 0.5)])
def test_the_training_loss_is_the_one_that_is_told(told: float | None, metrics: Any, loss: float, log: pytest.LogCaptureFixture) -> None:
    app = own_app("fedavg", says=lambda *_: told, metrics=lambda loss, client: {**metrics, "acc": np.float32(0.5)})
    result = ran(FedAvgBN(net(), fraction_evaluate=0), app)
    assert result.records[0].aggregated
    np.testing.assert_equal(result.records[0].loss, loss)
    assert result.train_metrics_clientapp[1]["acc"] == 0.5
    assert ("diverged" in log.text) == np.isnan(loss)


def test_a_client_without_data_in_a_round_is_left_out() -> None:
    (record,) = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", samples=lambda client: SAMPLES * (client != 1))).records
    assert [client.client for client in record.accepted] == [0, 2]
    assert record.clients[1].refused.startswith("metrics/samples: 0")


# Loops and networks


def accumulating(inside: bool) -> Any:
    """Step at every second batch; the last, odd batch makes no step. ``inside``: a reply is made within the block, too."""

    def loop(round: Any, batches: Any, rate: float) -> float:
        parts = [part for batch in batches for part in zip(*(one.split(3) for one in batch), strict=True)][:5]
        optimizer = torch.optim.SGD(round.model.parameters(), lr=rate)
        for number, (x, y) in enumerate(parts):
            F.cross_entropy(round.model(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        if inside:
            round.message(SAMPLES, 1.0)
        return 1.0

    return loop


@listed("method", [methods.fedavg(), methods.fbn(report="all"), methods.hbn(separate=False, evaluate_clients="cohort"), methods.fbn()])
def test_a_reply_inside_the_block_is_that_after_it(method: Method) -> None:
    """Before, passes after the last step counted, so that FBN's statistics were other ones."""
    strategies = [OwnAppStrategy(net(), method, unit_scale=False, fraction_evaluate=0) for _ in range(2)]
    assert equal(*(ran(one, own_app(method, loop=accumulating(one is strategies[0])), rounds=2) for one in strategies))


def test_a_round_that_ends_in_an_error_stores_nothing() -> None:
    """Before, a state with another shape was stored, so that every later round failed, too."""

    def loop(round: Any, batches: Any, rate: float) -> float:
        if torch.equal(batches[0][0], data(1)[0][0]) and round.number == 1:
            round.model[2].bank = torch.zeros(3, 6)
        return epoch(round, batches, rate)

    app = own_app("fedbn", model=apps.banked, loop=loop)
    result = ran(OwnAppStrategy(apps.banked(), methods.fedbn(), fraction_evaluate=0), app, rounds=3)
    refused = [[bool(client.refused) for client in record.clients] for record in result.records]
    assert refused == [[False, True, False], [False] * 3, [False] * 3]


# Handlers that cannot work


def samples_of(client: int) -> TensorDataset:
    return TensorDataset(*(torch.cat(parts) for parts in zip(*data(client), strict=True)))


@listed(
    ("app", "word"),
    [
        pytest.param(lambda: own_app("fedavg", batches=samples_of), "TensorDataset", id="a dataset in the place of a loader"),
        pytest.param(lambda: own_app("fedavg", batches=lambda i: [(data(i)[0][0][:1], data(i)[0][1][:1])]), "1 value", id="a batch of 1"),
    ],
)
def test_the_server_is_told_what_a_handler_does_wrong(app: Any, word: str) -> None:
    refused(lambda: ran(FedAvgBN(net()), app()), RunFailed, word)


# Loaders


def several(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Four crops of each sample, as MONAI's RandCropByPosNegLabeld and its collate function make them."""
    x, y = default_collate(rows)
    return x.repeat(4, 1), y.repeat(4)


def any_form(round: Any, batches: Any, rate: float) -> float:
    """Train on batches whose labels are last, maybe in a tuple or a dict."""
    pairs = [(x, y if isinstance(y, Tensor) else [*y.values()][0] if isinstance(y, dict) else y[0]) for x, *_, y in batches]
    return epoch(round, pairs, rate)


LOADERS: dict[str, tuple[int, Any]] = {
    "a sampler that draws each sample twice": (
        2,
        lambda client: DataLoader(samples_of(client), 8, sampler=WeightedRandomSampler(torch.ones(SAMPLES), 2 * SAMPLES)),
    ),
    "four crops of each sample": (4, lambda client: DataLoader(samples_of(client), 8, collate_fn=several)),
    "targets in a tuple": (1, lambda client: [(x, (y, y)) for x, y in data(client)]),
    "targets in a dict": (1, lambda client: [(x, {"a": y, "b": y}) for x, y in data(client)]),
}


@listed(("loader", "method"), [*((name, "hbn") for name in LOADERS), ("four crops of each sample", "fbn")])
def test_a_client_s_samples_are_counted_as_its_loader_draws_them(loader: str, method: str) -> None:
    """Before, the dataset's length or the number of targets counted: replies were refused, or statistics stayed at 0 and 1."""
    times, batches = LOADERS[loader]
    app = own_app(method, batches=batches, loop=any_form, samples=lambda client: times * SAMPLES)
    result = ran(OwnAppStrategy(net(), METHODS[method](), fraction_evaluate=0), app, rounds=2)
    assert [[client.refused for client in record.clients] for record in result.records] == [[""] * CLIENTS] * 2
    assert tensors(result)["1.running_mean"].abs().max() > 0.01


# Keys and records


def test_the_user_s_config_comes_through_untouched() -> None:
    seen: list[dict[str, Any]] = []
    mine = {"learning-rate": 0.05, "run": "mine", "version": "v2", "save": "here", "counted": 3, "exchange": "x"}
    app = own_app("fedbn", before=lambda message, context: seen.append(dict(message.content["mine"])))
    strategy = FedBN(net(), configrecord_key="mine")
    ran(strategy, app, rounds=2, train_config=ConfigRecord(dict(mine)), evaluate_config=ConfigRecord({"run": "eval"}))
    trained, evaluated = [s for s in seen if "learning-rate" in s], [s for s in seen if "learning-rate" not in s]
    assert trained == [{**mine, "server-round": round} for round in (1, 2) for _ in range(CLIENTS)]
    assert evaluated == [{"run": "eval", "server-round": round} for round in (1, 2) for _ in range(CLIENTS)]


def test_a_client_s_run_config_is_its_own() -> None:
    seen: list[float] = []

    def before(message: Message, context: Context) -> None:
        context.run_config["lr"] = float(context.run_config["lr"]) * 0.5
        seen.append(float(context.run_config["lr"]))

    grid = InProcessGrid(own_app("fedavg", before=before), CLIENTS, {"lr": 1.0})
    FedAvgBN(net(), fraction_evaluate=0).start(grid, num_rounds=2)
    assert seen == [0.5] * CLIENTS + [0.25] * CLIENTS


@listed(("fraction", "least", "number"), [(0.5, 1, 2), (0.5, 3, 3), (0.1, 0, 0), (0.34, 0, 1), (1.0, 9, 3), (0.0, 2, 0)])
def test_any_share_of_the_clients_evaluates(fraction: float, least: int, number: int) -> None:
    grid = WatchedGrid(own_app("fedavg"), CLIENTS)
    result = FedAvgBN(net(), fraction_evaluate=fraction, min_evaluate_nodes=least).start(grid, num_rounds=4)
    asked = [(m.metadata.group_id, m.metadata.dst_node_id) for m in grid.sent if m.metadata.message_type == "evaluate"]
    by_round = [frozenset(node for round, node in asked if round == str(n)) for n in range(1, 5)]
    assert [len(nodes) for nodes in by_round] == [number] * 4
    assert set(result.evaluate_metrics_clientapp) == (set(range(1, 5)) if number else set())
    assert number != 2 or len(set(by_round)) > 1  # not the same ones in every round
