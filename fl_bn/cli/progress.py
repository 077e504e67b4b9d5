"""The bar of a command that computes rounds."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def rounds_bar(console: Console) -> Progress:
    """Return a display of rounds done, of all, and of the time that is left."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)
