"""Every example runs as a user runs it, and ends where it should."""

from __future__ import annotations

import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from fl_bn.flower import InProcessGrid, run_in_process
from tests.examples.flower_apps import imported, lines_changed
from tests.listed import listed

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.strip().splitlines()


def test_pure_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """One digit per client: averaged statistics fit nobody, FBN's do."""
    head, fedavg, fbn = printed("pure_torch.py", capsys)
    assert head.split() == ["method", "accuracy", "loss"]
    assert (fedavg.split()[0], fbn.split()[0]) == ("fedavg", "fbn")
    assert float(fbn.split()[1]) > 0.5 > 0.3 > float(fedavg.split()[1])


@pytest.mark.slow
@listed(
    ("name", "metric", "lines", "least"),
    [
        ("own_loop.py", r"accuracy ([\d.]+)", 10, 0.5),
        ("regression.py", r"R2 (-?[\d.]+)", 15, 0.3),
        ("multi_label.py", r"mean average precision ([\d.]+)", 4, 0.6),
        ("segmentation.py", r"mean IoU ([\d.]+)", 12, 0.5),
    ],
)
def test_an_example_learns(name: str, metric: str, lines: int, least: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = [float(number) for number in re.findall(metric, "\n".join(printed(name, capsys)))]
    assert len(found) == lines
    assert found[-1] > least


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


@pytest.mark.slow
def test_a_legacy_numpy_client_before_and_under_fixbn(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EXAMPLES / "numpy_client"
    monkeypatch.syspath_prepend(str(folder))
    before, after = (runpy.run_path(str(folder / f"{when}.py")) for when in ("before", "after"))
    for name in ("client", "before"):
        sys.modules.pop(name, None)
    config = {"num-server-rounds": 1}
    before["server_app"](InProcessGrid(before["client_app"], 3, config), Context(1, 0, {}, RecordDict(), dict(config)))
    assert "aggregate_fit: received 3 results and 0 failures" in caplog.text
    config = {"num-server-rounds": 4, "clients": 5}
    history = run_in_process(config, server_app=after["server_app"], client_app=after["client_app"])
    assert "method fixbn: found 1 BatchNorm1d" in caplog.text
    accuracy = dict(history.metrics_distributed["accuracy"])
    assert set(accuracy) == {1, 2, 3, 4}
    assert accuracy[4] > accuracy[1]


def test_flower_s_quickstart_app_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    """Its clients evaluate the same metrics in the same rounds, and few lines change."""
    config, found = {"num-server-rounds": 3, "fraction-train": 1.0, "local-epochs": 1, "lr": 0.02}, {}
    for when in ("before", "after"):
        with imported(EXAMPLES / "quickstart_flower" / when) as (server, client):
            torch.manual_seed(0)
            server.app(InProcessGrid(client.app, 5, config), Context(1, 0, {}, RecordDict(), dict(config)))
        found[when] = eval(capsys.readouterr().out.strip().splitlines()[-1], {"nan": math.nan})  # noqa: S307 - the example prints a dict
    before, after = found.values()
    assert {round: {*dict(metrics)} for round, metrics in before.items()} == {round: {*dict(metrics)} for round, metrics in after.items()}
    losses = [dict(metrics)["eval_loss"] for metrics in after.values()]
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[-1]
    assert lines_changed(EXAMPLES / "quickstart_flower") == (13, 14)  # 9 in the client, 3 in the server, as README.md says, and pyproject's


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__", ".ipynb_checkpoints")]
    assert [name for name in names if f"({name})" not in listed] == []
