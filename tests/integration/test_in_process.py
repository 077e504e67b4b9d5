"""Whole runs in this process, through the ServerApp and ClientApp that ``flwr run`` loads: reproducible, and complete on disk."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fl_bn.app.assembly import source_model
from fl_bn.app.config import RunConfig
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.methods import METHODS
from tests.integration.runs import TINY, table, tiny

FILES = {
    "config.toml", "environment.json", "rounds.csv", "clients.csv", "rounds.jsonl", "model.safetensors", "summary.md", "accuracy.png",
    "labels.png", "disclosure.csv", "run.log",
}  # fmt: skip


@pytest.mark.parametrize("method", ["hbn", "fedbn"])
def test_a_run_leaves_all_its_files(method: str, tmp_path: Path) -> None:
    path = tiny(tmp_path, method, pictures=True)
    personal = METHODS[method]().personal
    own = {"clients"} if personal else {"recalibration.csv"}  # HBN's statistics are measured before round 1
    assert {file.name for file in path.iterdir()} == FILES | own
    rounds = table(path / "rounds.csv")
    assert [row["round"] for row in rounds] == ["1", "2", "3"]
    assert [row["accuracy"] != "" for row in rounds] == [False, True, True]
    clients = table(path / "clients.csv")
    assert [(row["round"], row["client"]) for row in clients] == [(str(r), str(c)) for r in (1, 2, 3) for c in range(3)]
    assert [row["accuracy"] != "" for row in clients] == [personal and r > 1 for r in (1, 2, 3) for _ in range(3)]
    summary = (path / "summary.md").read_text()
    assert f"# {method} on digits" in summary
    assert f"accuracy after round 3: **{float(rounds[-1]['accuracy']):.1%}**" in summary
    assert "failed" not in summary
    assert json.loads((path / "environment.json").read_text())["packages"]["flwr"] == version("flwr")
    if personal:
        assert sorted(file.name for file in (path / "clients").iterdir()) == [f"client-{i}.safetensors" for i in range(3)]


def test_a_failing_run_raises_and_leaves_what_it_had(tmp_path: Path) -> None:
    values = {**TINY, "method": "fedavg", "output": str(tmp_path), "name": "wild", "learning-rate": 1e30, "max-failed-rounds": 2}
    with pytest.raises(RunFailed, match="2 rounds in a row had too few usable replies"):
        run_in_process({**values, "pictures": True})
    path = tmp_path / "wild"
    assert "**The run failed** after 2 of 3 rounds: RunFailed: 2 rounds in a row" in (path / "summary.md").read_text()
    assert {file.name for file in path.iterdir()} == FILES
    model, start = load_file(path / "model.safetensors"), source_model(RunConfig.from_mapping(TINY)).state_dict()
    assert all(torch.equal(model[k], start[k]) for k in model)
    refused = [row["refused"] for row in table(path / "clients.csv")]
    assert all("not finite" in reason for reason in refused)
