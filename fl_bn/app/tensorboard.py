"""Write the numbers of every round for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fl_bn.app.history import round_row
from fl_bn.federation.callbacks import Callback
from fl_bn.federation.record import RoundRecord
from fl_bn.task import Task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Write those columns of rounds.csv that are floats, such as the metrics, as scalars.

    A resumed run replaces the rounds after its checkpoint.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder, self.task = folder, task
        self._writer: SummaryWriter | None = None

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Write the numbers of one round."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # here, since the import takes a quarter of a second

            self._writer = SummaryWriter(str(self.folder), purge_step=record.round if self.folder.exists() else None)
        for name, value in round_row(record, self.task).items():
            if name not in ("round", "cohort") and isinstance(value, float):
                self._writer.add_scalar(name, value, record.round)
        self._writer.flush()

    def on_end(self, error: BaseException | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
