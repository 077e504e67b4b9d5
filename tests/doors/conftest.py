from __future__ import annotations

import logging

import pytest

from fl_bn.flower.compat import LOGGER


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture the messages of Flower's logger, which do not reach the root logger by default."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    return caplog
