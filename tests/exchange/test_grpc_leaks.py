"""A thousand rounds of one service, in which clients die: threads, file descriptors, tasks, tickets and memory stay what they were."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fl_bn.exchange.call import Layer
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.session import Session
from tests.exchange.over_grpc import HOST, KEYS, LARGEST, LAYERS, PATIENT, batch_of, expected, local_of, same

WARM_UP, ROUNDS = 20, 1000
DESCRIPTORS, STATM = Path("/proc/self/fd"), Path("/proc/self/statm")
BALLAST = LAYERS | {f"{i}": Layer(8, torch.float32) for i in range(100, 300)}  # a session that is kept weighs some ten kilobytes


class Usage(NamedTuple):
    """What a leak would add to."""

    threads: int
    descriptors: int
    tasks: int
    tickets: int
    objects: int  # that Python's garbage collector knows
    resident: float  # MiB


def usage(service: ExchangeService) -> Usage:
    gc.collect()
    return Usage(
        threading.active_count(),
        len(os.listdir(DESCRIPTORS)),
        len(asyncio.all_tasks(service._loop)),
        len(service._tickets) + len(service._streams),
        len(gc.get_objects()),
        int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def settled(service: ExchangeService, most: Usage | None = None) -> Usage:
    """The usage as soon as it is not above ``most``, or after some seconds: channels and streams are closed behind one's back."""
    end = time.monotonic() + 3
    while True:
        now = usage(service)
        if (most is not None and all(have <= allowed for have, allowed in zip(now, most, strict=True))) or time.monotonic() > end:
            return now
        time.sleep(0.05)


def at_rest(service: ExchangeService) -> Usage:
    """The usage once what earlier tests of this process left, threads that end and sockets that close, no longer makes it less."""
    end, last = time.monotonic() + 20, settled(service)
    while True:
        time.sleep(0.5)
        now = usage(service)
        if all(have >= had for have, had in zip(now[:-1], last[:-1], strict=True)) or time.monotonic() > end:
            return now
        last = now


def play_or_die(address: str, token: str, client: int, dies: bool) -> None:
    """Two exchanges; or one, and then the connection is closed without a word, as that of a killed process is."""
    exchange = GrpcExchange(address, token, batch_of(client))
    own = local_of(client, KEYS[0])
    assert same(exchange(own.key, own.values, own.count), expected((0, 1), KEYS[0]))
    if dies:
        exchange._channel.close()
        exchange.close("it died")
        return
    own = local_of(client, KEYS[1])
    exchange(own.key, own.values, own.count)
    exchange.close()


def play_rounds(service: ExchangeService, rounds: range, pool: ThreadPoolExecutor) -> None:
    for number in rounds:
        layers = dict(BALLAST)
        session = Session((0, 1), layers, policy="shrink", **PATIENT)
        tokens = service.open(session)
        dead = {number // 10 % 2} if number % 10 == 9 else set()
        address = f"{HOST}:{service.port}"
        clients: list[Future[None]] = [pool.submit(play_or_die, address, tokens[i], i, i in dead) for i in (0, 1)]
        for client in clients:
            client.result(20)
        assert session.exchanges == 2
        assert set(session.dropped) == dead
        service.close(session)


pytestmark = pytest.mark.skipif(not (DESCRIPTORS.is_dir() and STATM.is_file()), reason="needs /proc/self/fd and /proc/self/statm")


def test_what_is_left_open_counts() -> None:
    """Negative control: rounds that are not closed, and clients that do not leave, add to everything but the memory of a few rounds."""
    service = ExchangeService(HOST, 0, LARGEST).start()
    try:
        with ThreadPoolExecutor(2) as pool:
            play_rounds(service, range(1), pool)
        before, kept = at_rest(service), []
        for _ in range(5):
            session = Session([0], dict(BALLAST), policy="shrink", **PATIENT)
            kept.append(GrpcExchange(f"{HOST}:{service.port}", service.open(session)[0], 1))
        after = usage(service)
        for exchange in kept:
            exchange.close()
    finally:
        service.stop()
    assert all(have >= had + 5 for have, had in zip(after[:-1], before[:-1], strict=True))


@pytest.mark.slow
def test_a_thousand_rounds_leave_nothing_behind() -> None:
    service = ExchangeService(HOST, 0, LARGEST).start()
    try:
        with ThreadPoolExecutor(2) as pool:
            play_rounds(service, range(WARM_UP), pool)
            before = settled(service)
            begin = time.monotonic()
            play_rounds(service, range(ROUNDS // 2), pool)
            middle = settled(service)
            play_rounds(service, range(ROUNDS // 2, ROUNDS), pool)
            allowed = before._replace(descriptors=before.descriptors + 3, objects=before.objects + ROUNDS, resident=middle.resident + 4)
            after = settled(service, allowed)
    finally:
        service.stop()
    print(f"{ROUNDS} rounds in {time.monotonic() - begin:.1f} s", before, middle, after, sep="\n")
    assert after.threads <= allowed.threads
    assert after.descriptors <= allowed.descriptors
    assert after.tasks <= allowed.tasks
    assert after.tickets == before.tickets == 0
    assert after.objects <= allowed.objects  # less than one per round
    assert after.resident <= allowed.resident  # 8 KiB per round of the second half
