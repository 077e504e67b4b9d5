"""Many rounds of one service, in which clients die: threads, file descriptors, tasks and tickets stay what they were."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.exchange.cohorts import ExchangeService, Join
from tests.exchange.over_grpc import KEYS, SOON, Round, Stream, batch_of, local_of

DESCRIPTORS = Path("/proc/self/fd")


def usage(service: ExchangeService) -> tuple[int, ...]:
    """Return what a leak would add to: threads, tasks, tickets and descriptors."""
    gc.collect()
    tasks, tickets = len(asyncio.all_tasks(service._loop)), len(service._members)
    return threading.active_count(), tasks, tickets, len(os.listdir(DESCRIPTORS))


def at_rest(service: ExchangeService) -> tuple[int, ...]:
    """Return the usage once it no longer falls: channels and streams are closed behind one's back."""
    end, last = time.monotonic() + 20, usage(service)
    while True:
        time.sleep(0.5)
        now = usage(service)
        if all(have >= had for have, had in zip(now, last, strict=True)) or time.monotonic() > end:
            return now
        last = now


def play_rounds(service: ExchangeService, rounds: int) -> None:
    """In every tenth round client 1 dies after an exchange: its connection is closed without a word."""
    for number in range(rounds):
        dies = number % 10 == 9
        with Round(service, 2, policy="shrink") as round, ExitStack() as stack:
            futures = round.play(*([0] if dies else [0, 1]))
            if dies:
                stream = stack.enter_context(Stream(service, round.tokens[1]))
                stream.ask(Join(batch_of(1)))
                stream.ask(local_of(1, KEYS[0]))
                stream.channel.close()
            for future in futures:
                future.result(SOON)
        assert set(round.session.dropped) == ({1} if dies else set())


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc/self/fd")
def test_two_hundred_rounds_leave_nothing_behind(service: ExchangeService) -> None:
    """Control: streams that are not closed add to everything."""
    play_rounds(service, 20)
    before = at_rest(service)
    play_rounds(service, 200)
    after = at_rest(service)
    assert all(have <= had + more for have, had, more in zip(after, before, (0, 0, 0, 3), strict=True))
    with ExitStack() as stack:
        for _ in range(5):
            round = stack.enter_context(Round(service, 1))
            stack.enter_context(Stream(service, round.tokens[0])).ask(Join(1))
        assert all(have >= had + 5 for have, had in zip(usage(service)[1:], after[1:], strict=True))
