"""A service that is not there, or no longer."""

from __future__ import annotations

import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from fl_bn.exchange.call import ExchangeFailed, Join
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.session import Session
from tests.exchange.over_grpc import (
    DEADLINE,
    HOST,
    JOIN,
    KEYS,
    LARGEST,
    LAYERS,
    PATIENT,
    SOON,
    Round,
    Stream,
    address_of,
    asyncio_says,
    batch_of,
    changed,
    eventually,
    finish,
    local_of,
    play,
    within,
)
from tests.listed import listed

pytestmark = pytest.mark.usefixtures("log")


@pytest.mark.parametrize("policy", ["shrink", "abort"])
@pytest.mark.parametrize("when", ["joining", "exchanging", "training"])
def test_all_fail_when_the_service_stops_and_a_new_one_takes_its_port(when: str, policy: str) -> None:
    service = ExchangeService(HOST, 0, LARGEST).start()
    with within():
        with Round(service, policy=policy) as round, ExitStack() as stack:
            futures = round.play(0, 1)
            if when != "joining":
                stream = stack.enter_context(Stream(service, round.tokens[2]))
                stream.ask(Join(batch_of(2)))
                round.joined(0, 1)  # now with their first values
            if when == "training":
                stream.ask(local_of(2, KEYS[0]))
                stream.send(changed())
                eventually(lambda: round.session.exchanges == 2)
            round.joined(0, 1)
            begin = time.monotonic()
            service.stop()
            for future in futures:
                with pytest.raises(ExchangeFailed):
                    future.result(SOON)
            assert time.monotonic() - begin < 2
        with pytest.raises(ExchangeFailed):
            play(address_of(service), round.tokens[0], 0)  # negative control: nobody is there
        again = ExchangeService(HOST, service.port, LARGEST).start()
        try:
            assert again.port == service.port
            finish(again)
        finally:
            again.stop()


def test_services_that_stop_under_silent_streams_leave_no_task_to_complain(log: pytest.LogCaptureFixture) -> None:
    """Twelve at once, since it is a matter of what is done when the loop closes."""
    services = [ExchangeService(HOST, 0, LARGEST).start() for _ in range(12)]
    with within(), ExitStack() as stack, ThreadPoolExecutor(len(services)) as threads:
        for service in services:
            round = stack.enter_context(Round(service, 4, policy="shrink"))
            streams = [stack.enter_context(Stream(service, token)) for token in round.tokens.values()]
            for stream in streams:
                stream.send(JOIN)
            for stream in streams:
                next(stream.call)
        for done in [threads.submit(service.stop) for service in services]:
            done.result(SOON)
    del service, services, round
    gc.collect()  # forgotten tasks complain when they are
    complaints = asyncio_says(log)
    log.clear()
    assert complaints == []


def test_a_port_in_use_and_an_address_of_another_machine_are_refused_and_named(service: ExchangeService) -> None:
    before = threading.active_count()
    with within(), pytest.raises(OSError, match=address_of(service)):
        ExchangeService(HOST, service.port, LARGEST).start()
    with pytest.raises(OSError, match="203.0.113.7:0"):
        ExchangeService("203.0.113.7", 0, LARGEST).start()
    eventually(lambda: threading.active_count() <= before)
    finish(service)  # it is not disturbed


@listed("kind", ["nobody listens", "a host that nobody knows", "a server that never speaks"])
def test_where_no_service_answers_a_client_fails_in_time_and_names_the_address(kind: str) -> None:
    with socket.socket() as unused, socket.create_server((HOST, 0)) as mute, within():
        unused.bind((HOST, 0))  # but it does not listen
        ports = {"nobody listens": unused.getsockname()[1], "a server that never speaks": mute.getsockname()[1]}
        address = f"{HOST}:{ports[kind]}" if kind in ports else "no-such-host.invalid:1"
        with pytest.raises(ExchangeFailed, match=address):
            GrpcExchange(address, "token", 1, timeout=1)


def test_sessions_come_and_go_while_the_service_looks_at_the_clock(service: ExchangeService) -> None:
    """Another thread may open a session at any moment: the deadlines of all are kept all the same."""

    class Interrupted(Session):
        """Where a thread may be switched to: while the service collects its sessions."""

        interrupted = False

        def __hash__(self) -> int:
            if threading.current_thread() is service._thread and not self.interrupted:
                self.interrupted = True
                other = threading.Thread(target=service.open, args=(Session([0], LAYERS),))
                other.start()
                other.join()
            return id(self)

    session = Interrupted([0], LAYERS, **PATIENT)
    service.open(session)
    eventually(lambda: session.interrupted)
    with within(), Round(service, 2, deadline=DEADLINE, join_deadline=0.5) as round:
        (future,) = round.play(0)
        with pytest.raises(ExchangeFailed, match="client 1"):
            future.result(SOON)
