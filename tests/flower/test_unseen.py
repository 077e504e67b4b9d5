"""What clients keep of BatchNorm is told once, where the run says so, and averaged for clients that were not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_bn.flower import run_in_process
from fl_bn.run.config import ConfigError

RUN: dict[str, Any] = {
    "model": "mlp", "dataset": "digits-plain", "shifts": "none,invert,contrast", "partition": "domain", "clients": 3, "rounds": 2,
    "local-steps": 2, "evaluate-every": 2, "pictures": False,
}  # fmt: skip


def made(folder: Path, **values: Any) -> Path:
    path = run_in_process({**RUN, "output": str(folder), **{k.replace("_", "-"): v for k, v in values.items()}})
    assert path is not None
    return path


@pytest.mark.parametrize(
    ("method", "keys"), [("fedbn", {"weight", "bias", "running_mean", "running_var"}), ("silobn", {"running_mean", "running_var"})]
)
def test_the_average_is_that_of_the_clients_own_files(method: str, keys: set[str], tmp_path: Path) -> None:
    run = made(tmp_path, method=method, unseen_client=True)
    told, own = load_file(run / "unseen-client.safetensors"), [load_file(p) for p in sorted((run / "clients").iterdir())]
    assert len(own) == 3
    assert {name.rpartition(".")[2] for name in told} == keys
    for name, tensor in told.items():
        assert torch.allclose(tensor, torch.stack([client[name].double() for client in own]).mean(0).float(), rtol=1e-6, atol=1e-7)
        assert not torch.equal(tensor, own[0][name])  # control: the clients differ
    assert ",kept," in (run / "disclosure.csv").read_text()


def test_nothing_is_told_unless_the_run_says_so(tmp_path: Path) -> None:
    run = made(tmp_path, method="fedbn")
    assert not (run / "unseen-client.safetensors").exists()
    assert ",kept," not in (run / "disclosure.csv").read_text()


def test_methods_that_keep_nothing_of_batch_norm_are_not_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unseen-client=true has no effect with method='hbn'"):
        made(tmp_path, method="hbn", unseen_client=True)


def test_it_changes_no_number_of_the_run(tmp_path: Path) -> None:
    files = [
        made(tmp_path / name, method="fedbn", unseen_client=asked) / "model.safetensors" for name, asked in (("a", True), ("b", False))
    ]
    one, two = map(load_file, files)
    assert all(torch.equal(one[name], two[name]) for name in one)
