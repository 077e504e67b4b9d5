"""Every example runs as a user runs it, and ends where it should."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fl_bn.flower import InProcessGrid, run_in_process

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.strip().splitlines()


def numbers(lines: list[str], pattern: str) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(pattern, line))]


def test_pure_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """One digit per client: averaged statistics fit nobody, FBN's do."""
    head, fedavg, fbn = printed("pure_torch.py", capsys)
    assert head.split() == ["method", "accuracy", "loss"]
    assert (fedavg.split()[0], fbn.split()[0]) == ("fedavg", "fbn")
    assert float(fbn.split()[1]) > 0.5 > 0.3 > float(fedavg.split()[1])


def test_own_loop(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed("own_loop.py", capsys)
    accuracies = numbers(lines, r"accuracy ([\d.]+)")
    assert len(lines) == len(accuracies) == 10
    assert accuracies[-1] > 0.5
    assert "frozen" in lines[-1]


def test_regression(capsys: pytest.CaptureFixture[str]) -> None:
    r2 = numbers(printed("regression.py", capsys), r"R2 (-?[\d.]+)")
    assert len(r2) == 15
    assert r2[-1] > 0.3


def test_multi_label(capsys: pytest.CaptureFixture[str]) -> None:
    precisions = numbers(printed("multi_label.py", capsys), r"mean average precision ([\d.]+)")
    assert len(precisions) == 4
    assert min(precisions) > 0.6


def test_segmentation(capsys: pytest.CaptureFixture[str]) -> None:
    ious = numbers(printed("segmentation.py", capsys), r"mean IoU ([\d.]+)")
    assert len(ious) == 12
    assert ious[-1] > max(0.5, ious[0])


@pytest.mark.nightly
@pytest.mark.slow
def test_the_notebook() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "federation.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before a commit"
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    last = {line.split()[0]: float(line.split()[1]) for line in said.splitlines()[:4]}
    assert set(last) == {"fedavg", "fixbn", "hbn", "fbn"}
    assert all(0 < accuracy <= 1 for accuracy in last.values())
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture
def numpy_client() -> Iterator[None]:
    folder = str(EXAMPLES / "numpy_client")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
    for name in ("client", "before"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("numpy_client")
def test_a_legacy_numpy_client_under_fixbn(caplog: pytest.LogCaptureFixture) -> None:
    app: dict[str, Any] = runpy.run_path(str(EXAMPLES / "numpy_client" / "after.py"))
    config = {"num-server-rounds": 4, "clients": 5}
    history = run_in_process(config, server_app=app["server_app"], client_app=app["client_app"])
    assert "method fixbn: found 1 BatchNorm1d" in caplog.text
    accuracy = dict(history.metrics_distributed["accuracy"])
    assert set(accuracy) == {1, 2, 3, 4}
    assert accuracy[4] > accuracy[1]


@pytest.mark.usefixtures("numpy_client")
def test_the_legacy_app_before_is_flower_s(caplog: pytest.LogCaptureFixture) -> None:
    app: dict[str, Any] = runpy.run_path(str(EXAMPLES / "numpy_client" / "before.py"))
    config = {"num-server-rounds": 1}
    app["server_app"](InProcessGrid(app["client_app"], 3, config), Context(1, 0, {}, RecordDict(), dict(config)))
    assert "aggregate_fit: received 3 results and 0 failures" in caplog.text
    assert "'accuracy'" in caplog.text


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__", ".ipynb_checkpoints")]
    assert len(names) == 10
    assert [name for name in names if f"({name})" not in listed] == []
