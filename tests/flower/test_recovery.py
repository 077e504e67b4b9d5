"""Checkpoints out, one back in, and clients that lost what they kept: the strategy alone. tests/experiment resumes whole runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.federation.checkpoint import generators, set_generators
from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.methods import METHODS, Method
from tests.flower.inside import Checkpoint, RunId, Samples
from tests.in_process import WatchedGrid, a_tenth, client_app
from tests.networks import seeded_network

FBN, FEDBN = METHODS["fbn"](), METHODS["fedbn"]()


def ran(
    grid: WatchedGrid, method: Method, every: int, resume: Checkpoint | None = None, rate: Any = a_tenth, **options: Any
) -> list[Checkpoint]:
    """Run seven rounds; return the checkpoints, of which the two newest are stored."""
    made: list[Checkpoint] = []

    def keep(checkpoint: Checkpoint) -> int:
        made.append(checkpoint)
        return made[-2:][0].round

    rounds = Rounds(clients=3, wait=0.0, checkpoint_every=every, rate=rate)
    strategy = BatchNormStrategy(seeded_network("cnn"), method, rounds, keep_checkpoint=keep, save_clients="run", **options)
    strategy.start(grid, num_rounds=7, resume=resume)
    return made


@pytest.mark.parametrize(("every", "back"), [(2, [0, 0, 2, 2, 2, 2, 4]), (0, [0, 1, 2, 3, 4, 5, 6])])
def test_every_message_says_what_run_it_is_of_and_how_far_back_the_server_can_go(
    every: int, back: list[int], clients: list[Samples]
) -> None:
    grid = WatchedGrid(client_app(FEDBN, clients), 3)
    assert [checkpoint.round for checkpoint in ran(grid, FEDBN, every)] == [2, 4, 6][: 2 * every]  # none after the last round
    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    told = {m.metadata.group_id: RunId.of(m.content.config_records["fl-bn/config"]) for m in sent}
    assert len({run_id.run for run_id in told.values()}) == 1
    assert [told[str(round)].durable for round in range(1, 8)] == back


def test_what_a_users_own_code_draws_goes_on_as_it_was(clients: list[Samples]) -> None:
    drawn: list[tuple[float, float, float]] = []

    def draw(model: nn.Module) -> dict[str, float]:
        drawn.append((random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))))
        return {"accuracy": 0.5}

    grid, before = WatchedGrid(client_app(FBN, clients), 3), generators()
    try:
        checkpoint = ran(grid, FBN, 1, evaluate=draw)[2]
        whole, drawn[:] = drawn[3:], []
        ran(grid, FBN, 1, checkpoint, evaluate=draw)
        assert drawn == whole
        drawn.clear()
        ran(grid, FBN, 1, replace(checkpoint, generators=""), evaluate=draw)
        assert drawn != whole  # control
    finally:
        set_generators(before)


def test_after_a_resume_clients_are_told_which_of_their_replies_counted_last(clients: list[Samples]) -> None:
    grid = WatchedGrid(client_app(FBN, clients), 3)
    checkpoint = ran(grid, FBN, 1)[2]
    grid.sent.clear()
    ran(grid, FBN, 1, checkpoint)
    first = [m for m in grid.sent if (m.metadata.message_type, m.metadata.group_id) == ("train", "4")]
    assert [m.content.config_records["fl-bn/config"]["counted"] for m in first] == [3] * 3


@pytest.mark.parametrize(("kept", "lost"), [("memory", "all"), ("files", "all"), ("files", "the last")])
def test_a_client_that_lost_what_it_kept_is_named(
    kept: str, lost: str, clients: list[Samples], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    grid = WatchedGrid(client_app(FEDBN, clients, state=tmp_path if kept == "files" else None), 3)

    def lose(round: int, rounds: int) -> float:
        if round == 4:
            files = list(tmp_path.glob("run/state-*/client-1/*"))
            for path in files if lost == "all" else [max(files)]:
                path.write_bytes(b"")
            if kept == "memory":
                grid.states()[1].clear()
        return 0.1

    ran(grid, FEDBN, 4, rate=lose)
    assert "round 4: client 1 kept tensors in round 3, but started from " + ("none" if lost == "all" else "those of round 2") in log.text
    assert log.text.count("but started from") == 1
