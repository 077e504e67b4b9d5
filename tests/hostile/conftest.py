from __future__ import annotations

import logging

import pytest
from flwr.common.logger import FLOWER_LOGGER


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Flower's logger says, which it keeps from the root logger otherwise."""
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=FLOWER_LOGGER.name)
    return caplog
