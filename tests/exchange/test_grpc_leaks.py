"""Many rounds of one service, in which clients die: threads, file descriptors, tasks and tickets stay what they were."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from fl_bn.exchange import Session
from tests.exchange.cohorts import ExchangeService, GrpcExchange
from tests.exchange.over_grpc import KEYS, LAYERS, PATIENT, address_of, batch_of, expected, local_of, same

DESCRIPTORS = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc/self/fd")


class Usage(NamedTuple):
    """What a leak would add to."""

    threads: int
    descriptors: int
    tasks: int
    tickets: int


def usage(service: ExchangeService) -> Usage:
    gc.collect()
    tasks, tickets = len(asyncio.all_tasks(service._loop)), len(service._members)
    return Usage(threading.active_count(), len(os.listdir(DESCRIPTORS)), tasks, tickets)


def at_rest(service: ExchangeService) -> Usage:
    """Return the usage once it no longer falls: channels and streams are closed behind one's back."""
    end, last = time.monotonic() + 20, usage(service)
    while True:
        time.sleep(0.5)
        now = usage(service)
        if all(have >= had for have, had in zip(now, last, strict=True)) or time.monotonic() > end:
            return now
        last = now


def play_or_die(address: str, token: str, client: int, dies: bool) -> None:
    """Make two exchanges; or one, and then the connection is closed without a word, as that of a killed process is."""
    exchange = GrpcExchange(address, token, batch_of(client))
    own = local_of(client, KEYS[0])
    assert same(exchange(own.key, own.values, own.count), expected((0, 1), KEYS[0]))
    if dies:
        exchange._channel.close()
    else:
        own = local_of(client, KEYS[1])
        exchange(own.key, own.values, own.count)
    exchange.close("it died" if dies else "")


def play_rounds(service: ExchangeService, rounds: int, pool: ThreadPoolExecutor) -> None:
    for number in range(rounds):
        session = Session((0, 1), LAYERS, policy="shrink", **PATIENT)
        tokens = service.open(session)
        dead = {number // 10 % 2} if number % 10 == 9 else set()
        for client in [pool.submit(play_or_die, address_of(service), tokens[i], i, i in dead) for i in (0, 1)]:
            client.result(20)
        assert set(session.dropped) == dead
        service.close(session)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.slow
def test_two_hundred_rounds_leave_nothing_behind(service: ExchangeService) -> None:
    """Control: sessions that are not closed, of clients that do not leave, add to everything."""
    with ThreadPoolExecutor(2) as pool:
        play_rounds(service, 20, pool)
        before = at_rest(service)
        play_rounds(service, 200, pool)
        after = at_rest(service)
    assert all(have <= had for have, had in zip(after, before._replace(descriptors=before.descriptors + 3), strict=True))
    assert after.tickets == 0
    kept = []
    for _ in range(5):
        session = Session([0], LAYERS, policy="shrink", **PATIENT)
        kept.append(GrpcExchange(address_of(service), service.open(session)[0], 1))
    assert all(have >= had + 5 for have, had in zip(usage(service), after, strict=True))
    for exchange in kept:
        exchange.close()
