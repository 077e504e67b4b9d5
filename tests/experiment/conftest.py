"""Let pytest see what runs log."""

from __future__ import annotations

import logging

import pytest

from fl_bn.flower.compat import LOGGER


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger="flwr")
