"""The live display of a run on a terminal: a bar over the rounds, what the last one was like, and the time left."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fl_bn.federation.callbacks import Callback
from fl_bn.federation.record import RoundRecord
from fl_bn.task import CLASSIFICATION, Task


class Bar(Callback):
    """Shown on ``stream``, a terminal, from now until ``on_end``. ``task``: whose metric it shows."""

    def __init__(self, stream: TextIO, task: Task = CLASSIFICATION) -> None:
        self.task, self._metric, self._first, self._begin = task, "", 0, time.monotonic()
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False), _Left())
        self._progress = Progress(*columns, console=Console(file=stream), transient=False)
        self._line = self._progress.add_task("starting", total=None, end=None)
        self._progress.start()

    def say(self, text: str, style: str = "") -> None:
        """A line above the bar."""
        self._progress.console.print(Text(text, style), soft_wrap=True)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        if (metric := self.task.metric) in record.evaluation:
            self._metric = f"  {metric} {self.task.shown(record.evaluation[metric])}"

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        now = time.monotonic()
        if not self._first:
            self._first, self._begin = record.round, now - record.seconds
        each = (now - self._begin) / (record.round - self._first + 1)
        shown = f"round {record.round}/{rounds}  loss {record.loss:.4f}{self._metric}"
        end = now + each * (rounds - record.round)
        self._progress.update(self._line, total=max(rounds, record.round), completed=record.round, description=shown, end=end, refresh=True)

    def on_end(self, error: BaseException | None) -> None:
        if error is not None:
            self._progress.update(self._line, end=None)
        self._progress.stop()


class _Left(TextColumn):
    """The time left, which runs down between the rounds."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: object) -> Text:
        if (end := getattr(task, "fields", {}).get("end")) is None:
            return Text("")
        left = max(0, round(end - time.monotonic()))
        minutes, seconds = divmod(left, 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours}:{minutes:02}:{seconds:02} left", style="cyan")
