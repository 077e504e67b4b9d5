"""Display a run live on a terminal: a bar over the rounds, the last round's numbers, and the remaining time."""

from __future__ import annotations

import math
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fl_bn.federation.callbacks import Callback
from fl_bn.federation.record import RoundRecord
from fl_bn.task import CLASSIFICATION, Task


class Bar(Callback):
    """Display a run on the terminal ``stream``, with the metric of ``task``. ``on_end`` ends the display."""

    def __init__(self, stream: TextIO, task: Task = CLASSIFICATION) -> None:
        self.task, self._metric = task, ""
        columns = BarColumn(bar_width=24), TextColumn("{task.description}", markup=False), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(file=stream), speed_estimate_period=math.inf)
        self._line = self._progress.add_task("starting", total=None)
        self._progress.start()

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bar."""
        self._progress.console.print(Text(text, style), soft_wrap=True)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Store the value of the task's metric, which ``on_round`` shows."""
        if (metric := self.task.metric) in record.evaluation:
            self._metric = f"  {metric} {self.task.format_metric(record.evaluation[metric])}"

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Move the bar, and show the round's loss, the last metric, and the remaining time."""
        text = f"round {record.round}/{rounds}  loss {record.loss:.4f}{self._metric}"
        self._progress.update(self._line, total=max(rounds, record.round), completed=record.round, description=text, refresh=True)

    def on_end(self, error: BaseException | None) -> None:
        """Stop the display."""
        if error is not None:
            self._progress.update(self._line, total=None)
        self._progress.stop()
