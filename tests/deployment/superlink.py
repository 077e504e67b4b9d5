"""A fake SuperLink, which lists runs but does not compute them, and other fakes for tests of commands at a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fl_bn_site import control
from fl_bn_site.control import key_of
from tests.deployment.inner import ControlError, Scalar, Submitted, parse_overrides

THEN = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


class SuperLink:
    """List the runs that were submitted; compute nothing.

    Attributes:
        known: The runs.
        refuses: The error with which a new run is refused; empty: it is accepted.
        away: Whether the SuperLink does not respond.
        unknown: The keys of sites that are not registered.
    """

    address, authority = "h:1", Path("ca.crt")

    def __init__(self) -> None:
        self.known: list[Submitted] = []
        self.refuses = ""
        self.away = False
        self.unknown: set[bytes] = set()

    def runs(self) -> list[Submitted]:
        if self.away:
            raise ControlError("away")
        return list(reversed(self.known))

    def nodes(self, sites: list[Path]) -> list[int]:
        for site in sites:
            if key_of(site) in self.unknown:
                raise ControlError(f"does not know the key {site}")
        return [100 + ord(site.stem[0]) for site in sites]

    def start_run(self, package: Path, config: str) -> str:
        if self.refuses:
            raise ControlError(self.refuses)
        values = parse_overrides(config)
        self.known.append(Submitted(len(self.known) + 1, "running", values, THEN, None, THEN, code="c0de"))
        return str(len(self.known))

    def end(self, number: int, status: str = "finished:completed") -> None:
        self.known[number - 1] = replace(self.known[number - 1], status=status, ended=THEN + timedelta(seconds=30))

    def stop(self, run: str) -> None:
        self.end(int(run), "finished:stopped")

    def status(self, run: str) -> str:
        return self.known[int(run) - 1].status

    def log(self, run: str, after: float) -> Iterator[tuple[str, float]]:
        self.end(int(run))
        if not after:
            yield "a line\n", 1.0

    def going(self) -> list[str]:
        return [str(run.config["name"]) for run in self.known if not run.status.startswith("finished")]


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace ``flwr``, and the program that submits a package, by a shell script in ``folder``."""
    path = folder / "flwr"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(control, "program", lambda name: str(path))
    monkeypatch.setattr(control, "STARTER", (str(path),))


def named(name: str, **more: Scalar) -> dict[str, Scalar]:
    return {"name": name, "rounds": 1, **more}
