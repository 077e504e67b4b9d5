"""Print hashes of the final model and of the rounds' figures of short runs, to compare the bits of two versions of
fl-bn.

    python benchmarks/same_bits.py > new.txt
    cp benchmarks/same_bits.py /tmp && git worktree add ../old COMMIT && cd ../old
    PYTHONPATH=. python /tmp/same_bits.py > old.txt && diff old.txt NEW/new.txt

Only keys that every version has are used. BatchNorm's counters of batches are left out, because older versions did
not save them.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from typing import Any

import torch
from safetensors.torch import load_file

BASE: dict[str, Any] = {"rounds": 3, "clients": 4, "evaluate-every": 3, "pictures": False}
COLUMNS = 9  # columns of rounds.csv that are compared: those before the seconds
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"local-epochs": 1, "local-steps": 0},
    "fbn": {},
    "hbn": {},
    "fixbn": {"freeze-after": 1},
    "fedbn": {},
    "silobn, kept momentum": {"method": "silobn", "maintain-momentum": "local"},
    "fedtan": {},
    "fedtan2": {"freeze-after": 1},
    "gn": {},
    "static-bn": {},
    "scaffold": {"method": "fedavg", "objective": "scaffold", "momentum": 0.0, "scaffold-option": 1},
    "moon": {"method": "fedavg", "objective": "moon"},
    "fedsam": {"method": "hbn", "objective": "fedsam", "hbn-lam": 1.0},
    "DSGD": {"method": "fbn", "update": "gradients", "local-steps": 1},
    "adam, averaged moments, fedadam": {
        "method": "fedavg",
        "optimizer": "adam",
        "momentum": 0.0,
        "maintain-momentum": "global",
        "learning-rate": 0.001,
        "server-optimizer": "fedadam",
    },
    "attacked and defended": {
        "method": "fbn",
        "clients": 6,
        "byzantine": 1,
        "attack": "alie",
        "statistics-rule": "nnm+median",
        "update-rule": "nnm+median",
    },
    "secure": {"method": "hbn", "secure-aggregation": True},
    "fedacg, half of the clients": {"method": "fbn", "server-optimizer": "fedacg", "fraction": 0.5},
}


def main() -> None:
    """Run all cases, and print their hashes."""
    from fl_bn.flower import run_in_process

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for name, keys in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = run_in_process({**BASE, "method": name, "output": folder, **keys})
            assert path is not None
            tensors = load_file(path / "model.safetensors")
            names = sorted(key for key in tensors if "num_batches" not in key)
            model = hashlib.sha256(b"".join(key.encode() + tensors[key].numpy().tobytes() for key in names))
            rows = (path / "rounds.csv").read_text().splitlines()
            curve = hashlib.sha256("\n".join(",".join(row.split(",")[:COLUMNS]) for row in rows).encode())
        print(f"{name}: {model.hexdigest()[:16]} {curve.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
