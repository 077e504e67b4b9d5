"""Define the command ``fl-bn doctor``, which imports torch only when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fl_bn.support.extras import DEPLOYMENT, need
from fl_bn.support.finding import Finding

COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def doctor(
    folder: Annotated[
        Path | None, typer.Argument(help="kit/server or kit/sites/NAME; default: check this machine and the run config only")
    ] = None,
    run_config: Annotated[str, typer.Option("--run-config", help="the keys of the planned run: \"method='hbn' batch-size=32\"")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list of {status, check, text, do} in place of lines")] = False,
) -> None:
    """Check this machine before a run: versions, GPU, disks, network, certificates, data, model.

    It prints one line per check: ok, warn or fail, what the check found, and what
    to do about it. The exit code is 1 if a check fails, else 0.
    """
    findings, stdout = [], sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # so that the output of the user's data function is not mixed with the findings
        for finding in _findings(folder, run_config):
            findings.append(finding)
            if not as_json:
                line = str(finding)
                typer.echo(typer.style(line[:4], fg=COLOURS[finding.status]) + line[4:], file=stdout)
    counts = {status: sum(finding.status == status for finding in findings) for status in COLOURS}
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["fail"]:
        raise typer.Exit(1)


def _findings(folder: Path | None, run_config: str) -> Iterator[Finding]:
    if folder is None:
        from fl_bn.app.checks.run import diagnose

        return diagnose(run_config)
    need("a check of a folder of a kit", *DEPLOYMENT)
    from fl_bn_site import doctor as deployed

    return deployed.diagnose(folder, run_config)
