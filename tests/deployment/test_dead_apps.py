"""A process that works on a message dies, at a site of real processes: the server is told why within seconds, and asks again once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_bn_site import commands
from tests.deployment.dying import Run, kill, parts
from tests.deployment.federation import Federation, differing, in_process, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(2400)]
SECONDS = 15.0  # from a death until the site is asked again


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation"), ("east", "west")) as running:
        running.start_all()
        yield running


@pytest.mark.nightly
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
