"""One round with weights that no client can train on, all others right: the client recovers, since what it keeps stays finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_bn.federation.client import LocalRound
from fl_bn.methods import METHODS
from fl_bn.objectives import Scaffold
from tests.conformance.doors import Asked, federation, flower, own_loop
from tests.hostile.liars import ClientState, LocalTraining, Reply, people
from tests.in_process import TWO_STEPS, run

VICTIM, BAD, ROUNDS, HUGE = 2, 2, 4, 1e200  # the third client to train in round 2; its squares overflow in float64
DOORS = {"federation": federation, "loop of one's own": own_loop, "own Flower app": flower}
SCAFFOLD = LocalTraining(batch_size=4, steps=2, objective=Scaffold())


class Watch:
    """Spoils one client's instruction, and notes what clients reply and keep, by round and turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, huge: float = HUGE) -> None:
        self.replies: dict[tuple[int, int], Reply] = {}
        self.kept: dict[tuple[int, int], ClientState] = {}
        turns: dict[int, int] = {}
        begin, reply = LocalRound.__init__, LocalRound.reply

        def spoilt(own: LocalRound, model: Any, method: Any, asked: Any, *more: Any, **options: Any) -> None:
            begins = "weights" in asked.sections and str(asked.phase.value) != "measure"
            turn = turns.get(asked.round, 0)
            if begins:
                turns[asked.round] = turn + 1
            if begins and asked.round == BAD and turn == VICTIM:
                weights = {k: t * huge if t.is_floating_point() else t for k, t in asked.sections["weights"].items()}
                asked = replace(asked, sections={**asked.sections, "weights": weights})
            begin(own, model, method, asked, *more, **options)
            own.turn = turn  # type: ignore[attr-defined]

        def noted(own: LocalRound, *args: Any, **options: Any) -> tuple[Reply, ClientState]:
            came = reply(own, *args, **options)
            if own.trains:
                self.replies[own.instruction.round, own.turn], self.kept[own.instruction.round, own.turn] = came  # type: ignore[attr-defined]
            return came

        monkeypatch.setattr(LocalRound, "__init__", spoilt)
        monkeypatch.setattr(LocalRound, "reply", noted)

    def finite(self, round: int) -> bool:
        """What the victim replied, and what it keeps, after ``round``."""
        sections = [self.replies[round, VICTIM].sections, self.kept[round, VICTIM].sections]
        return all(bool(tensor.isfinite().all()) for of in sections for tensors in of.values() for tensor in tensors.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["fedbn", "hbn"])
def test_a_client_recovers_from_one_bad_round(name: str, door: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """Control: in the bad round its reply is not finite."""
    watch = Watch(monkeypatch)
    DOORS[door](Asked(name, rounds=ROUNDS, passes=False))
    assert not watch.finite(BAD)
    assert all(watch.finite(round) for round in range(1, ROUNDS + 1) if round != BAD)
    assert watch.kept[BAD, VICTIM].round == BAD - 1
    assert len([line for line in log.messages if "not finite" in line and "round 2" in line and "round 1" in line]) == 1


@pytest.mark.parametrize("what", ["maintained momentum", "control variates", "statistics"])
def test_so_does_all_else_that_it_keeps_and_from_a_bad_first_round_it_keeps_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, FedBN's evaluation after it was of NaN."""
    settings = {"maintained momentum": replace(TWO_STEPS, maintain="local"), "control variates": SCAFFOLD, "statistics": TWO_STEPS}[what]
    monkeypatch.setattr("tests.hostile.test_one_bad_round.BAD", 1)
    watch = Watch(monkeypatch, 1e30)
    rules = {"at_start": 3, "auxiliary": settings.auxiliary}
    ran = run(METHODS["fedbn" if what == "statistics" else "fedavg"](), people(4), 3, settings=settings, policy=rules)
    assert not watch.finite(1)
    assert watch.kept[1, VICTIM].sections == {}
    assert watch.finite(2)
    assert watch.finite(3)
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert all(torch.tensor(metrics["loss"]).isfinite() for metrics in ran.records[-1].client_evaluation.values())
