"""Lay out the tables of ``fl-bn status``, for terminals of 80 columns or more and for pipes."""

from __future__ import annotations

import os

from rich.console import Console, Group
from rich.table import Table

from fl_bn_site.status import RunStatus, Status


def wide_console() -> Console:
    """Return a console as wide as the terminal; for output to a pipe, one of 500 columns, so that no table is narrowed.

    It takes no word of a site or run for markup.
    """
    console = Console(markup=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=500, markup=False)


def tables_of_status(current: Status) -> Group:
    """Return the tables of ``fl-bn status``. At 80 columns, names are broken into lines, and nothing is cut."""
    about = f"{current.server}, {current.at}; certificate: {current.expires} days left"
    sites, runs, unused = Table(box=None), Table(title="runs", box=None), Table(box=None)
    for column in ("site", "state", "last seen"):
        sites.add_column(column, overflow="fold")
    for site in current.sites:
        sites.add_row(site.name, site.state, site.seen or "never")
    for column in ("run", "site", "not used in the last round"):
        unused.add_column(column, overflow="fold")
    for column in ("run", "by", "status", "round", "used", "loss", "metric", "s/round", "left"):
        runs.add_column(column, overflow="fold", no_wrap=column not in ("run", "by"))
    for run in current.runs:
        name = run.name or str(run.id)
        runs.add_row(
            name,
            run.submitter,
            run.status.removeprefix("finished:"),
            _round(run),
            "" if run.accepted is None else f"{run.accepted}/{run.cohort}",
            "" if run.loss is None else f"{run.loss:.4g}",
            "" if run.value is None else f"{run.metric} {run.value:.3g}",
            "" if run.seconds is None else f"{run.seconds:.1f}",
            "" if run.left is None else f"{run.left:.0f} s",
        )
        for refused, why in run.refused.items():
            unused.add_row(name, refused, why)
    notes = [f"{run.name or run.id}: {run.note}" for run in current.runs if run.note]
    return Group(about, sites, runs, *([unused] if unused.row_count else []), *notes)


def _round(run: RunStatus) -> str:
    """Return the rounds done and planned, such as ``3/40``; empty for a run that was resumed. ``?``: the number is not known."""
    if run.round is None and not run.note:
        return ""
    return f"{'?' if run.round is None else run.round}/{run.rounds or '?'}"
