"""One reply of finite, but huge numbers does not end a run that has no defence: its sender is left out by name, and the round goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import nn

from fl_bn import convert, local_round, methods, server_round, server_state
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.blocks import sizes
from fl_bn.federation.bounds import WIDEST_WEIGHT, bounds_of, far_numbers, far_statistics
from fl_bn.federation.defence import Defence
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import Reply
from fl_bn.objectives import Scaffold
from tests.costs import slow
from tests.doors.doors import apart
from tests.hostile import own_app
from tests.hostile.liars import LIAR, lied
from tests.hostile.test_own_loop_replies import reply_of
from tests.in_process import identical

OTHERS = [0, 2, 3, 4]
GRADIENTS = LocalTraining(batch_size=64, steps=1, update="gradients")
SETTINGS = {
    "weights": LocalTraining(batch_size=4, steps=2),
    "gradients": GRADIENTS,
    "control": LocalTraining(batch_size=4, steps=2, objective=Scaffold()),
    "momentum": LocalTraining(batch_size=4, steps=2, momentum=0.9, maintain="global"),
    "second-moment": LocalTraining(batch_size=4, steps=2, optimizer="adam", maintain="global"),
}
Spoil = Callable[[Message, str, RecordDict], None]


def huge(section: str, size: float, whole: bool = True) -> Spoil:
    """Every number of ``section``, or the first alone, becomes ``size``; in round 1."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked != "train" or int(message.content.config_records["fl-bn/header"]["round"]) > 1:  # type: ignore[arg-type]
            return
        arrays = {name: array.numpy().copy() for name, array in content.array_records[f"fl-bn/{section}"].items()}
        for array in list(arrays.values())[: None if whole else 1]:
            array.reshape(-1)[: None if whole else 1] = size
        content[f"fl-bn/{section}"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})

    return spoil


def silent(message: Message, asked: str, content: RecordDict) -> None:
    if asked == "train" and int(message.content.config_records["fl-bn/header"]["round"]) == 1:  # type: ignore[arg-type]
        content.clear()


def check(records: list[RoundRecord], section: str) -> None:
    assert all(record.aggregated for record in records)
    assert [[c.client for c in record.accepted] for record in records] == [OTHERS, *[[0, 1, 2, 3, 4]] * (len(records) - 1)]
    assert records[0].clients[LIAR].refused.startswith(section)
    assert ": expected values within +-" in records[0].clients[LIAR].refused


@pytest.mark.parametrize("whole", [True, False], ids=["all numbers", "one number"])
@pytest.mark.parametrize("size", [3e38, slow(-3e38), 1e6])
@pytest.mark.parametrize("name", [slow("gn"), "fedavg", slow("fbn"), "fedbn"])
def test_huge_weights_cost_their_sender_its_reply(name: str, size: float, whole: bool) -> None:
    """Before, the model was of that size, and the others could not train on it."""
    ran = lied(huge("weights", size, whole), name, rounds=3)
    check(ran.records, "weights")
    assert identical(ran.trajectory[3], lied(silent, name, rounds=3).trajectory[3])


@pytest.mark.parametrize("section", [section for section in SETTINGS if section != "weights"])
def test_so_do_huge_numbers_beside_the_weights_or_in_their_place(section: str) -> None:
    settings = SETTINGS[section]
    rules = {"update": settings.update, "auxiliary": auxiliary(settings)}
    check(lied(huge(section, 3e38), "fedavg", rounds=2, settings=settings, policy=rules).records, section)


@pytest.mark.parametrize("section", SETTINGS)
def test_control_what_honest_clients_send_is_within_the_bounds(section: str) -> None:
    settings = SETTINGS[section]
    rules = {"update": settings.update, "auxiliary": auxiliary(settings)}
    ran = lied(lambda *of: None, "fedavg", rounds=3, settings=settings, policy=rules)
    assert [len(record.accepted) for record in ran.records] == [5] * 3


def test_under_a_defence_the_rule_does_it() -> None:
    ran = lied(huge("weights", 1e6), "fedavg", rounds=2, defence=Defence(1, "median", "median"))
    assert [len(record.accepted) for record in ran.records] == [5, 5]
    assert max(float(np.abs(array).max()) for array in ran.trajectory[2].values()) < 100


@pytest.mark.parametrize("node", [1, 3])
def test_in_an_app_of_one_s_own_too(node: int) -> None:
    """The first client's reply is added up before the others' have come."""
    ran = own_app.lied(node, huge("weights", 3e38))
    assert all(record.aggregated for record in ran.records)
    assert ran.records[0].clients[node - 1].refused.startswith("weights/0.weight: expected values within +-")
    assert max(float(tensor.abs().max()) for tensor in ran.trajectory[-1].values()) < 100


@pytest.mark.parametrize("size", [3e38, 1e6])
def test_in_server_round_too(size: float) -> None:
    method = methods.fedavg()
    state = server_state(own_app.net(), method, rounds=2, clients=5)
    replies = [reply_of(state, client, method) for client in range(5)]
    spoilt = {name: torch.full_like(tensor, size) for name, tensor in replies[LIAR].sections["weights"].items()}
    lie = replace(replies[LIAR], sections=replies[LIAR].sections | {"weights": spoilt})
    after, record = server_round(state, [*replies[:LIAR], lie, *replies[LIAR + 1 :]])
    assert [c.client for c in record.accepted] == OTHERS
    assert record.clients[LIAR].refused.startswith("weights/0.weight: expected values within +-")
    want, _ = server_round(state, [reply for reply in replies if reply.client != LIAR])
    assert apart([after.shared.tensors()], [want.shared.tensors()]) == 0


def test_the_bound_follows_the_model_that_was_sent() -> None:
    """A model may have large weights, and buffers that are infinite."""
    sent = {"weights": {"w": torch.tensor([-5.0, 2.0]), "seen": torch.tensor([float("inf"), 3.0]), "count": torch.tensor([10**9])}}
    assert bounds_of(sent, 0.1)["weights"] == 5 * WIDEST_WEIGHT
    assert bounds_of({"weights": {"w": torch.ones(1), "seen": torch.full((1,), 1e9)}}, 0.1, ["seen"])["weights"] == WIDEST_WEIGHT
    assert bounds_of({"weights": {"w": torch.tensor([1e-3])}}, 0.1)["weights"] == WIDEST_WEIGHT
    assert bounds_of(sent, 0.0)["gradients"] == float("inf")
    assert bounds_of({}, 0.5)["gradients"] == 2 * WIDEST_WEIGHT


class Counting(nn.Module):
    """It counts what it has seen, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1e6
        found: torch.Tensor = self.head(self.norm(x))
        return found


def test_a_network_s_own_buffers_may_hold_large_numbers() -> None:
    method = methods.fedavg()
    state = server_state(Counting(), method, rounds=2, clients=3)
    replies = []
    for client in range(3):
        model = convert(Counting(), method)
        with local_round(model, method, state.instruction()) as round:
            model(torch.randn(8, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        replies.append(round.reply(8, 1.0, client=client)[0])
    after, record = server_round(state, replies)
    assert [c.refused for c in record.clients] == [""] * 3
    assert float(after.model.seen) == 1e6  # type: ignore[arg-type]


def test_control_variates_are_compared_with_the_others_whatever_the_rate() -> None:
    """The clients of a loop of one's own may step at another rate than the server says, and their loss may be large."""
    parts = [Reply(client, {"control": {"w": torch.tensor([1e6 * (client + 1)])}}, 4, 4) for client in range(3)]
    assert far_numbers(parts, ["control"]) == {}
    lie = Reply(3, {"control": {"w": torch.tensor([1e10])}}, 4, 4)
    assert list(far_numbers([*parts, lie], ["control"])) == [3]
    assert far_numbers([parts[0], lie], ["control"]) == {}  # of two, nobody knows


def means(size: float, round: int) -> Spoil:
    """All running means become ``size``."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == "train" and int(message.content.config_records["fl-bn/header"]["round"]) == round:  # type: ignore[arg-type]
            arrays = {name: array.numpy() for name, array in content.array_records["fl-bn/statistics"].items()}
            far = {name: np.full_like(array, size) if name.endswith("mean") else array for name, array in arrays.items()}
            content["fl-bn/statistics"] = ArrayRecord({name: Array(array) for name, array in far.items()})

    return spoil


@pytest.mark.parametrize("size", [-4e18, -1e6])
def test_one_mean_does_not_end_a_run_whose_layers_freeze_then(size: float) -> None:
    """FixBN freezes after round 3 of 6. Before, no client could train any more from then on."""
    ran = lied(means(size, 3), "fixbn", rounds=6)
    assert [[c.client for c in record.accepted] == OTHERS for record in ran.records] == [number == 3 for number in range(1, 7)]
    assert all(record.aggregated for record in ran.records)
    assert "expected means within +-" in ran.records[2].clients[LIAR].refused


@pytest.mark.parametrize("node", [1, 3])
def test_nor_in_an_app_of_one_s_own(node: int) -> None:
    ran = own_app.lied(node, means(-1e6, 1), "fixbn")
    assert all(record.aggregated for record in ran.records)
    assert "expected means within +-" in ran.records[0].clients[node - 1].refused


def test_clients_whose_inputs_are_all_large_are_believed() -> None:
    """The first round of data that nobody has scaled: the layers were sent 0 and 1."""
    sent = sizes({"norm.running_mean": torch.zeros(2), "norm.running_var": torch.ones(2)})

    def part(client: int, mean: float) -> Reply:
        statistics = {"norm.running_mean": torch.tensor([mean, 0.0]), "norm.running_var": torch.ones(2)}
        return Reply(client, {"statistics": statistics}, 4, 4)

    assert far_statistics([part(client, 1e6 * (client + 1)) for client in range(3)], sent) == {}
    assert list(far_statistics([part(0, 1.0), part(1, 2.0), part(2, 1e6)], sent)) == [2]
    assert far_statistics([part(0, 1.0), part(2, 1e6)], sent) == {}  # of two, nobody knows


@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_who_is_left_out_after_an_exchange_was_part_of_its_step(policy: str) -> None:
    """So the round counts only where the step may do without it."""
    rules = {"exchange": ExchangeSettings("local", policy)}
    ran = lied(means(-1e6, 1), "fedtan", rounds=2, policy=rules)
    assert [record.aggregated for record in ran.records] == [policy == "shrink", True]
    assert ran.records[0].clients[LIAR].refused
