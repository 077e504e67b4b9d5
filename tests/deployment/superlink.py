"""A fake SuperLink, which lists runs but does not compute them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from fl_bn_site.control import Node, key_of
from tests.deployment.inner import ControlError, Scalar, ServerFolder, Submitted

THEN = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


class SuperLink:
    """List the runs that were submitted; compute nothing. The sites of ``server`` are registered.

    Attributes:
        known: The runs.
        refuses: The error with which a new run is refused; empty: it is accepted.
        away: Whether the SuperLink does not respond.
        offline: The sites that are not connected.
    """

    address = "h:1"

    def __init__(self, server: ServerFolder) -> None:
        self.known: list[Submitted] = []
        self.refuses = ""
        self.away = False
        self.offline: set[str] = set()
        self._ids = {site: 100 + ord(site[0]) for site in server.sites}
        server.state.mkdir(exist_ok=True)
        server.keys_file.write_text(json.dumps({key_of(server.public_key(site)).hex(): node for site, node in self._ids.items()}))

    def runs(self) -> list[Submitted]:
        if self.away:
            raise ControlError("away")
        return list(reversed(self.known))

    def nodes(self) -> dict[int, Node]:
        return {node: Node(node, site not in self.offline, THEN) for site, node in self._ids.items()}

    def start_run(self, package: bytes, config: Mapping[str, Scalar]) -> str:
        if self.refuses:
            raise ControlError(self.refuses)
        self.known.append(Submitted(len(self.known) + 1, "running", dict(config), THEN, None, THEN, code="c0de"))
        return str(len(self.known))

    def end(self, number: int, status: str = "finished:completed") -> None:
        self.known[number - 1] = replace(self.known[number - 1], status=status, ended=THEN + timedelta(seconds=30))

    def stop(self, run: str) -> None:
        self.end(int(run), "finished:stopped")

    def status(self, run: str) -> str:
        return self.known[int(run) - 1].status

    def log(self, run: str) -> Iterator[str]:
        self.end(int(run))
        yield "a line"

    def going(self) -> list[str]:
        return [str(run.config["name"]) for run in self.known if not run.status.startswith("finished")]
