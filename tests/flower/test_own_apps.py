"""Clients of Flower apps of one's own, as others write them: options, objectives, loaders, loops and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fl_bn import Federation, methods
from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, OwnAppStrategy, RunFailed
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Objective, Scaffold
from tests.flower import own_apps as apps
from tests.flower.own_apps import CLIENTS, SAMPLES, begin, data, epoch, equal, grid, net, own_app, ran, refused, with_objective
from tests.in_process import WatchedGrid
from tests.listed import listed


@listed(
    ("strategy", "app"),
    [
        (FBN(net(), momentum=0.1), own_app(methods.fbn())),
        (HBN(net(), lam=0.5), own_app(methods.hbn())),
        (OwnAppStrategy(net(), methods.gn(groups=2)), own_app(methods.gn(groups=3))),
        (FBN(net()), own_app("fbn", model=lambda: net().double())),
        (FBN(net()), own_app("fbn", model=apps.banked)),
    ],
)
def test_an_option_or_a_network_that_differs_at_the_clients_is_refused(strategy: Any, app: Any) -> None:
    refused(lambda: ran(strategy, app), RunFailed, "client 0", "option")


@listed(("server", "client"), [(FedSAM(), PLAIN), (Scaffold(), PLAIN), (FedProx(mu=1.0), FedProx(mu=0.5)), (PLAIN, Scaffold())])
def test_another_objective_at_the_clients_is_refused_by_name(server: Objective, client: Objective) -> None:
    strategy = FedAvgBN(net(), objective=server)
    word = "control variates" if server is PLAIN else type(server).__name__
    refused(lambda: ran(strategy, own_app("fedavg", loop=with_objective, objective=client)), RunFailed, word)


def test_a_strategy_of_flower_s_own_is_named_at_the_clients(log: pytest.LogCaptureFixture) -> None:
    FedAvg(fraction_evaluate=0.0).start(grid("fedbn"), begin(), num_rounds=1)
    assert "use a strategy of fl_bn.flower in server_app.py" in log.text


def test_hbn_tracks_more_slowly_where_a_part_of_the_clients_trains(log: pytest.LogCaptureFixture) -> None:
    """Without its fraction, a warning says so, in each interface."""
    app, part = own_app("hbn"), {"fraction_train": 0.67, "fraction_evaluate": 0}
    told = ran(OwnAppStrategy(net(), methods.hbn(fraction=0.67), **part), app, rounds=2)
    assert equal(ran(HBN(net(), **part), app, rounds=2), told)
    assert "fraction=0.67" not in log.text
    assert not equal(ran(OwnAppStrategy(net(), methods.hbn(), **part), app, rounds=2), told)
    Federation(net(), methods.hbn(), [data(i) for i in range(CLIENTS)], fraction=0.67)
    assert log.text.count("fraction=0.67") == 2


@listed(("told", "metrics", "loss"), [(None, {}, float("nan")), (None, {"loss": 0.75}, 0.75), (0.5, {}, 0.5)])
def test_the_training_loss_is_the_one_that_is_told(told: float | None, metrics: Any, loss: float, log: pytest.LogCaptureFixture) -> None:
    app = own_app("fedavg", says=lambda *_: told, metrics=lambda loss, client: {**metrics, "acc": np.float32(0.5)})
    result = ran(FedAvgBN(net(), fraction_evaluate=0), app)
    assert result.records[0].aggregated
    np.testing.assert_equal(result.records[0].loss, loss)
    assert result.train_metrics_clientapp[1]["acc"] == 0.5
    assert ("diverged" in log.text) == np.isnan(loss)


@listed("method", ["fbn", "hbn"])
def test_a_reply_inside_the_block_is_that_after_it(method: str) -> None:
    """A pass after it does not count."""

    def early(round: Any, batches: Any, rate: float) -> float:
        loss = epoch(round, batches, rate)
        round.message(SAMPLES, loss)
        round.model(batches[0][0] + 1)
        return loss

    one, other = (ran(OwnAppStrategy(net(), METHODS[method]()), own_app(method, loop=loop), rounds=2) for loop in (epoch, early))
    assert equal(one, other)


def test_a_client_s_samples_are_counted_as_its_loader_draws_them() -> None:
    """Four crops of each sample, as MONAI's collate functions make them. A client without data in a round is left out."""

    def four(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x.repeat(4, 1), y.repeat(4)

    def loader(client: int) -> Any:
        return DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*data(client), strict=True))), 8, collate_fn=four)

    app = own_app("hbn", batches=loader, samples=lambda client: 4 * SAMPLES * (client != 1))
    (record,) = ran(HBN(net(), fraction_evaluate=0), app).records
    assert [client.client for client in record.accepted] == [0, 2]


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


def test_the_user_s_config_comes_through_untouched() -> None:
    seen: list[dict[str, Any]] = []
    mine = {"learning-rate": 0.05, "run": "mine", "version": "v2", "save": "here", "counted": 3, "exchange": "x"}
    app = own_app("fedbn", before=lambda message, context: seen.append(dict(message.content["mine"])))
    strategy = FedBN(net(), configrecord_key="mine")
    ran(strategy, app, rounds=2, train_config=ConfigRecord(dict(mine)), evaluate_config=ConfigRecord({"run": "eval"}))
    trained, evaluated = [s for s in seen if "learning-rate" in s], [s for s in seen if "learning-rate" not in s]
    assert trained == [{**mine, "server-round": round} for round in (1, 2) for _ in range(CLIENTS)]
    assert evaluated == [{"run": "eval", "server-round": round} for round in (1, 2) for _ in range(CLIENTS)]


@listed(("fraction", "least", "number"), [(0.5, 1, 2), (0.5, 3, 3), (0.1, 0, 0), (0.34, 0, 1), (1.0, 9, 3), (0.0, 2, 0)])
def test_any_share_of_the_clients_evaluates(fraction: float, least: int, number: int) -> None:
    over = WatchedGrid(own_app("fedavg"), CLIENTS)
    result = FedAvgBN(net(), fraction_evaluate=fraction, min_evaluate_nodes=least).start(over, num_rounds=4)
    asked = [(m.metadata.group_id, m.metadata.dst_node_id) for m in over.sent if m.metadata.message_type == "evaluate"]
    by_round = [frozenset(node for round, node in asked if round == str(n)) for n in range(1, 5)]
    assert [len(nodes) for nodes in by_round] == [number] * 4
    assert set(result.evaluate_metrics_clientapp) == (set(range(1, 5)) if number else set())
    assert number != 2 or len(set(by_round)) > 1  # not the same ones in every round
