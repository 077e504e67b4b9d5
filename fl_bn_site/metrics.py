"""The state of a server as metrics in Prometheus' text format, and as a health file: ``fl-bn status --serve``.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fl_bn.support import durable
from fl_bn_site.control import ControlError
from fl_bn_site.folders import FolderError, ServerFolder, host_port
from fl_bn_site.membership import ago
from fl_bn_site.queue import QueueError
from fl_bn_site.status import Status, status

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
FRESH = 2.0  # seconds for which an answer is given again
EVERY = 15.0  # seconds between health files
HEALTH = "health.json"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """``samples``: labels and value."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Labels, float]]

    def __str__(self) -> str:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        for labels, value in self.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{self.name}{f'{{{inside}}}' if inside else ''} {value:.17g}")
        return "\n".join(lines) + "\n"


def metrics(found: Status | None) -> str:
    """Prometheus' text of ``found``; None: the SuperLink does not answer."""
    up = Metric("fl_bn_up", "gauge", "1 if the SuperLink answers", [({}, float(found is not None))])
    return str(up) if found is None else "".join(map(str, (up, *_metrics(found))))


def _metrics(found: Status) -> list[Metric]:
    sites = [({"site": site.name}, site) for site in found.sites]
    runs = [({"run": run.name or str(run.id)}, run) for run in _newest(found)]
    seen = [(labels, datetime.fromisoformat(site.seen).timestamp()) for labels, site in sites if site.seen]

    def of_runs(name: str, kind: str, help: str, value: Callable[[Any], float | None]) -> Metric:
        return Metric(name, kind, help, [(labels, number) for labels, run in runs if (number := value(run)) is not None])

    return [
        Metric("fl_bn_certificate_days_left", "gauge", "Days until the server's first certificate ends", [({}, found.expires)]),
        Metric("fl_bn_sites", "gauge", "Sites of server.toml", [({}, len(sites))]),
        Metric("fl_bn_sites_online", "gauge", "Sites that are online", [({}, sum(site.state == "online" for _, site in sites))]),
        Metric("fl_bn_site_online", "gauge", "1 if the site is online", [(labels, site.state == "online") for labels, site in sites]),
        Metric("fl_bn_site_last_seen_seconds", "gauge", "Unix time at which the site was last here", seen),
        Metric("fl_bn_runs_waiting", "gauge", "Runs in the queue", [({}, sum(not run.id for run in found.runs))]),
        Metric("fl_bn_run_state", "gauge", "1 for the state that the run is in", [({**k, "state": run.status}, 1.0) for k, run in runs]),
        of_runs("fl_bn_run_round", "gauge", "Rounds that are done", lambda run: run.round),
        of_runs("fl_bn_run_rounds", "gauge", "Rounds that there will be", lambda run: run.rounds),
        of_runs("fl_bn_run_loss", "gauge", "Mean training loss of the last round", lambda run: run.loss),
        Metric(
            "fl_bn_run_metric",
            "gauge",
            "The task's metric in the last round that was evaluated",
            [({**k, "metric": run.metric}, run.value) for k, run in runs if run.value is not None],
        ),
        of_runs("fl_bn_run_replies_asked", "gauge", "Clients that were asked in the last round", lambda run: run.cohort),
        of_runs("fl_bn_run_replies_used", "gauge", "Replies of the last round that were used", lambda run: run.accepted),
        of_runs("fl_bn_run_round_seconds", "gauge", "Mean seconds of the last rounds", lambda run: run.seconds),
        of_runs("fl_bn_run_left_seconds", "gauge", "Seconds to the end at that pace", lambda run: run.left),
        of_runs("fl_bn_run_received_bytes_total", "counter", "Bytes from the sites", lambda run: run.received if run.id else None),
        of_runs("fl_bn_run_sent_bytes_total", "counter", "Bytes to the sites", lambda run: run.sent if run.id else None),
    ]


def _newest(found: Status) -> list[Any]:
    """Each run once, under its name: one that goes on has several ids."""
    return list({run.name or run.id: run for run in reversed(found.runs)}.values())


def health(found: Status | None, problem: str = "") -> dict[str, Any]:
    """``ok``: the SuperLink answers and its certificates are valid; ``problem``: why not; and the whole status."""
    if found is None:
        return {"ok": False, "problem": problem, "at": datetime.now().astimezone().isoformat(timespec="seconds")}
    problem = f"a certificate ended {ago(found.expires)}" if found.expires < 0 else ""
    return {"ok": not problem, "problem": problem, **asdict(found)}


class Watcher:
    """Asks for the status, at most every ``FRESH`` seconds, and says how it is. Safe to call from several threads."""

    def __init__(self, server: ServerFolder, address: str = "") -> None:
        self.server, self.address = server, address
        self._lock, self._at = threading.Lock(), -FRESH
        self._last: tuple[Status | None, str] = (None, "nobody has looked yet")

    def look(self) -> tuple[Status | None, str]:
        """The status, or None and what is wrong."""
        with self._lock:
            if time.monotonic() - self._at >= FRESH:
                try:
                    self._last = status(ServerFolder.read(self.server.path), self.address), ""  # anew: sites come and go
                except (ControlError, QueueError, FolderError, OSError, ValueError) as error:
                    self._last = None, str(error)
                self._at = time.monotonic()
            return self._last

    def write(self) -> None:
        """The health file, in the server's ``state``. Raises OSError."""
        text = json.dumps(health(*self.look()), indent=1) + "\n"
        durable.write(self.server.state / HEALTH, text.encode(), 0o644)


def make_server(server: ServerFolder, where: str, address: str = "") -> tuple[ThreadingHTTPServer, Watcher]:
    """Answers ``/metrics`` and ``/health`` at ``where``, [HOST:]PORT. Raises ValueError, OSError."""
    host, port = host_port(where if ":" in where else f"127.0.0.1:{where}")
    watcher = Watcher(server, address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found, problem = watcher.look()
            if self.path.partition("?")[0] == "/metrics":
                self._answer(200, CONTENT, metrics(found))
            elif self.path == "/health":
                told = health(found, problem)
                self._answer(200 if told["ok"] else 503, "application/json", json.dumps(told, indent=1) + "\n")
            else:
                self._answer(404, "text/plain; charset=utf-8", "/metrics or /health\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a scrape every few seconds is no news."""

    return ThreadingHTTPServer((host, port), Handler), watcher


def serve(server: ServerFolder, where: str, address: str = "", say: Callable[[str], None] = print) -> None:
    """Publish the status until Ctrl-C, and write it to the health file every ``EVERY`` seconds. Raises ValueError, OSError."""
    web, watcher = make_server(server, where, address)
    with web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        host, port = web.server_address[:2]
        say(f"http://{host!s}:{port}/metrics and /health; {server.state / HEALTH} every {EVERY:.0f} s")
        told = ""
        try:
            while True:
                try:
                    watcher.write()
                    problem = watcher.look()[1]
                except OSError as error:
                    problem = f"the health file cannot be written: {error}"
                if problem and problem != told:
                    say(problem)
                told = problem
                time.sleep(EVERY)
        except KeyboardInterrupt:
            web.shutdown()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
