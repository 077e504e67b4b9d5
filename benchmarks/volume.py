"""Reproduce Table 3 of the FedTAN paper from counted payloads: bytes exchanged per round by 5 clients with ResNet-20.

    python benchmarks/volume.py

One round of each method is run. The bytes of the arrays are counted as in the paper: what a client sent counts 5
times; what it received counts once, because the server broadcasts it. 1 MB = 1024 * 1024 bytes.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fl_bn.flower import run_in_process

CLIENTS = 5
ROWS = [
    ("FedAvg + BN", "fedavg", "merged", 6.2049),
    ("FedAvg + GN", "gn", "merged", 6.1734),
    ("FedTAN, 3L + 1", "fedtan", "paper", 6.2679),
    ("FedTAN, 2L + 1", "fedtan", "merged", 6.2679),
]


def one_round(method: str, schedule: str) -> dict[str, str]:
    """Run one round, and return its line of rounds.csv."""
    with tempfile.TemporaryDirectory() as folder:
        path = run_in_process(
            {
                "method": method, "fedtan-schedule": schedule, "model": "resnet20", "image-size": 32, "clients": CLIENTS, "rounds": 1,
                "local-steps": 1, "batch-size": 8, "partition": "classes", "partition-parameter": 2.0, "output": folder, "pictures": False,
                "device": "cpu",
            }
        )  # fmt: skip
        assert path is not None
        with (Path(path) / "rounds.csv").open(newline="") as file:
            return next(csv.DictReader(file))


def main() -> None:
    """Run one round of each method, and print its bytes beside those in the paper."""
    table = Table("", "exchanges", "one client up (bytes)", "down (bytes)", "5 up + 1 down (MB)", "in the paper (MB)")
    for name, method, schedule, printed in ROWS:
        row = one_round(method, schedule)
        up, down = (sum(int(row[key]) for key in row if key.startswith(f"bytes-{way}-")) for way in ("up", "down"))
        table.add_row(
            name, str(int(row["exchanges"]) + 1), f"{up:,}", f"{down:,}", f"{(CLIENTS * up + down) / 1024**2:.4f}", f"{printed:.4f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
