"""A callback that keeps what it is told."""

from __future__ import annotations

from fl_bn import Callback
from fl_bn.federation.record import RoundRecord


class Kept(Callback):
    """Appends every round's record to ``records``; what it was called for, in order, is in ``calls``, how the run ended in ``ends``."""

    def __init__(self, records: list[RoundRecord] | None = None) -> None:
        self.records, self.calls, self.ends = [] if records is None else records, list[str](), list[BaseException | None]()

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        self.calls.append(f"evaluation {record.round}/{rounds}")

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        self.calls.append(f"round {record.round}/{rounds}")
        self.records.append(record)

    def on_end(self, error: BaseException | None) -> None:
        self.calls.append("end")
        self.ends.append(error)
