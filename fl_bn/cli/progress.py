"""Make the progress bar of commands that compute rounds."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def rounds_bar(console: Console) -> Progress:
    """Return a progress bar that shows the finished rounds, their total number, and the remaining time."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)
