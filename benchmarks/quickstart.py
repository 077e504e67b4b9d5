"""Time Flower's quickstart on Ray and the same federation by fl-bn: the seconds of the whole run, start included.

    python benchmarks/quickstart.py

Both have the same network, data, local steps and server rule (FedAvg): 100 clients, 10 per round, 50 rounds, one
torch thread per process. In the last row the network's tensors are in channels-last memory, which Flower's app could
use as well. The quickstart is in benchmarks/quickstart. Each run is a process of its own, timed from its start to its
end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def seconds(command: list[str], folder: Path = HERE) -> float:
    """Run a command; return how many seconds it took."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, env=ENVIRONMENT, capture_output=True)
    return time.perf_counter() - begin


def main(
    rounds: int = 50,
    clients: int = 100,
    repeat: Annotated[int, typer.Option(help="how often each command is run; the shortest time counts")] = 2,
    results: Path = HERE / "results" / "quickstart.md",
) -> None:
    """Time all commands, and write the table."""
    programs = Path(sys.executable).parent
    flower = [str(programs / "flower-simulation"), "--app", str(HERE / "quickstart"), "--num-supernodes", str(clients)]
    flower += ["--backend-config", '{"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}}', "--run-config", f"rounds={rounds}"]
    keys = f"method='fedavg' clients={clients} fraction=0.1 rounds={rounds} local-steps=5 batch-size=16 learning-rate=0.05 momentum=0.9 "
    keys += f"partition='iid' learning-rate-schedule='constant' evaluate-every={rounds} output='' pictures=false"
    ours = [sys.executable, "-c", "from fl_bn.cli.main import app; app()", "run", "--run-config"]
    commands = {
        "Flower's quickstart on Ray": flower,
        "fl-bn run": [*ours, keys],
        f"fl-bn run, workers={os.cpu_count()}": [*ours, f"{keys} workers={os.cpu_count()}"],
        f"fl-bn run, workers={os.cpu_count()}, channels last": [*ours, f"{keys} workers={os.cpu_count()} memory-format='channels-last'"],
    }
    found = {name: min(seconds(command) for _ in range(repeat)) for name, command in commands.items()}
    first = next(iter(found.values()))
    lines = [f"| {name} | {value:.1f} | {first / value:.1f} |" for name, value in found.items()]
    text = f"{rounds} rounds, {clients} clients, 10 per round, 5 steps on batches of 16, digits-cnn-small, {os.cpu_count()} cores; the "
    text += f"shorter of {repeat} runs, start included.\n\n| | seconds in all | times as fast |\n|---|---:|---:|\n"
    text += "\n".join(lines) + "\n"
    results.write_text(text)
    Console().print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
