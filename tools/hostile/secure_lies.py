"""Attack secure aggregation by a two-faced server, which sends one client other values than it sends the others.

Such a server wants a sum from which it can learn that client's update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import Array
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from fl_bn.flower import RunFailed
from fl_bn.flower.secagg import rounds as secure_rounds
from fl_bn.flower.secagg.workflow import Sum, secure_sum
from tests.hostile.liars import LIAR, what
from tests.hostile.recorded import CLIENTS, SCENARIOS, Liar, LivingGrid, app_of, cloned, recorded, served
from tools.hostile.mutations import Rng, pick, plain
from tools.hostile.outcomes import BROKEN, GIVEN_UP, REFUSED, SAME, Outcome, listening

TOLD = {  # fields that may be told differently: field -> its record, and its other values
    "secagg-update-weight": ("config", [1, 2, 2**53]),
    "secagg-statistics-weight": ("config", [1, 2, 2**53]),
    "secagg-samples-weight": ("config", [1, 2, 2**53]),
    "learning-rate": ("config", [1e-3, 0.0999]),
    Key.CLIPPING_RANGE: (RECORD_KEY_CONFIGS, [1.0, 7.999, 100.0, 1e6]),
    Key.TARGET_RANGE: (RECORD_KEY_CONFIGS, [2**8, 2**21, 2**22 + 1]),
    Key.THRESHOLD: (RECORD_KEY_CONFIGS, [4, 5]),
}
ARRAYS = "one number of what went down"


class TwoFaced(LivingGrid):
    """Run clients in this process, and send those on the nodes ``odd`` another value of ``field`` than the others.

    Attributes:
        told: Whether another value was sent for the present sum.
        ever: Whether another value was sent for any sum.
        mixed: For each sum that combines updates of both groups of clients, the clients in the sum. There must be none.
    """

    def __init__(self, name: str, odd: set[int], field: str, value: Any, only: int = 0) -> None:
        super().__init__(app_of(SCENARIOS[name]), Liar())
        self.only = only  # the round in which another value is told; 0: every round
        self.odd, self.field, self.value = odd, field, value
        self.told = self.ever = False
        self.mixed = list[list[int]]()

    def sum(self, *of: Any, **options: Any) -> Sum:
        """Call ``secure_sum``. If the sum combines updates of both groups of clients, add its clients to ``mixed``."""
        self.told = False
        total = secure_sum(*of, **options)
        nodes = {part.client.node for part in total.parts}
        if self.told and nodes & self.odd and nodes - self.odd:
            self.mixed.append(sorted(part.client.index for part in total.parts))
        return total

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace ``secure_sum`` by ``self.sum`` during the ``with`` block."""
        with mock.patch.object(secure_rounds, "secure_sum", self.sum):
            yield

    def _answer(self, message: Message) -> Message:
        tells = message.metadata.dst_node_id in self.odd and what(message).startswith("train")
        if tells and self.only in (0, message.content.config_records["fl-bn/header"]["round"]):
            message.content = cloned(message.content)
            self.tell(message.content)
        return super()._answer(message)

    def tell(self, content: RecordDict) -> None:
        if self.field == ARRAYS:
            section, name, place = self.value
            if section in content.array_records and name in content.array_records[section]:
                values = plain(content.array_records[section][name]).copy()
                values.reshape(-1)[place % max(values.size, 1)] += 1e-3
                content.array_records[section][name] = Array(values)
                self.told = self.ever = True
            return
        record = f"fl-bn/{TOLD[self.field][0]}"
        before = dict(content.config_records.get(record, {}))
        if self.field in before and before[self.field] != self.value:
            content[record] = ConfigRecord({**before, self.field: self.value})
            self.told = self.ever = True


def two_faced(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Run a round in which the server sends different values to two groups of clients, one of which is a single client.

    No sum may combine updates of both groups. Return what was sent, and the outcome.
    """
    victim = LIAR + 1
    odd = {victim} if rng.integers(2) else set(range(1, CLIENTS + 1)) - {victim}
    field = pick(rng, [*TOLD, ARRAYS])
    value = pick(rng, TOLD[field][1]) if field in TOLD else anything_sent(name, rng)
    grid = TwoFaced(name, odd, field, value)
    said_to = f"{'one client is' if len(odd) == 1 else 'all but one are'} told {field} {value}"
    with listening() as said, np.errstate(all="ignore"), grid.watched():
        try:
            ran = served(name, grid)
        except RunFailed as error:
            return said_to, Outcome(GIVEN_UP, str(error))
        except Exception as error:  # the server must survive every reply
            return said_to, Outcome(BROKEN, f"the server ended: {error!r}")
    if grid.mixed:
        return said_to, Outcome(BROKEN, f"a sum of clients {grid.mixed[0]}, who were told different things")
    if not grid.ever:
        return said_to, Outcome(SAME, "")
    if not ran.record.aggregated:
        return said_to, Outcome(GIVEN_UP, said.lines[-1] if said.lines else "")
    return said_to, Outcome(REFUSED, said.lines[0] if said.lines else "")


KEEPING = ["fedbn secure", "silobn secure", "hbn secure"]
SHAPES = ["learning-rate", ARRAYS]  # fields that change the tensors that a client keeps


def two_faced_before(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Run two rounds. In round 1, the server sends one client, or all but one, another value than the rest.

    In round 2, all clients get the same values. The sum of round 2 may still not combine updates of both groups, since their
    tensors come from round 1. Return what was sent, and the outcome.
    """
    victim = LIAR + 1
    odd = {victim} if rng.integers(2) else set(range(1, CLIENTS + 1)) - {victim}
    field = pick(rng, SHAPES)
    value = pick(rng, TOLD[field][1]) if field in TOLD else anything_sent(name, rng)
    grid = TwoFaced(name, odd, field, value, only=1)
    said_to = f"{'one client was' if len(odd) == 1 else 'all but one were'} told {field} {value} in round 1"
    together: list[list[int]] = []

    def sum(*of: Any, **options: Any) -> Sum:
        total = secure_sum(*of, **options)
        nodes = {part.client.node for part in total.parts}
        if grid.ever and nodes & odd and nodes - odd:
            together.append(sorted(nodes))
        return total

    with listening() as said, np.errstate(all="ignore"), mock.patch.object(secure_rounds, "secure_sum", sum):
        try:
            ran = served(name, grid, rounds=2)
        except RunFailed as error:
            return said_to, Outcome(GIVEN_UP, str(error))
        except Exception as error:  # the server must survive every reply
            return said_to, Outcome(BROKEN, f"the server ended: {error!r}")
    if together:
        return said_to, Outcome(BROKEN, f"a sum of nodes {together[0]}, who were told different things in round 1")
    if not grid.ever:
        return said_to, Outcome(SAME, "")
    if not ran.record.aggregated:
        return said_to, Outcome(GIVEN_UP, said.lines[-1] if said.lines else "")
    return said_to, Outcome(REFUSED, said.lines[0] if said.lines else "")


def anything_sent(name: str, rng: Rng) -> tuple[str, str, int]:
    """Draw one number among the tensors that the server sends for training. Return its section, its tensor and its place there."""
    trained = [content for kind, content, _ in recorded(name).exchanges if kind.startswith("train")]
    asked = [content for content in trained if "fl-bn/weights" in content.array_records]
    content = pick(rng, asked)
    section = pick(rng, [section for section in content.array_records if content.array_records[section]])
    return section, pick(rng, list(content.array_records[section])), int(rng.integers(1000))
