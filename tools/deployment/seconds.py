"""Measure the seconds per round of a deployment on this machine (three sites, TLS, real processes), and what they are
spent on.

    python -m tools.deployment.seconds --methods fedbn,hbn,fedtan --rounds 8
    python -m tools.deployment.seconds --methods hbn --evaluate-every 1,100      # what the evaluation's messages cost
    python -m tools.deployment.seconds --compose                                 # the containers of docker-compose.yml

A site's own work (start of a process, imports, training) is the time from ``Receiving`` to ``Sending`` in its
SuperNode's log. The rest of a round is spent on polling, in the server and on the wire. Each model must be, bit for
bit, that of the same run in one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from fl_bn.support.flower_config import flower_config
from tests.deployment.federation import SMALL, Federation, differing, in_process
from tools.deployment.docker_federation import SITES, DockerFederation

CONTAINER = re.compile(r"(?m)^supernode[^|]*\| +(\S+)T(\d\d:\d\d:\d\d)\.(\d{1,6})\d*Z")  # the prefix that compose adds to every line
EVENT = re.compile(r"^(\S+ \S+) .*(Receiving|Sending): (\S+) message")


@dataclass(frozen=True)
class Visit:
    """Hold a site's work on one message, from its arrival to the answer; ``begin`` and ``end`` are in seconds since 1970."""

    kind: str
    begin: float
    end: float


def visits(log: str, since: float, zone: tzinfo | None = None) -> Iterator[Visit]:
    """Yield the messages in a SuperNode's log that arrived at ``since`` or later, in their order.

    Args:
        log: The text of the log.
        since: The earliest time, in seconds since 1970.
        zone: The time zone of the times in the log; None: that of this machine.
    """
    begin: tuple[str, float] | None = None
    for line in log.splitlines():
        if not (found := EVENT.match(line)):
            continue
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=zone).timestamp()
        if found[2] == "Receiving":
            begin = (found[3], at)
        elif begin is not None:
            if begin[1] >= since:
                yield Visit(begin[0], begin[1], at)
            begin = None


Rows = Iterator[dict[str, Any]]


def by_kit(configs: Iterable[dict[str, Any]], folder: Path) -> Rows:
    with Federation(folder, ("a", "b", "c")) as federation:
        federation.start_all()
        for config in configs:
            started = time.time()
            federation.run(config)
            whole = time.time() - started
            logs = [federation.log(f"sites/{site}", "supernode") for site in federation.sites]
            yield measured(config, federation.result(config["name"]), whole, [list(visits(log, started)) for log in logs], folder)


def by_compose(configs: Iterable[dict[str, Any]], folder: Path) -> Rows:
    with DockerFederation() as federation:
        for step in (federation.build, federation.up):
            begin = time.monotonic()
            step()
            print(f"{step.__name__}: {time.monotonic() - begin:.0f} s", flush=True)
        for config in configs:
            started = time.time()
            federation.run(flower_config(config))
            whole = time.time() - started
            logs = [federation.compose("logs", "--no-color", "--timestamps", f"supernode-{i + 1}") for i in range(len(SITES))]
            logs = [CONTAINER.sub(r"\1 \2,\3", log) for log in logs]
            fetched = federation.fetch(folder / "fetched") / config["name"]
            yield measured(config, fetched, whole, [list(visits(log, started, UTC)) for log in logs], folder)


def measured(config: dict[str, Any], run: Path, whole: float, by_site: Sequence[Sequence[Visit]], folder: Path) -> dict[str, Any]:
    """Return one row of the table about a run: medians over its rounds, from the second on.

    Args:
        config: The run config.
        run: The folder of the run.
        whole: The seconds of the whole run.
        by_site: The messages of each site during the run.
        folder: The folder for the same run in one process, whose model must be equal.
    """
    lines = (run / "rounds.jsonl").read_text().splitlines()
    times = [record["seconds"] for record in map(json.loads, lines) if "seconds" in record and "client" not in record]
    times = times[:-1] if config["evaluate-every"] > len(times) > 2 else times  # the last round is always evaluated, so it is left out
    load = round(os.getloadavg()[0])
    wrong = differing(run / "model.safetensors", in_process(config, folder / "reference") / "model.safetensors")
    rounds = config["rounds"]
    each = [visit.end - visit.begin for site in by_site for visit in site]
    return {
        "method": config["method"],
        "evaluate-every": config["evaluate-every"],
        "load": load,
        "seconds a round": statistics.median(times[1:] or times),
        "slowest": max(times[1:] or times),
        "messages a round": len(by_site[0]) / rounds,
        "at the site, a message": statistics.median(each),
        "at the site, a round": statistics.median(each) * len(by_site[0]) / rounds,
        "whole run": whole,
        "same bits": not wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedbn,hbn,fedtan")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--evaluate-every", default="1", help="one or more numbers, separated by commas")
    parser.add_argument("--compose", action="store_true", help="measure docker-compose.yml's containers, not a kit's processes")
    parser.add_argument("--folder", type=Path, help="folder that keeps the kit and the results; default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        cases = itertools.product(given.methods.split(","), map(int, given.evaluate_every.split(",")))
        configs = [
            {**SMALL, "method": method, "rounds": given.rounds, "evaluate-every": every, "name": f"{method}-{every}"}
            for method, every in cases
        ]
        rows = []
        for row in (by_compose if given.compose else by_kit)(configs, folder):
            rows.append(row)
            print(json.dumps(row), flush=True)
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
