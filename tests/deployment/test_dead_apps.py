"""A process that works on a message dies, at a site of real processes: the server is told why within seconds, and asks again once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_bn_site import commands
from tests.deployment.dying import Run, kill, parts
from tests.deployment.federation import Federation, differing, in_process, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SECONDS = 15.0  # from a death until the site is asked again


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation"), ("east", "west")) as running:
        running.start_all()
        yield running


def test_a_message_whose_process_is_killed_is_done_again(federation: Federation, tmp_path: Path) -> None:
    run = Run(federation, tmp_path, "killed")
    kill(federation, "west", run.hang("west"))
    seconds = run.asked_again("west", "its process was killed by SIGKILL")
    print(f"told after {seconds:.1f} s")
    assert seconds < SECONDS
    out = run.end()
    assert out.count("2/2 clients") == 4, out
    reference = in_process(run.config, tmp_path / "reference")
    assert differing(run.rounds.parent / "model.safetensors", reference / "model.safetensors") == []


def test_a_process_that_dies_again_costs_its_site_the_round_and_no_more(federation: Federation, tmp_path: Path) -> None:
    run = Run(federation, tmp_path, "twice")
    first = run.hang("west")
    os.kill(first, signal.SIGSEGV)
    run.asked_again("west", "its process was killed by SIGSEGV")
    begin = time.monotonic()
    kill(federation, "west", run.hang("west"))
    rounds = run.done()
    wait_until("the round ends", lambda: run.done() > rounds, 250)
    print(f"round done {time.monotonic() - begin:.1f} s after the first death was known")
    out = run.end()
    assert "site west: its process was killed by SIGKILL; that is the second time, and the round goes on without this client" in out
    assert (out.count("1/2 clients"), out.count("2/2 clients")) == (1, 3), out


def test_a_host_that_is_started_again_gives_up_its_predecessor_s_messages(federation: Federation, tmp_path: Path) -> None:
    run = Run(federation, tmp_path, "restarted")
    run.hang("east")
    kill(federation, "east", federation.find("clientapp", "east")[0])
    seconds = run.asked_again("east", "the program that runs its ClientApps was restarted while it worked on the message")
    print(f"told after {seconds:.1f} s")
    assert seconds < SECONDS
    assert run.end().count("2/2 clients") == 4


def test_a_site_whose_host_stays_away_is_left_out_within_seconds(federation: Federation, tmp_path: Path) -> None:
    federation.stop("sites/west")
    with parts(federation, "west", commands.SUPERNODE) as start:
        start("clientapp")
        run = Run(federation, tmp_path, "away")
        run.hang("west")
        federation.mood("west").write_text("")
        start.end("clientapp")
        rounds, begin = run.done(), time.monotonic()
        wait_until("the round ends", lambda: run.done() > rounds, 250)
        print(f"round done {time.monotonic() - begin:.1f} s after the host had gone")
        start("clientapp")
        out = run.end()
    federation.start("sites/west")
    assert "site west: the program that runs its ClientApps does not answer for 15 s" in out
    assert out.count("2/2 clients") >= 1
