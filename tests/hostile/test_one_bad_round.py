"""One round with weights that no client can train on, all others right: the client recovers, since what it keeps stays finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fl_bn import convert, local_round, server_round, server_state
from tests.equivalence.product import parts, train
from tests.equivalence.row import Row
from tests.listed import listed

CLIENTS, VICTIM, HUGE = 3, 2, 1e200  # its squares overflow in float64
KEEPS = {"statistics": ("fedbn", "none"), "mixing logits": ("hbn", "none"), "control variates": ("fedavg", "scaffold")}


def finite(sections: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensors in sections.values() for tensor in tensors.values())


@listed("bad", [1, 2])
@listed("what", KEEPS)
def test_a_client_recovers_from_one_bad_round(what: str, bad: int, log: pytest.LogCaptureFixture) -> None:
    """From a bad first round it keeps nothing. Control: in the bad round its reply is not finite."""
    (name, objective), kept = KEEPS[what], dict[int, Any]()
    row = Row(what, {}, {}, name, objective=(objective, {}), rounds=4)
    method, chosen, *_ = parts(row)
    state = server_state(row.net(), method, row.rounds, clients=CLIENTS, rate=lambda *_: row.rate, objective=chosen)
    for number in range(1, row.rounds + 1):
        replies = []
        for client in range(CLIENTS):
            asked, model, spoils = state.instruction(), convert(row.net(), method), (number, client) == (bad, VICTIM)
            if spoils:
                huge = {key: tensor * HUGE if tensor.is_floating_point() else tensor for key, tensor in asked.sections["weights"].items()}
                asked = replace(asked, sections={**asked.sections, "weights": huge})
            with local_round(model, method, asked, *([kept[client]] if client in kept else []), objective=chosen) as round:
                if method.report.name == "PASS":
                    round.measure(row.clients[client])
                train(row, round, row.steps[client])
            reply, kept[client] = round.reply(row.sizes[client], client=client)
            replies.append(reply)
            assert finite(reply.sections) != spoils
            assert finite(kept[client].sections)
        assert kept[VICTIM].round == (number if number != bad else bad - 1)
        state, record = server_round(state, replies)
        assert [one.client for one in record.accepted] == [client for client in range(CLIENTS) if (number, client) != (bad, VICTIM)]
    assert len([line for line in log.messages if "is not finite after round" in line]) == 1
