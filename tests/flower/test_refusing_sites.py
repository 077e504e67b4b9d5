"""Sites whose policy refuses a run, and sites with another key than at the start of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context, Message

from fl_bn.federation.local import Samples
from fl_bn.flower import RunFailed
from fl_bn.methods import METHODS
from tests.in_process import WatchedGrid, client_app, run

Clients = Callable[..., list[Samples]]
FEDAVG = METHODS["fedavg"]()
SITES: dict[str, Any] = {"nodes": (1, 2, 3), "names": ("east", "west", "north")}


class NotAllowed(Exception):
    """As a site's policy raises it."""


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def refusing(clients: list[Samples], *nodes: int) -> WatchedGrid:
    app = client_app(FEDAVG, clients)

    def work(message: Message, context: Context) -> Message:
        if message.metadata.dst_node_id in nodes:
            raise NotAllowed("this site's policy has allow-methods = fedbn, but the run's method is 'fedavg'")
        return app(message, context)

    return WatchedGrid(work, len(clients))  # type: ignore[arg-type]


def test_a_run_goes_on_without_a_site_whose_policy_refuses_it(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(FEDAVG, clients, 2, grid=refusing(clients, 2), policy={**SITES, "min_sites": 2})
    assert [[client.client for client in record.clients] for record in ran.records] == [[0, 2], [0, 2]]
    assert "the run goes on without site west, since the site's policy refuses the run" in log.text
    assert ran.strategy.population is not None
    assert ran.strategy.population.absent[1].startswith("this site's policy has allow-methods = fedbn")


@pytest.mark.parametrize(("least", "nodes", "words"), [
    (0, (2,), "site west refuses the run: this site's policy has allow-methods = fedbn, .* without the site: min-sites=2"),
    (2, (2, 3), r"refuses the run \(the 1 other sites are fewer than min-sites=2\)"),
])  # fmt: skip
def test_too_many_refusals_end_the_run_in_a_sentence(least: int, nodes: tuple[int, ...], words: str, clients: list[Samples]) -> None:
    with pytest.raises(RunFailed, match=words):
        run(FEDAVG, clients, 2, grid=refusing(clients, *nodes), policy={**SITES, "min_sites": least})


def test_a_node_of_no_client_is_let_in_once_it_has_its_site_s_new_key(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """West had node 77 when the run was submitted, and has node 2 now. The control: nobody says so."""
    nodes: dict[str, Any] = {**SITES, "nodes": (1, 77, 3), "wait": 0.0}
    with pytest.raises(RunFailed, match="node 2 cannot take part: it calls itself site west, but its key belongs to no client"):
        run(FEDAVG, clients, 1, policy=nodes)
    ran = run(FEDAVG, clients, 2, policy={**nodes, "registered": lambda: {1: "east", 2: "west", 3: "north"}})
    assert [len(record.accepted) for record in ran.records] == [3, 3]
