from __future__ import annotations

import pytest

from tests.flower.inside import Clients, Samples


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))
