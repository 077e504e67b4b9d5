"""Read what a deployment says of a run, and report the rounds of a user's own app to ``fl-bn status``.

``fl-bn submit`` fills in the run config's name of the run, sites with their nodes,
and folder of results.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_bn.exchange.settings import Certificates, ExchangeSettings
from fl_bn.federation.callbacks import Callback
from fl_bn.federation.record import RoundRecord
from fl_bn.flower.compat import log
from fl_bn.support.client_names import ClientNames, nodes_of, sites_of
from fl_bn.support.flower_config import OF_OUR_APP, OUR_APP, PROGRESS, SERVER, Scalar, registered_nodes

SITES = "client-nodes"  # a run-config key of every run that `fl-bn submit` submitted
ADDRESS = ("host", "bind", "port", "insecure")  # settings of the exchange that a kit decides
JOIN = 120.0  # seconds that a deployment's exchange waits for a client to join: a slow site may start half a minute late


def submitted(grid: object) -> Mapping[str, Scalar]:
    """Return the run config with which ``fl-bn submit`` submitted the run, else an empty one."""
    config = getattr(_run_of(grid), "override_config", None) or {}
    return config if config.get(SITES) else {}


def called_in(grid: object) -> ClientNames:
    """Return the names and nodes of the run's sites; both empty without ``fl-bn submit``."""
    config = submitted(grid)
    try:
        names, nodes = sites_of(str(config.get("client-names", ""))), nodes_of(str(config.get(SITES, "")))
    except ValueError:  # `fl-bn submit` did not write these values: the submitter gave the keys
        return ClientNames()
    return ClientNames(names, nodes, registered_nodes) if len(names) == len(nodes) else ClientNames()


def exchange_in(settings: ExchangeSettings) -> ExchangeSettings:
    """Return the settings of the layer-wise exchange for this process.

    On a deployment's server, the folder that the environment variable
    ``FL_BN_SERVER`` names has the address, the deadlines and the TLS certificates:
    server.toml, server.crt, server.key and ca.crt. Settings with certificates, or
    with ``replay``, are returned unchanged.

    Raises:
        ValueError: Only the exchange would be unencrypted, or server.toml or a
            certificate is missing or wrong.
    """
    if settings.certificates is not None or settings.carrier == "replay" or not os.environ.get(SERVER):
        return settings
    defaults = ExchangeSettings()
    if own := [name for name in ADDRESS if getattr(settings, name) != getattr(defaults, name)]:
        raise ValueError(f"this deployment encrypts its connections: leave out {', '.join(own)} of ExchangeSettings, or give certificates")
    folder = Path(os.environ[SERVER])
    try:
        lines = tomllib.loads((folder / "server.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the layer-wise exchange needs the address in {folder / 'server.toml'}, which cannot be read: {error}") from error
    certificates = Certificates(folder / "server.crt", folder / "server.key", folder / "ca.crt")
    certificates.check()
    return replace(
        settings,
        host=str(lines.get("exchange-host", "")) or defaults.host,
        port=int(lines.get("exchange-port", 0)),
        ports=int(lines.get("exchange-ports", 1)),
        certificates=certificates,
        deadline=float(lines.get("exchange-timeout", settings.deadline)),
        join_deadline=JOIN if settings.join_deadline == defaults.join_deadline else settings.join_deadline,
    )


class Progress(Callback):
    """Report the progress of a user's own app to ``fl-bn status``: one line of JSON per round in ``file``.

    Without a ``file``, or after a line that cannot be written, nothing is written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @classmethod
    def of(cls, grid: object) -> Progress:
        """Return a ``Progress`` for the run that ``grid`` serves."""
        config = submitted(grid)
        ours = getattr(_run_of(grid), "fab_id", "") == OUR_APP or all(key in config for key in OF_OUR_APP)
        name, output = Path(str(config.get("name", ""))).name, str(config.get("output", ""))
        return cls(None if ours or not name or not output else Path(output) / name / PROGRESS)

    def begin(self, rounds: int) -> None:
        """Write that the run begins. ``rounds`` 0: their number is unknown."""
        self._write({"round": 0, "rounds": rounds})

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Write the line of a finished round of ``rounds``."""
        evaluation = {name: value for name, value in record.evaluation.items() if name not in ("loss", "num-examples")}
        metric = "accuracy" if "accuracy" in evaluation else next(iter(evaluation), "accuracy")
        refused = [{"client": client.client, "refused": client.refused} for client in record.clients if client.refused]
        self._write(
            {
                "round": record.round,
                "rounds": rounds,
                "cohort": len(record.clients),
                "accepted": len(record.accepted),
                "loss": _finite(record.loss),
                metric: _finite(evaluation.get(metric)),
                "seconds": round(record.seconds, 4),
                "clients": refused,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log(logging.WARNING, "fl-bn status does not show the rounds of this run any more: %s cannot be written (%s)", self._file, error)
            self._file = None


def _run_of(grid: object) -> object:
    try:
        return getattr(grid, "run", None)
    except TypeError:  # Flower's grid before set_run
        return None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
