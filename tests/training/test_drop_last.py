"""A last batch that is smaller than the others, left out of each pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from tests.in_process import WatchedGrid, client_app, run
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_with_less_than_a_batch_sits_out_where_smaller_batches_are_left_out(engine: str, tiny_clients: Clients) -> None:
    clients, method, model = tiny_clients((3, 8, 9)), METHODS["fedavg"](), seeded_network("plain")
    for drop_last, steps in ((True, [2, 2]), (False, [1, 2, 2])):  # control: by default it trains on what it has
        settings = LocalTraining(batch_size=4, epochs=1, drop_last=drop_last)
        grid = WatchedGrid(client_app(method, clients, settings, model=model), 3, engine=engine)
        ran = run(method, clients, 1, grid=grid, settings=settings, model=model)
        assert [client.steps for client in ran.records[0].clients if not client.refused] == steps
        assert [client.client for client in ran.records[0].clients if client.refused] == [0] * drop_last
