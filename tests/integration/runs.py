"""Make runs that take seconds, and return their results as bytes that can be compared."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import OrderedDict
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from fl_bn.flower import run_in_process

ROOT = Path(__file__).parents[2]
TINY: dict[str, str | int | float | bool] = {
    "dataset": "digits", "model": "mlp", "clients": 3, "rounds": 3, "local-steps": 2, "batch-size": 16, "learning-rate": 0.05,
    "learning-rate-schedule": "step", "learning-rate-decay": 0.1, "evaluate-every": 2, "partition": "dirichlet",
    "partition-parameter": 0.5, "pictures": False, "device": "cpu",
}  # fmt: skip


LIE: dict[str, str | int] = {
    "setup": "experiments.papers:Papers", "byzantine": 1, "attack": "alie-optimised", "statistics-rule": "nnm+median",
    "update-rule": "median",
}  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    """Return the variables of Flower's programs: this interpreter's first, a ``home`` that is thrown away, and a Ray of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "COLUMNS": "300"}
    return {**os.environ, **ours, "RAY_ADDRESS": "local"}


def tiny(folder: Path, method: str, **overrides: str | int | float | bool) -> Path:
    """Run ``method`` in this process; the run directory has the method's name.

    Instance norm and FedWon need a CNN, and get a small one. All other methods train an MLP.
    """
    path = run_in_process({**TINY, **own(method), "output": str(folder), "name": method, **overrides})
    assert path is not None
    return path


def own(method: str) -> dict[str, str]:
    return {"method": method} | ({"model": "tests.integration.runs:images"} if method in ("in", "fedwon") else {})


def bits(path: Path) -> dict[str, bytes]:
    """Return everything that a seed determines, as bytes: saved tensors, and the lines of rounds.jsonl without times and carrier."""
    found: dict[str, bytes] = {}
    for file in sorted(path.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[f"{file.relative_to(path)}/{name}"] = f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()
    for line in (path / "rounds.jsonl").read_text().splitlines():
        row = json.loads(line)
        del row["seconds"], row["waited"], row["carrier"]
        for client in row["clients"]:
            client.pop("waited", None)
        found[f"round {row['round']}"] = json.dumps(row).encode()
    return found


def differences(a: dict[str, bytes], b: dict[str, bytes]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as source:
        return list(csv.DictReader(source))


def images(classes: int, channels: int, image_size: int) -> nn.Module:
    """Build a convolution, a norm layer and a linear head, for images of 20 pixels."""
    layers = (nn.Conv2d(channels, 4, 3, stride=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(
        OrderedDict(zip(("conv", "norm", "relu", "pool", "flatten", "head"), (*layers, nn.Linear(16, classes)), strict=True))
    )
