"""A node of an app of one's own that says another client's number takes nobody's place: clients are nodes there."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Message, RecordDict

from fl_bn.flower.population import seated
from tests.hostile import own_app
from tests.hostile.liars import nothing, sets
from tests.listed import listed


def claims(number: int) -> own_app.Spoil:
    return sets("query.hello", "hello", client=number)


@pytest.mark.parametrize("name", ["fbn", "fedtan"])
@pytest.mark.parametrize(("liar", "victim"), [(2, 4), (5, 1)])
def test_one_that_says_another_s_number_costs_nobody_its_part(name: str, liar: int, victim: int, log: pytest.LogCaptureFixture) -> None:
    """Before, both were left out."""
    ran = own_app.lied(liar, claims(victim - 1), name)
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 1, 2, 3, 4]] * 2
    assert any(f"node {max(liar, victim)} " in line and f"client {victim - 1}" in line for line in log.messages)
    for found, honest in zip(ran.trajectory, own_app.lied(1, nothing, name).trajectory, strict=True):
        assert all(torch.allclose(found[key], tensor, atol=1e-6) for key, tensor in honest.items())  # the same clients, in another order


def test_a_node_too_many_costs_at_most_the_client_whose_number_it_says(log: pytest.LogCaptureFixture) -> None:
    """There are as many numbers as clients, so nobody can tell which of the two is the client."""

    def four(message: Message, asked: str, content: RecordDict) -> None:
        said = int(content.config_records["fl-bn/hello"]["client"]) if asked == "query.hello" else 0  # type: ignore[arg-type]
        sets("query.hello", "hello", clients=4, client=min(said, 3))(message, asked, content)

    ran = own_app.lied(range(1, 6), four)  # of five nodes, two say 3
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 1, 2]] * 2
    assert any("nodes 4 and 5" in line and "client 3" in line for line in log.messages)


@listed(
    "said, clients, given",
    [
        ({11: 0, 12: 1, 13: 2}, 3, {}),
        ({11: 0, 12: 0, 13: 2}, 3, {12: 1}),
        ({13: 0, 12: 0, 11: 0}, 3, {12: 1, 13: 2}),
        ({11: 0, 12: 0}, 5, {12: 1}),
        ({11: 0, 12: 0, 13: 1, 14: 1}, 4, {12: 2, 14: 3}),
        ({11: 0, 12: 0, 13: 1, 14: 2}, 3, {}),  # more nodes than numbers
    ],
    ids=str,
)
def test_numbers_that_nobody_says_are_given(said: dict[int, int], clients: int, given: dict[int, int]) -> None:
    assert seated(said, clients) == given
