"""Decide what one lie achieved, by the record of the round, the model, and the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
from flwr.common.logger import FLOWER_LOGGER

from fl_bn.federation import schema
from fl_bn.federation.values import to_numpy
from tests.hostile.liars import LIAR
from tests.hostile.recorded import SCENARIOS, Liar, LivingGrid, PlayingGrid, Served, app_of, recorded, served

REFUSED, SAME, HONEST, GIVEN_UP, BROKEN = (
    "refused, and named",
    "accepted: no bit of the model changed",
    "accepted: as an honest client could have sent",
    "round given up, and said why",
    "BROKEN",
)
FEW = "samples can be traced"  # a warning for the client's own good, which refuses nobody
FAR = 4.0  # under a defence no weight may become so many times the largest honest one


class Outcome(NamedTuple):
    """Hold what a lie achieved.

    Attributes:
        kind: ``REFUSED``, ``SAME``, ``HONEST``, ``GIVEN_UP`` or ``BROKEN``.
        why: What is broken, why the round was given up, or the line of the log that names the liar.
    """

    kind: str
    why: str


OF_A_CLIENT = ("was overwritten: record of type", "client %s raised:")  # said by the clients' own processes, which are in this one


class Said(logging.Handler):
    """Collect the warnings of a run's server."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not any(text in record.msg for text in OF_A_CLIENT):
            self.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[Said]:
    """Collect the warnings of Flower's logger inside the block; its other handlers get none."""
    said, before, level = Said(), list(FLOWER_LOGGER.handlers), FLOWER_LOGGER.level
    FLOWER_LOGGER.handlers[:], propagate = [said], FLOWER_LOGGER.propagate
    FLOWER_LOGGER.propagate = False
    FLOWER_LOGGER.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        FLOWER_LOGGER.handlers[:], FLOWER_LOGGER.propagate = before, propagate
        FLOWER_LOGGER.setLevel(level)


@cache
def honest(name: str) -> Served:
    scenario = SCENARIOS[name]
    return served(name, LivingGrid(app_of(scenario), Liar()) if scenario.living else PlayingGrid(recorded(name), Liar()))


def largest(tensors: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(array).max(initial=0)) for array in tensors.values())


def judged(name: str, ran: Served, lines: list[str]) -> Outcome:
    """Decide what a lie achieved in the scenario ``name``.

    The outcome is ``BROKEN`` if the round was not aggregated, if another client was refused, or if clients would refuse the new model.
    """
    truth, tensors = honest(name), ran.tensors
    named = [line for line in lines if (f"client {LIAR}" in line or f"node {LIAR + 1} " in line) and FEW not in line]
    others = [c for c in ran.record.clients if c.client != LIAR and c.refused]
    if any(len(line) > 4000 or "\x1b" in line or "\n" in line for line in lines):
        return Outcome(BROKEN, "a line of the log has text of a client: it is too long, or has a line break or an escape sequence")
    if others:
        if SCENARIOS[name].secure and not ran.record.aggregated:
            return Outcome(GIVEN_UP, lines[-1])
        return Outcome(BROKEN, f"the honest client {others[0].client} was refused: {others[0].refused}")
    if not ran.record.aggregated:
        return Outcome(GIVEN_UP if SCENARIOS[name].secure else BROKEN, lines[-1] if lines else "the log gives no reason")
    shared = ran.strategy.transport.shared
    try:
        beside = SCENARIOS[name].settings.auxiliary
        asked = ran.strategy.transport.server.begin(1).sections
        schema.instruction(shared.model, shared.locality, beside).check({section: to_numpy(tensors) for section, tensors in asked.items()})
    except ValueError as error:
        return Outcome(BROKEN, f"clients would refuse the model: {error}")
    if ran.strategy.transport.server.defence.active and largest(tensors) > FAR * largest(truth.tensors):
        return Outcome(BROKEN, f"under a defence the largest weight is {largest(tensors):.3g}")
    evaluated = set(ran.record.client_evaluation) if truth.record.client_evaluation else set()
    if truth.record.client_evaluation and not set(truth.record.client_evaluation) - {LIAR} <= evaluated:
        return Outcome(BROKEN, "an honest client's evaluation is missing")
    if named:
        return Outcome(REFUSED, named[0])
    same = all(np.array_equal(tensors[k], a) for k, a in truth.tensors.items())
    return Outcome(SAME if same else HONEST, "")
