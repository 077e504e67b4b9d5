"""Record the calls of a callback."""

from __future__ import annotations

from fl_bn import Callback
from fl_bn.federation.record import RoundRecord


class Kept(Callback):
    """Record what the callback was called with: ``calls`` such as ``round 2/4`` and ``end``, and for each end its error or None."""

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
