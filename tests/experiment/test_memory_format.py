"""Runs whose clients' networks lie in channels last: the same up to the order of sums, in every engine, and with what clients keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fl_bn.flower import run_in_process
from fl_bn.run.assembly import network
from fl_bn.run.config import ConfigError, RunConfig

TINY = {
    "model": "digits-cnn-small", "clients": 3, "rounds": 2, "local-steps": 2, "batch-size": 8, "evaluate-every": 2, "pictures": False,
    "learning-rate": 0.01,
}  # fmt: skip


def run(folder: Path, name: str, **keys: object) -> dict[str, Tensor]:
    path = run_in_process({**TINY, "output": str(folder), "name": name, **keys})
    assert path is not None
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedbn", "maintain-momentum": "local", "momentum": 0.9, "checkpoint-every": 1},
        {"method": "hbn", "workers": 2},
        {"method": "fbn", "engine": "vectorised"},
        {"method": "fedavg", "objective": "scaffold", "momentum": 0.0},
        {"method": "fedtan"},
        {"method": "fedavg", "secure-aggregation": True},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_a_run_is_the_same_up_to_the_order_of_sums(keys: dict[str, object], tmp_path: Path) -> None:
    usual, last = (run(tmp_path, layout, **{"memory-format": layout}, **keys) for layout in ("contiguous", "channels-last"))
    assert usual.keys() == last.keys()
    assert all(tensor.is_contiguous() for tensor in last.values())
    for name, tensor in usual.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    other = run(tmp_path, "control", **{"seed": 1}, **keys)
    assert any(not torch.allclose(other[name], tensor, rtol=1e-2, atol=1e-3) for name, tensor in usual.items())


def test_the_clients_networks_lie_so() -> None:
    cpu = torch.device("cpu")
    for layout, contiguous in (("contiguous", True), ("channels-last", False)):
        weights = [p for p in network(RunConfig(memory_format=layout), cpu).original.parameters() if p.dim() == 4]
        assert [w.is_contiguous() for w in weights] == [contiguous] * 3


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory-format.*channels-first"):
        RunConfig(memory_format="channels-first")
