"""Publish the state of a server as metrics for Prometheus and as a health file: ``fl-bn status --serve``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fl_bn.support import durable
from fl_bn_site.control import ControlError
from fl_bn_site.folders import FolderError, ServerFolder, host_port
from fl_bn_site.membership import ago
from fl_bn_site.queue_store import QueueError
from fl_bn_site.status import RunStatus, Status, status

FRESH = 2.0  # seconds for which a status is used again before a new one is read
EVERY = 15.0  # seconds after which the health file is written again
HEALTH = "health.json"
Labels = dict[str, str]


def metrics(current: Status | None) -> str:
    """Return a status as metrics in Prometheus' text format.

    Args:
        current: The status; None: the SuperLink does not answer. Then the only metric is ``fl_bn_up``, with the value 0.
    """
    return generate_latest(_Collector(current)).decode()


class _Collector(Collector):
    """Give Prometheus' client the metrics of one status.

    Args:
        current: The status; None: the SuperLink does not answer.
    """

    def __init__(self, current: Status | None) -> None:
        self.current = current

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its values. Prometheus' client calls this."""
        current = self.current
        yield _gauge("up", "1 if the SuperLink answers", [({}, float(current is not None))])
        if current is None:
            return
        sites = [({"site": site.name}, site) for site in current.sites]
        runs = [({"run": run.name or str(run.id)}, run) for run in _newest(current)]
        seen = [(labels, datetime.fromisoformat(site.seen).timestamp()) for labels, site in sites if site.seen]

        def of_runs(value: Callable[[RunStatus], float | None]) -> list[tuple[Labels, float]]:
            return [(labels, number) for labels, run in runs if (number := value(run)) is not None]

        yield _gauge("certificate_days_left", "Days until the first certificate of the server expires", [({}, current.expires)])
        yield _gauge("sites", "Sites of server.toml", [({}, len(sites))])
        yield _gauge("sites_online", "Sites that are online", [({}, sum(site.state == "online" for _, site in sites))])
        yield _gauge("site_online", "1 if the site is online", [(labels, site.state == "online") for labels, site in sites])
        yield _gauge("site_last_seen_seconds", "Unix time at which the site was last connected", seen)
        yield _gauge("runs_waiting", "Runs in the queue", [({}, sum(not run.id for run in current.runs))])
        yield _gauge("run_state", "1 for the state that the run is in", [({**labels, "state": run.status}, 1.0) for labels, run in runs])
        yield _gauge("run_round", "Rounds that are done", of_runs(lambda run: run.round))
        yield _gauge("run_rounds", "Rounds of the whole run", of_runs(lambda run: run.rounds))
        yield _gauge("run_loss", "Mean training loss of the last round", of_runs(lambda run: run.loss))
        values = [({**labels, "metric": run.metric}, run.value) for labels, run in runs if run.value is not None]
        yield _gauge("run_metric", "The task's metric in the last round, if it was evaluated", values)
        yield _gauge("run_replies_asked", "Clients that the server asked for a reply in the last round", of_runs(lambda run: run.cohort))
        yield _gauge("run_replies_used", "Replies of the last round that were used", of_runs(lambda run: run.accepted))
        yield _gauge("run_round_seconds", "Mean duration of the last five rounds, in seconds", of_runs(lambda run: run.seconds))
        yield _gauge(
            "run_left_seconds", "Seconds to the end of the run, at the pace of the last five rounds", of_runs(lambda run: run.left)
        )
        yield _counter("run_received_bytes", "Bytes from the sites", of_runs(lambda run: run.received if run.id else None))
        yield _counter("run_sent_bytes", "Bytes to the sites", of_runs(lambda run: run.sent if run.id else None))


def _gauge(name: str, help: str, samples: Sequence[tuple[Labels, float]]) -> Metric:
    return _filled(GaugeMetricFamily(f"fl_bn_{name}", help), f"fl_bn_{name}", samples)


def _counter(name: str, help: str, samples: Sequence[tuple[Labels, float]]) -> Metric:
    """Return a metric whose values only grow. The names of such metrics end in ``_total``."""
    return _filled(CounterMetricFamily(f"fl_bn_{name}", help), f"fl_bn_{name}_total", samples)


def _filled(metric: Metric, name: str, samples: Sequence[tuple[Labels, float]]) -> Metric:
    for labels, value in samples:
        metric.add_sample(name, labels, value)
    return metric


def _newest(current: Status) -> list[Any]:
    """Return the newest status of each run. A resumed run has several ids, but one name."""
    return list({run.name or run.id: run for run in reversed(current.runs)}.values())


def health(current: Status | None, problem: str = "") -> dict[str, Any]:
    """Return the state of the server for the health file.

    Args:
        current: The status; None: the SuperLink does not answer.
        problem: Why the SuperLink does not answer; used only where ``current`` is None.

    Returns:
        ``ok``: whether the SuperLink answers and its certificates are valid; ``problem``: the reason where ``ok`` is
            False; and the fields of ``Status``. Where ``current`` is None, the only one of these fields is ``at``.
    """
    if current is None:
        return {"ok": False, "problem": problem, "at": datetime.now().astimezone().isoformat(timespec="seconds")}
    problem = f"a certificate expired {ago(current.expires)}" if current.expires < 0 else ""
    return {"ok": not problem, "problem": problem, **asdict(current)}


class Watcher:
    """Read the status of a server, at most once in ``FRESH`` seconds. Several threads may use one watcher.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
    """

    def __init__(self, server: ServerFolder, address: str = "") -> None:
        self.server, self.address = server, address
        self._lock, self._at = threading.Lock(), -FRESH
        self._last: tuple[Status | None, str] = (None, "the status has not been read yet")

    def look(self) -> tuple[Status | None, str]:
        """Return the status and an empty text; or None, and the reason why the status cannot be read."""
        with self._lock:
            if time.monotonic() - self._at >= FRESH:
                try:
                    self._last = (
                        status(ServerFolder.read(self.server.path), self.address),
                        "",
                    )  # read again, since sites may have been added or removed
                except (ControlError, QueueError, FolderError, OSError, ValueError) as error:
                    self._last = None, str(error)
                self._at = time.monotonic()
            return self._last

    def write(self) -> None:
        """Write the health file into the folder ``state`` of the server.

        Raises:
            OSError: The file cannot be written.
        """
        text = json.dumps(health(*self.look()), indent=1) + "\n"
        durable.write(self.server.state / HEALTH, text.encode(), 0o644)


def make_server(server: ServerFolder, where: str, address: str = "") -> tuple[ThreadingHTTPServer, Watcher]:
    """Make a web server that answers requests for ``/metrics`` and ``/health``. The caller has to start it.

    Args:
        server: The server's folder.
        where: The address to listen on, [HOST:]PORT; without HOST, only this machine can reach it.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.

    Returns:
        The web server, and the watcher from which it gets the status.

    Raises:
        ValueError: ``where`` is not [HOST:]PORT.
        OSError: This machine cannot listen on that address.
    """
    try:
        host, port = host_port(where if ":" in where else f"127.0.0.1:{where}")
    except ValueError:
        raise ValueError(f"--serve must be [HOST:]PORT, such as 9096 or 127.0.0.1:9096, but got {where!r}") from None
    watcher = Watcher(server, address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer one request."""
            current, problem = watcher.look()
            if self.path.partition("?")[0] == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, metrics(current))
            elif self.path == "/health":
                answer = health(current, problem)
                self._answer(200 if answer["ok"] else 503, "application/json", json.dumps(answer, indent=1) + "\n")
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
            """Print nothing, since Prometheus sends a request every few seconds."""

    return ThreadingHTTPServer((host, port), Handler), watcher


def serve(server: ServerFolder, where: str, address: str = "", say: Callable[[str], None] = print) -> None:
    """Publish the status of a server until Ctrl-C, and write the health file every ``EVERY`` seconds.

    Args:
        server: The server's folder.
        where: The address to listen on, [HOST:]PORT; without HOST, only this machine can reach it.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        say: Called with each message for the user.

    Raises:
        ValueError: ``where`` is not [HOST:]PORT.
        OSError: This machine cannot listen on that address.
    """
    web, watcher = make_server(server, where, address)
    with web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        host, port = web.server_address[:2]
        say(f"http://{host!s}:{port}/metrics and /health; {server.state / HEALTH} is written every {EVERY:.0f} s")
        last = ""
        try:
            while True:
                try:
                    watcher.write()
                    problem = watcher.look()[1]
                except OSError as error:
                    problem = f"the health file cannot be written: {error}"
                if problem and problem != last:
                    say(problem)
                last = problem
                time.sleep(EVERY)
        except KeyboardInterrupt:
            web.shutdown()
