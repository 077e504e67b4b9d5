from __future__ import annotations

import logging

import pytest

from tests.flower.inside import LOGGER, Clients, Samples


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture the messages of Flower's logger, which do not reach the root logger by default."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    return caplog


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))
