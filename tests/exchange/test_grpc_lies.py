"""A member over gRPC that asks once too often, or sends what nobody can train with: the others go on without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_bn.exchange.call import Join, Key, Local, Quantity
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.grpc.wire import encode_request
from tests.exchange.over_grpc import KEYS, LAYERS, SOON, Round, Stream, batch_of, check, expected, local_of, same, within

pytestmark = pytest.mark.usefixtures("log")


@pytest.mark.parametrize("extra", [KEYS[0], Key("1", Quantity.MOMENTS, 2), KEYS[-1]])
@pytest.mark.parametrize("clients", [3, 5, 8])
def test_one_request_after_the_last_layer_costs_its_sender_alone(service: ExchangeService, clients: int, extra: Key) -> None:
    with within(), Round(service, clients, "shrink") as round, Stream(service, round.tokens[0]) as liar:
        playing = round.play(*range(1, clients))
        liar.ask(Join(batch_of(0)))
        for key in KEYS:
            liar.ask(local_of(0, key))
        liar.send(encode_request(local_of(0, extra)))
        check([future.result(SOON) for future in playing], round.clients)
        liar.outcome()
        assert "most clients have finished the round" in round.session.dropped.pop(0)
        assert round.session.dropped == {}
        assert list(round.session.taking_part) == list(range(1, clients))


def refusal_of(service: ExchangeService, clients: int, lie: Local) -> str:
    """Return why client 0, which sends ``lie`` in its turn, is dropped; the others must go on with their own numbers alone."""
    key = lie.key
    with within(), Round(service, clients, "shrink") as round, Stream(service, round.tokens[0]) as liar:
        playing = round.play(*range(1, clients))
        liar.ask(Join(batch_of(0)))
        for before in KEYS[: KEYS.index(key)]:
            liar.ask(local_of(0, before))
        liar.send(encode_request(lie))
        answers = [future.result(SOON) for future in playing]
    for own in answers:
        for place, known in enumerate(KEYS):
            members = range(clients) if place < KEYS.index(key) else range(1, clients)
            assert same(own[place], expected(members, known))
    assert list(round.session.dropped) == [0]
    return round.session.dropped[0]


@pytest.mark.parametrize("value", [1e12, 1e20, 3e38])
@pytest.mark.parametrize("clients", [3, 5])
def test_gradients_that_no_step_bears_cost_their_sender_alone(service: ExchangeService, clients: int, value: float) -> None:
    key = next(key for key in KEYS if key.quantity is Quantity.GRADIENTS)
    layer = LAYERS[key.layer]
    lie = replace(local_of(0, key), values=torch.full((key.quantity.width(layer.channels),), value, dtype=layer.dtype))
    assert "expected gradients of at most" in refusal_of(service, clients, lie)


@pytest.mark.parametrize("quantity", [Quantity.MOMENTS, Quantity.GRADIENTS])
@pytest.mark.parametrize("clients", [3, 5])
def test_a_count_that_no_batch_has_costs_its_sender_alone(service: ExchangeService, clients: int, quantity: Quantity) -> None:
    key = next(key for key in KEYS if key.quantity is quantity)
    why = refusal_of(service, clients, replace(local_of(0, key), count=2**53))
    assert "activations per sample (64 times the median client's)" in why
