"""Find out which sites are online and how far the runs are: ``fl-bn status``.

The SuperLink knows which sites are online. How many rounds a run has done is read from the files in its folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from fl_bn.support.client_names import ClientNames
from fl_bn_site.control import Submitted, control_of, key_of, registered
from fl_bn_site.folders import ServerFolder
from fl_bn_site.membership import days_left
from fl_bn_site.policy import SUBMITTERS, submitters_in
from fl_bn_site.runs import about_own, rounds_of, rows_of, went_on
from fl_bn_site.signing import signer_of

LAST = 5  # the number of ended runs that are shown


@dataclass(frozen=True)
class SiteStatus:
    """Describe whether a site is connected.

    Attributes:
        name: The name of the site.
        node: Flower's id of the site's node; None: the site is not registered.
        state: ``online``, ``offline`` or ``not registered``.
        seen: When the site was connected last, in ISO 8601; empty: it was never connected.
    """

    name: str
    node: int | None
    state: str
    seen: str


@dataclass(frozen=True)
class RunStatus:
    """Describe how far a run is.

    Attributes:
        id: Flower's id of the run.
        name: The name of the run's folder.
        submitter: Who has signed the run, if the server's folder has that key; empty: not known. Sites check it, not the server.
        code: The SHA-256 of the app that the sites receive; empty: not known.
        start: When the run started, or was submitted if it has not started, in ISO 8601; empty: not known.
        total: The seconds from ``start`` until the run ended, or until now; None: not known.
        status: Flower's status; ``finished:resumed``: the run
            ended early, and a later run went on with its folder.
        round: The number of the last complete round; 0: no round is complete; None: not known. It is not known where a
            later run went on with the folder, or where a user's own Flower app does not report its rounds.
        rounds: The number of rounds of the whole run; 0: not known yet.
        accepted: How many replies were used in the last round; None: no complete round is known.
        cohort: How many clients the server asked for a reply in the last round; None: no complete round is known.
        loss: The mean training loss of the last round; None: the last round has no loss.
        metric: The name of the task's metric.
        value: The metric in the last round; None: it was not evaluated.
        seconds: The mean duration of the last five rounds, in seconds; None: no complete round is known.
        left: The seconds until the end of the run if each round takes ``seconds``; None: not known, or the run has ended.
        refused: For each site whose reply was not used in the last round, its name and the reason.
        received: The bytes received from the sites.
        sent: The bytes sent to the sites.
        note: A remark on the run of a user's own Flower app, to print below the table; empty: there is none.
    """

    id: int
    name: str
    submitter: str
    code: str
    start: str
    total: float | None
    status: str
    round: int | None
    rounds: int
    accepted: int | None = None
    cohort: int | None = None
    loss: float | None = None
    metric: str = "accuracy"
    value: float | None = None
    seconds: float | None = None
    left: float | None = None
    refused: dict[str, str] = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    note: str = ""


@dataclass(frozen=True)
class Status:
    """Describe the state of a server, its sites and its runs.

    Attributes:
        at: The time of this status, in ISO 8601.
        server: The address of the Control API.
        expires: The days until the first certificate of the server expires; negative: it has expired.
        sites: The sites of server.toml, in their order.
        runs: The active runs and the last ``LAST`` that have ended, or all; the newest first.
    """

    at: str
    server: str
    expires: int
    sites: list[SiteStatus]
    runs: list[RunStatus]

    def to_json(self) -> str:
        """Return the status as JSON."""
        return json.dumps(asdict(self), indent=1)


def status(server: ServerFolder, address: str = "", all_runs: bool = False) -> Status:
    """Return the present status of a server.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        all_runs: Whether to describe all runs; else the active ones and the last ones.

    Raises:
        ControlError: The SuperLink does not answer, or ``sites/`` lacks the public key of a site.
        OSError, ValueError: A certificate of the server, or a public key in its folder ``submitters``, cannot be read.
    """
    with control_of(server, address) as control:
        nodes, runs = control.nodes(), control.runs()
    known = registered(server)
    sites = []
    for name in server.sites:
        node = nodes.get(known.get(key_of(server.public_key(name)).hex(), 0))
        if node is None:
            sites.append(SiteStatus(name, None, "not registered", ""))
        else:
            seen = node.seen.isoformat(timespec="seconds") if node.seen else ""
            sites.append(SiteStatus(name, node.id, "online" if node.online else "offline", seen))
    ended = [run for run in runs if run.status.startswith("finished")][: None if all_runs else LAST]
    shown = [run for run in runs if not run.status.startswith("finished") or run in ended]
    now, later, submitters = datetime.now().astimezone(), went_on(runs), submitters_in(server.path / SUBMITTERS)
    described = [_run(server, run, signer_of(run.config, submitters), run.id in later) for run in shown]
    return Status(now.isoformat(timespec="seconds"), control.address, days_left(server)[1], sites, described)


def _run(server: ServerFolder, run: Submitted, submitter: str, resumed: bool) -> RunStatus:
    """Return the status of a run that was submitted.

    Args:
        server: The server's folder.
        run: The run, as the SuperLink describes it.
        submitter: Who has signed it.
        resumed: Whether a later run went on with the folder. Then the rounds in the folder are those of the later run.
    """
    name = run.name
    rows = rows_of(server.results / name) if name and not resumed else []
    rounds, (tells, note) = rounds_of(server, run.config), about_own(server, run)
    last: dict[str, Any] = rows[-1] if rows else {}
    pace = [float(row["seconds"]) for row in rows[-5:]]
    seconds = sum(pace) / len(pace) if pace else None
    left = None if seconds is None or not rounds or run.status.startswith("finished") else max(0, rounds - last["round"]) * seconds
    names = [part for part in str(run.config.get("client-names", "")).split(",") if part]
    client_names = ClientNames(tuple(names))
    unused_rows = [row for row in last.get("clients", ()) if row.get("refused")]
    columns = list(last)
    metric = columns[columns.index("loss") + 1] if "loss" in columns[:-1] else "accuracy"  # the metric of every task stands behind the loss
    start = run.started or run.submitted
    end = run.ended or datetime.now().astimezone()
    return RunStatus(
        run.id,
        name,
        submitter,
        run.code,
        start.astimezone().isoformat(timespec="seconds") if start else "",
        round((end - start).total_seconds(), 1) if start else None,
        "finished:resumed" if resumed and run.status.startswith("finished") else run.status,
        None if resumed or not tells else last.get("round", 0),
        rounds,
        last.get("accepted"),
        last.get("cohort"),
        last.get("loss"),
        metric,
        last.get(metric),
        seconds,
        left,
        {client_names.site(row["client"]) or client_names.client(row["client"]): str(row["refused"]) for row in unused_rows},
        *run.nbytes,
        note,
    )
