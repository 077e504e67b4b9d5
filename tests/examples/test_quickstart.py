"""Flower's quickstart app, before and after: few lines change, and every method runs in it."""

from __future__ import annotations

import difflib
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fl_bn.flower import InProcessGrid
from tests.examples.flower_apps import imported
from tests.listed import listed

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart_flower"
PACKAGE = "quickstart"  # a top-level client_app would be another app's, where two run in one place
METHODS = {"fixbn": "FixBN", "fedbn": "FedBN", "hbn": "HBN", "fbn": "FBN", "fedtan": "FedTAN"}
CONFIG: dict[str, Any] = {"num-server-rounds": 3, "fraction-train": 1.0, "local-epochs": 1, "lr": 0.02}


def source(folder: str, file: str, method: str = "fixbn") -> str:
    text = (QUICKSTART / folder / PACKAGE / file).read_text()
    return text.replace("FixBN(", f"{METHODS[method]}(").replace("import FixBN", f"import {METHODS[method]}").replace("fixbn", method)


def ran(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, dict[str, float]]:
    """Return the evaluations at the clients, by round."""
    with imported(folder) as (server, client):
        torch.manual_seed(0)
        server.app(InProcessGrid(client.app, 5, CONFIG), Context(1, 0, {}, RecordDict(), dict(CONFIG)))
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    return {int(k): dict(v) for k, v in eval(printed, {"nan": math.nan}).items()}  # noqa: S307 - the example prints a dict


def written(folder: Path, method: str) -> Path:
    shutil.copytree(QUICKSTART / "after", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / PACKAGE).glob("*.py"):
        file.write_text(source("after", file.name, method))
    return folder


@pytest.mark.sample("[fedtan]")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_in_it(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, before = ran(written(tmp_path / method, method), capsys), ran(QUICKSTART / "before", capsys)
    assert {round: {*metrics} for round, metrics in before.items()} == {round: {*metrics} for round, metrics in found.items()}
    assert all(math.isfinite(metrics["eval_loss"]) for metrics in found.values())
    assert found[1]["eval_loss"] != found[3]["eval_loss"]


@listed(("file", "most"), [("client_app.py", 10), ("server_app.py", 5), ("task.py", 0)])
@listed("method", METHODS)
def test_few_lines_change(file: str, most: int, method: str) -> None:
    before, after = source("before", file).splitlines(), source("after", file, method).splitlines()
    changed = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[0] == "+" and not line.startswith("+++")]
    assert len([line for line in changed if not line.startswith('+"""')]) <= most


def test_another_strategy_s_message_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path / "app", "fixbn")
    (folder / PACKAGE / "server_app.py").write_text(source("before", "server_app.py"))
    assert ran(folder, capsys) == {}  # Flower's own strategies go on without replies
    assert "use a strategy of fl_bn.flower in server_app.py" in caplog.text
