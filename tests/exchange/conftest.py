"""Fixtures for tests of the exchange: a controlled clock, checks of threads, and a service without and with TLS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fl_bn.exchange import session as session_module
from tests.exchange.certificates import make_certificates
from tests.exchange.cohorts import Certificates, Clock, ExchangeService
from tests.exchange.over_grpc import HOST, LARGEST


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def service() -> Iterator[ExchangeService]:
    service = ExchangeService(HOST, 0, LARGEST).start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture
def secure(certificates: Certificates) -> Iterator[ExchangeService]:
    service = ExchangeService(HOST, 0, LARGEST, certificates).start()
    yield service
    service.stop()


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())  # one of another test may end meanwhile
    yield
    assert not set(threading.enumerate()) - before
