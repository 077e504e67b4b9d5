"""Send well-formed replies with false numbers: consistent but too large counts, samples and steps, and oversized weights."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import Array

from fl_bn.federation.replies import WIDEST_WEIGHT
from fl_bn.flower import RunFailed
from tests.hostile.liars import LIAR
from tests.hostile.recorded import Liar, PlayingGrid, recorded, served
from tools.hostile.mutations import Rng, pick, plain, replace_record
from tools.hostile.outcomes import BROKEN, Outcome, honest, judged, largest, listening

TIMES = [0.5, 2, 8, 60, 70, 1e3, 1e6, 2.0**40, 2.0**53]
CLAIMS = ("samples", "batch", "measured", "steps")
SCENARIOS_OF = ["fbn", "hbn", "fedavg", "fedbn", "gn", "fbn gradients", "fbn maintained", "fedavg scaffold"]
MOMENTS, STATISTICS = "fl-bn/moments", "fl-bn/statistics"


class Boasts(Liar):
    """Simulate a client that exaggerates.

    It draws one factor, and may multiply by it its counts, its numbers of samples and steps, and the values of one section.
    """

    def __init__(self, rng: Rng) -> None:
        self.rng, self.what, self.reply = rng, "", RecordDict()

    def answer(self, message: Message, turn: int, asked: str, content: RecordDict) -> Message:
        if asked != "train":
            return Message(content, reply_to=message)
        rng, times, told = self.rng, float(pick(self.rng, TIMES)), dict(content.metric_records["fl-bn/metrics"])
        if MOMENTS in content.array_records and rng.integers(3):
            self.what += f"counts * {times:g} "
            self.change(content, MOMENTS, times, "count")
        for name in CLAIMS:
            if name in told and rng.integers(3) == 0:
                self.what += f"{name} * {times:g} "
                told[name] = int(min(told[name] * times, 2**53))  # type: ignore[operator]
        if rng.integers(3) == 0:
            section = pick(rng, [section for section in content.array_records if section not in (MOMENTS, STATISTICS)] or [MOMENTS])
            self.what += f"{section} * {times:g} "
            self.change(content, section, times, "")
        replace_record(content, "fl-bn/metrics", told, False)
        self.reply = content
        return Message(content, reply_to=message)

    def change(self, content: RecordDict, section: str, times: float, ending: str) -> None:
        new = dict[str, Array]()
        for name, array in content.array_records[section].items():
            values = plain(array)
            if name.endswith(ending) and (ending or values.dtype.kind == "f"):
                big = np.minimum(values.astype(np.float64) * times, 2.0**53 if ending else 1e38)
                values = big.astype(values.dtype)
            new[name] = Array(values)
        content[section] = ArrayRecord(new)


def boast(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Run a round with one client that exaggerates (``Boasts``), and judge it.

    If the server accepts the reply, its numbers of samples may be no larger than an honest client could send. In any case,
    the model's weights must stay below a bound.

    Args:
        name: The scenario.
        rng: Draws the exaggeration.

    Returns:
        What the client multiplied, and the outcome.
    """
    liar = Boasts(rng)
    with listening() as said:
        try:
            ran = served(name, PlayingGrid(recorded(name), liar))
        except RunFailed as error:
            return liar.what, Outcome(BROKEN, f"the run of one round ended: {error}")
        except Exception as error:  # the server must survive every reply
            return liar.what, Outcome(BROKEN, f"the server ended: {error!r}")
    outcome = judged(name, ran, said.lines)
    believed = any(client.client == LIAR for client in ran.record.accepted)
    if believed and (problem := _too_much(liar.reply)):
        return liar.what, Outcome(BROKEN, f"it was believed: {problem}")
    if largest(ran.tensors) > WIDEST_WEIGHT * max(1.0, largest(honest(name).tensors)):
        return liar.what, Outcome(BROKEN, f"a number of the model is {largest(ran.tensors):.3g}")
    return liar.what, outcome


def _too_much(reply: RecordDict) -> str:
    """Return the numbers in ``reply`` that are impossible for a client with 6 samples; empty: all are possible."""
    told: MetricRecord = reply.metric_records["fl-bn/metrics"]
    return f"{dict(told)}" if any(float(told.get(name, 0)) > 6 for name in CLAIMS[:3]) else ""  # type: ignore[arg-type]
