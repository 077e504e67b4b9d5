"""Run Flower's simulation on Ray as a subprocess, for the benchmarks in this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fl_bn.run.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent


def on_ray(config: RunConfig, cpus_per_client: float = 1.0) -> tuple[list[dict[str, Any]], float]:
    """Run ``config`` by the command flower-simulation.

    Returns:
        The record of each round, from rounds.jsonl, and the seconds of the whole command.
    """
    with tempfile.TemporaryDirectory() as folder:
        values = {**config.to_mapping(), "output": folder, "name": "ray"}
        run_config = " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        backend = {"client_resources": {"num_cpus": cpus_per_client, "num_gpus": 0.0}}
        simulation = str(Path(sys.executable).with_name("flower-simulation"))
        command = [simulation, "--app", str(ROOT), "--num-supernodes", str(config.clients), "--backend-config", json.dumps(backend)]
        begin = time.perf_counter()
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
        subprocess.run([*command, "--run-config", run_config], check=True, cwd=ROOT, env=environment, capture_output=True)
        whole = time.perf_counter() - begin
        return [json.loads(line) for line in (Path(folder) / "ray" / "rounds.jsonl").read_text().splitlines()], whole
