"""Define the command ``fl-bn audit``, by which a site's officer reads what left the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_bn.cli.refusal import refused

if TYPE_CHECKING:
    from rich.console import Group

    from fl_bn_site.audit_check import Findings
    from fl_bn_site.audit_report import Report


def audit(
    folder: Annotated[Path, typer.Argument(metavar="SITE", help="the site's folder, kit/sites/NAME, or the folder of a log")],
    run: Annotated[str, typer.Option(metavar="RUN", help="only this run: its name or its id")] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="only from this date or time on, in UTC: 2026-11-26, or 2026-11-26T09:30")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the totals as JSON")] = False,
    forget: Annotated[
        str,
        typer.Option(metavar="DATE", help="remove files whose lines are all older, and log that: for the end of a retention period"),
    ] = "",
    lines: Annotated[bool, typer.Option("--lines", help="print the lines themselves, one JSON object each")] = False,
) -> None:
    """Show what left a site, from its audit log: totals by run, message and section. Exit code 1 if the log was changed."""
    from fl_bn_site.audit import AuditError
    from fl_bn_site.audit_check import check, is_log
    from fl_bn_site.audit_check import forget as forget_until
    from fl_bn_site.audit_report import chosen, moment, report_of
    from fl_bn_site.folders import SiteFolder

    try:
        start, until = (moment(text) if text else None for text in (since, forget))
        log = folder if is_log(folder) else SiteFolder.read(folder).audit_log
        if not log.is_dir():
            raise ValueError(f"{log} is not there: this site has sent no answer yet, or audit in {SiteFolder.file} is another folder")
        if until:
            files, through = forget_until(log, until)
            said = f"{files} files were removed, with the lines up to {through}; the last line of the log says so"
            typer.echo(said if files else "no file is that old")
            return
        if run and not any(chosen(log, run)):
            named = dict.fromkeys(str(entry.get("name") or entry.get("run")) for entry in chosen(log) if entry.get("run"))
            raise ValueError(f"{log} has no line of the run {run}, but of: {', '.join(named) or 'no run'}")
        found = check(log)
        if lines:
            for entry in chosen(log, run, start):
                typer.echo(json.dumps(entry, ensure_ascii=False))
        else:
            report = report_of(chosen(log, run, start))
            if as_json:
                typer.echo(report.to_json())
            else:
                from fl_bn_site.tables import wide_console

                wide_console().print(tables_of(report, found))
    except (AuditError, OSError, ValueError) as error:
        raise refused(error, 2) from error
    for fault in found.faults:
        typer.echo(f"the log is not whole: {fault}", err=True)
    if found.faults:
        raise typer.Exit(1)


def tables_of(report: Report, found: Findings) -> Group:
    """Return a table of the totals, a table of the answers that did not leave, and the hash of the last line.

    Whoever keeps this hash on another machine can detect a later change of the log.

    Args:
        report: The totals.
        found: What ``audit_check.check`` found in the log.
    """
    from rich.console import Group
    from rich.table import Table

    sent, kept = Table(box=None), Table(box=None)
    for column in ("run", "message", "section"):
        sent.add_column(column, overflow="fold")
    for column in ("rounds", "answers", "tensors", "bytes", "fewest"):
        sent.add_column(column, justify="right", no_wrap=True)
    last: tuple[str, str] | None = None
    for (run, name, message, section), total in report.totals.items():
        same, last = last == (run, message), (run, message)
        rounds = f"{total.first}" if total.first == total.last else f"{total.first}-{total.last}"
        sent.add_row(
            "" if same else name or run,
            "" if same else message,
            section,
            rounds,
            str(total.answers),
            str(total.tensors),
            f"{total.nbytes:,}",
            "" if total.smallest is None else str(total.smallest),
        )
    for column in ("time", "run", "message", "did not leave, because"):
        kept.add_column(column, overflow="fold")
    for one in report.refused:
        when, run = str(one["time"])[:19].replace("T", " "), str(one["name"] or one["run"])
        kept.add_row(when, run, str(one["message"]), f"{one['decision']}: {one['reason']}")
    ended = [
        f"{report.lines} line{'s' * (report.lines != 1)}; {report.message_bytes:,} bytes in Flower's messages, "
        "without the frames of gRPC and TLS",
        f"note this elsewhere: line {found.lines} has the hash {found.head}",
    ]
    return Group(*([sent] if sent.row_count else []), *([kept] if kept.row_count else []), *ended)
