"""Door 2: what a loop of one's own may do inside ``local_round``, and what is refused, with the reason."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import convert, local_round, methods, server_round, server_state
from fl_bn.methods import Method
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Objective, Scaffold
from tests.doors.doors import ALL, DOORS, apart, through, wide
from tests.doors.naming import naming
from tests.federation import random_samples
from tests.listed import listed
from tests.methods.centralised import rough_network

CLIENTS = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((8, 9, 7))])
FBN = methods.fbn()


def started(method: Method = FBN, objective: Objective | None = None) -> tuple[nn.Module, Any]:
    net = rough_network("plain")
    options = {} if objective is None else {"objective": objective}
    return convert(net, method), server_state(net, method, rounds=3, clients=3, **options).instruction()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accumulated(round: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, size: int, steps: int) -> None:
    """Each of ``steps`` steps on all of x, in micro-batches."""
    for _ in range(steps):
        optimizer.zero_grad()
        for part, label in zip(x.split(size), y.split(size), strict=True):
            (F.cross_entropy(round.model(part), label) * len(part) / len(x)).backward()
        optimizer.step()


def test_gradient_accumulation_counts_optimiser_steps_and_reports_all_of_the_first() -> None:
    """FBN reports the moments of what the shared weights have seen: all micro-batches before the first step, and none after it."""
    model, asked = started()
    x, y = CLIENTS[0].x, CLIENTS[0].y
    with local_round(model, FBN, asked) as round:
        accumulated(round, sgd(model), x, y, 2, steps=3)
    assert (round.steps, round.first_samples) == (3, 8)
    reply, _ = round.reply(8)
    assert reply.steps == 3
    with torch.no_grad():
        seen = convert(rough_network("plain"), FBN)[0](x).transpose(0, 1).flatten(1)
    mean, var = seen.mean(1), seen.var(1, correction=0)
    first = {name.removeprefix("1."): t for name, t in reply.sections["moments"].items() if name.startswith("1.")}
    assert int(first["count"]) == 8 * 64
    assert float((first["mean"] - mean).abs().max()) < 1e-12
    assert float((first["var"] - var).abs().max()) < 1e-12
    with torch.no_grad():  # control: the last micro-batch alone
        last = convert(rough_network("plain"), FBN)[0](x[-2:]).transpose(0, 1).flatten(1)
    assert not float((first["mean"] - last.mean(1)).abs().max()) < 1e-3


@listed("objective", [FedProx(0.1), FedSAM(0.05), Scaffold()])
def test_an_objective_corrects_whole_steps_by_its_own_backward(objective: Objective) -> None:
    """Its term would be missing, or be added once per micro-batch."""
    (model, asked), (x, y) = started(objective=objective), (CLIENTS[0].x, CLIENTS[0].y)
    with naming("round.backward"), local_round(model, FBN, asked, objective=objective):
        optimizer = sgd(model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    (again, asked) = started(objective=objective)
    with naming("2 round.backward in 1 steps"), local_round(again, FBN, asked, objective=objective) as round:
        optimizer = sgd(again)
        for _ in range(2):
            round.backward(lambda: F.cross_entropy(again(x), y) / 2, x)
        optimizer.step()


@pytest.mark.sample("[scaffold-", "[fedsam-own")
@pytest.mark.parametrize("door", ["own loop", "flower"])
@pytest.mark.parametrize("objective", [FedProx(0.5), Scaffold(), FedSAM(0.05)], ids=lambda objective: objective.name)
def test_objectives_equal_the_application_s_bit_for_bit(objective: Objective, door: str) -> None:
    found = through(DOORS[door], rough_network("plain"), methods.fixbn(), CLIENTS, 3, objective=objective)
    want = through(ALL["application"], rough_network("plain"), methods.fixbn(), CLIENTS, 3, objective=objective)
    assert apart(found, want) == 0
    assert apart(found, through(ALL["application"], rough_network("plain"), methods.fixbn(), CLIENTS, 3)) > 1e-6  # control


def test_scaffold_takes_the_rate_of_the_optimiser_that_stepped() -> None:
    """Not the one that the server believes: a client's control variate is its mean gradient."""
    method = methods.fbn(momentum=0.1)  # its gradients are not centred
    model, asked = started(method, objective=Scaffold())
    x, y = CLIENTS[0].x, CLIENTS[0].y
    before = copy.deepcopy(model)
    with local_round(model, method, asked, objective=Scaffold()) as round:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
        round.backward(lambda: F.cross_entropy(model(x), y), x)
        optimizer.step()
    reply, _ = round.reply(8)
    F.cross_entropy(before.train()(x), y).backward()
    want = {name: p.grad for name, p in before.named_parameters()}
    assert asked.learning_rate != 0.003
    assert apart([reply.sections["control"]], [want]) < 1e-12


def test_scaffold_takes_plain_sgd_alone() -> None:
    model, asked = started(objective=Scaffold())
    x, y = CLIENTS[0].x, CLIENTS[0].y
    with naming("SGD"), local_round(model, FBN, asked, objective=Scaffold()) as round:
        optimizer = torch.optim.AdamW(model.parameters())
        round.backward(lambda: F.cross_entropy(model(x), y), x)
        optimizer.step()


def test_hbn_without_its_pass_is_refused() -> None:
    model, asked = started(methods.hbn())
    with local_round(model, methods.hbn(), asked) as round:
        accumulated(round, sgd(model), CLIENTS[0].x, CLIENTS[0].y, 8, 1)
    with naming("round.measure"):
        round.reply(8)
    with naming("measure before"):
        round.measure([(CLIENTS[0].x, CLIENTS[0].y)])


def replies_of(state: Any) -> list[Any]:
    replies = []
    for i, client in enumerate(CLIENTS):
        model = convert(rough_network("plain"), FBN)
        with local_round(model, FBN, state.instruction()) as round:
            accumulated(round, sgd(model), client.x, client.y, 16, 1)
        replies.append(round.reply(len(client), client=i)[0])
    return replies


def test_a_refused_reply_is_named_and_the_state_before_is_untouched() -> None:
    """A round of too few changes nothing."""
    state = server_state(rough_network("plain"), FBN, rounds=3, clients=3)
    replies = replies_of(state)
    replies[1].sections["weights"]["9.bias"] = torch.full((4,), float("nan"), dtype=torch.float64)
    before, first = copy.deepcopy(state.shared.tensors()), state.round
    after, record = server_round(state, replies)
    (refused,) = [client for client in record.clients if client.refused]
    assert refused.client == 1
    assert "weights/9.bias" in refused.refused
    assert apart([state.shared.tensors()], [before]) == 0
    assert (state.round, after.round) == (first, first + 1)
    assert apart([after.shared.tensors()], [before]) > 1e-6
    again, _ = server_round(state, replies)  # a pure function
    assert apart([again.shared.tensors()], [after.shared.tensors()]) == 0
    replies[0].sections["weights"]["9.bias"] = torch.zeros(3, dtype=torch.float64)
    after, record = server_round(state, replies)
    assert not record.aggregated
    assert apart([after.shared.tensors()], [state.shared.tensors()]) == 0


def one_round(state: Any) -> tuple[Any, Any]:
    model, asked = convert(rough_network("plain"), FBN), state.instruction()
    with local_round(model, FBN, asked) as round:
        F.cross_entropy(round.model(CLIENTS[0].x), CLIENTS[0].y).backward()
        torch.optim.SGD(model.parameters(), lr=asked.learning_rate).step()
    return server_round(state, [round.reply(8)[0]])


def test_the_run_ends_after_its_last_round() -> None:
    """After it a falling rate would be negative, and FBN's statistics would move away from the data."""
    asked = list[int]()

    def falling(round: int, rounds: int) -> float:
        asked.append(round)
        return 0.1 * (1 - (round - 1) / rounds)

    state = server_state(rough_network("plain"), FBN, rounds=2, rate=falling)
    for _ in range(2):
        state, record = one_round(state)
        assert record.aggregated
    assert record.learning_rate == pytest.approx(0.05)
    assert state.instruction().learning_rate == record.learning_rate  # of the model at the end, for client_model
    assert max(asked) == 2
    with naming("2 rounds"):
        server_round(state, [])
    state = server_state(rough_network("plain"), FBN, rounds=3, rate=lambda round, rounds: 0.1 if round != 2 else float("nan"))
    with naming("round 2 of 3"):
        one_round(state)[0].instruction()


def test_clients_need_numbers() -> None:
    """None of those that share a number counts: nobody can tell whose it is."""
    state = server_state(rough_network("plain"), FBN, rounds=1, clients=3)
    first, second, third = replies_of(state)
    _, record = server_round(state, [first, second, third, first])
    assert [client.client for client in record.accepted] == [1, 2]
    assert "2 replies" in record.clients[0].refused
    _, record = server_round(state, [first, second, third, replace(first, round=7)])  # control: one of the two is none
    assert [client.client for client in record.accepted] == [0, 1, 2]


@listed("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_that_converts_the_network_is_refused_at_the_client(dtype: torch.dtype) -> None:
    def trained(to: torch.dtype) -> None:
        model, asked = started()
        with local_round(model, FBN, asked) as round:
            round.model.to(to)
            F.cross_entropy(round.model(CLIENTS[0].x.to(to)), CLIENTS[0].y).backward()
            sgd(round.model).step()

    with naming("weight changed from (torch.float64"):
        trained(dtype)
    trained(torch.float64)  # control


def test_mixed_precision_and_a_scaler_leave_float32() -> None:
    net = rough_network("plain", dtype=torch.float32)
    state, model = server_state(net, FBN, rounds=1), convert(net, FBN)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    x, y = CLIENTS[0].x.float(), CLIENTS[0].y
    with local_round(model, FBN, state.instruction()) as round:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    reply, _ = round.reply(8)
    assert reply.steps == 3
    assert {t.dtype for section in reply.sections.values() for t in section.values()} <= {torch.float32, torch.float64, torch.int64}
    assert server_round(state, [reply])[1].aggregated


def clone(model: nn.Module) -> None:
    model._apply(torch.clone)


def there_and_back(model: nn.Module) -> None:
    model.double().float()


def moved_round(method: Method, move: Any, objective: Objective = PLAIN) -> tuple[Any, Any]:
    """A round of four steps in float32, before the first and the third of which the loop moves the model."""
    net = rough_network("plain", dtype=torch.float32)
    model, x, y = convert(net, method), CLIENTS[0].x.float(), CLIENTS[0].y
    asked = server_state(net, method, rounds=3, clients=3, objective=objective).instruction()
    with local_round(model, method, asked, objective=objective) as round:
        optimizer = sgd(model)
        for step in range(4):
            if step % 2 == 0:
                move(model)
            optimizer.zero_grad()
            round.backward(lambda: F.cross_entropy(model(x), y), x)
            optimizer.step()
    return round.reply(8, client=0)


@listed("objective", [PLAIN, FedSAM(0.05)], ids=lambda objective: objective.name)
@listed("move", [there_and_back, clone])
@listed("method", [methods.fixbn(), methods.fedbn(), FBN], ids=lambda method: method.name)
def test_a_model_that_moves_inside_the_block_replies_the_same(method: Method, move: Any, objective: Objective) -> None:
    """``model.to(device)`` puts new tensors in the place of buffers."""
    (found, kept), (want, keeps) = moved_round(method, move, objective), moved_round(method, lambda model: None, objective)
    assert found.sections.keys() == want.sections.keys()
    assert kept.sections.keys() == keeps.sections.keys()
    ours, theirs = ([*reply.sections.values(), *home.sections.values()] for reply, home in ((found, kept), (want, keeps)))
    assert apart(ours, theirs) == 0
    assert found.steps == want.steps == 4
    before = convert(rough_network("plain", dtype=torch.float32), method).state_dict()
    moved = [not torch.equal(t, before[name]) for of in theirs for name, t in of.items() if "running" in name]
    assert all(moved)  # control: statistics move
    assert bool(moved) == (method is not FBN)


def one_reply(client: int, **given: Any) -> Any:
    model, asked = started()
    with local_round(model, FBN, asked) as round:
        accumulated(round, sgd(model), CLIENTS[client].x, CLIENTS[client].y, 8, steps=1)
    return round.reply(len(CLIENTS[client].x), 1.0, client=client, **given)[0]


def test_metrics_that_a_client_gives_are_in_the_record() -> None:
    """Before, they were sent and dropped without a word."""
    net = rough_network("plain")
    state = server_state(net, FBN, rounds=3, clients=3)
    replies = [one_reply(0, metrics={"acc": torch.tensor(0.5), "f1": 1}), one_reply(1, metrics={"acc": 0.75}), one_reply(2)]
    _, record = server_round(state, replies)
    assert record.aggregated
    assert record.client_metrics == {0: {"acc": 0.5, "f1": 1.0}, 1: {"acc": 0.75}}
    assert record.own_metrics == {"acc": pytest.approx((8 * 0.5 + 9 * 0.75) / 17), "f1": 1.0}
    assert server_round(state, [one_reply(client) for client in range(3)])[1].client_metrics == {}  # control


def test_stray_objects_among_replies_cost_nothing_else() -> None:
    state = server_state(rough_network("plain"), FBN, rounds=3, clients=3)
    stray: Any = (one_reply(1), "kept")
    _, record = server_round(state, [one_reply(0), stray, None, one_reply(2, metrics={"acc": 1.0})])  # type: ignore[list-item]
    assert [client.client for client in record.accepted] == [0, 2]
    assert record.own_metrics == {"acc": 1.0}
