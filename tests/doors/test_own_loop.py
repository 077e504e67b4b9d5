"""Door 2: replies and the server's state in a loop of one's own; tests/loops has what the loop itself may do."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fl_bn import convert, local_round, methods, server_round, server_state
from tests.doors.doors import apart, train, wide
from tests.federation import random_samples
from tests.methods.centralised import rough_network
from tests.refusals import naming

CLIENTS = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((8, 9, 7))])
FBN = methods.fbn()


def server(**options: Any) -> Any:
    return server_state(rough_network("plain"), FBN, **{"rounds": 3, "clients": 3, **options})


def reply_of(state: Any, client: int, **given: Any) -> Any:
    """Return the reply of a client that trained on all its samples."""
    with local_round(convert(rough_network("plain"), FBN), FBN, state.instruction()) as round:
        loss = train(round, [(CLIENTS[client].x, CLIENTS[client].y)])
    return round.reply(len(CLIENTS[client]), loss, client=client, **given)[0]


def test_a_round_is_a_pure_function_and_one_of_too_few_replies_changes_nothing() -> None:
    state = server()
    replies = [reply_of(state, client) for client in range(3)]
    before, wrong = copy.deepcopy(state.shared.tensors()), torch.zeros(3, dtype=torch.float64)
    replies[1].sections["weights"]["9.bias"] = wrong
    (after, record), (again, _) = server_round(state, replies), server_round(state, replies)
    assert "weights/9.bias" in record.clients[1].refused
    assert apart([state.shared.tensors()], [before]) == apart([again.shared.tensors()], [after.shared.tensors()]) == 0
    assert apart([after.shared.tensors()], [before]) > 1e-6
    replies[0].sections["weights"]["9.bias"] = wrong
    after, record = server_round(state, replies)
    assert (record.aggregated, apart([after.shared.tensors()], [before])) == (False, 0)


def test_the_run_ends_after_its_last_round() -> None:
    """After it a falling rate would be negative, and FBN's statistics would move away from the data."""
    state = server(rounds=2, rate=lambda round, rounds: 0.1 * (1 - (round - 1) / rounds))
    for _ in range(2):
        state, record = server_round(state, [reply_of(state, client) for client in range(3)])
    assert record.learning_rate == pytest.approx(0.05)
    assert state.instruction().learning_rate == record.learning_rate  # of the model at the end, for client_model
    with naming("2 rounds"):
        server_round(state, [])


def test_clients_need_numbers_and_stray_objects_cost_nothing_else() -> None:
    """None of those that share a number counts: nobody can tell whose it is."""
    state = server()
    first, second, third = (reply_of(state, client) for client in range(3))
    _, record = server_round(state, [first, second, third, first])
    assert [client.client for client in record.accepted] == [1, 2]
    assert "2 replies" in record.clients[0].refused
    _, record = server_round(state, [first, second, third, replace(first, round=7)])  # control: one of the two is none
    assert [client.client for client in record.accepted] == [0, 1, 2]
    stray: Any = (second, "kept")
    _, record = server_round(state, [first, stray, None, third])  # type: ignore[list-item]
    assert [client.client for client in record.accepted] == [0, 2]


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
