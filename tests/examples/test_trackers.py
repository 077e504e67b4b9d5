"""TensorBoard, MLflow and Weights & Biases, the real libraries, without a network: what they have of a run is what rounds.csv has."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.experiment.inside import ENVIRONMENT, ROOT, in_a_pipe, override
from tests.integration.runs import TINY, table

pytestmark = pytest.mark.slow
TRACKERS = ROOT / "examples" / "trackers"
needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{package} is not installed: pip install -c constraints.txt {package}")
    for name, package in (("mlflow", "mlflow-skinny"), ("wandb", "wandb"))
}


def tracked(folder: Path, callback: str, **environment: str) -> list[dict[str, str]]:
    """Return the lines of rounds.csv of a run with that callback, in a process of its own."""
    values = {**TINY, "method": "hbn", "output": str(folder), "name": "run", "callbacks": callback, "pictures": True}
    paths = os.pathsep.join([str(ROOT), str(TRACKERS)])
    status, said = in_a_pipe("run", "--run-config", override(values), folder=folder, PYTHONPATH=paths, **environment)
    assert status == 0, said
    return table(folder / "run" / "rounds.csv")


def read(program: str, *args: str) -> Any:
    """What ``program`` prints, evaluated: the libraries warn when they are imported, and here warnings are errors."""
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout.splitlines()[-1])


MLFLOW = """
import sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("fl-bn digits").experiment_id])
found = {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in run.data.metrics}
print((run.info.status, run.data.params["method"], found, sorted(a.path for a in client.list_artifacts(run.info.run_id))))
"""
WANDB = """
import json, sys
from wandb.proto import wandb_internal_pb2 as pb
from wandb.sdk.internal.datastore import DataStore
store, rows = DataStore(), []
store.open_for_scan(sys.argv[1])
while (data := store.scan_data()) is not None:
    record = pb.Record()
    record.ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
print([{key: row[key] for key in ("_step", "loss", "test/accuracy") if key in row} for row in rows])
"""


TENSORBOARD = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
print({tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]})
"""


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    rounds = tracked(tmp_path, "tensorboard_tracker:TensorBoard")
    found = read(TENSORBOARD, str(tmp_path / "run" / "tensorboard"))
    assert found["loss"] == pytest.approx({int(row["round"]): float(row["loss"]) for row in rounds})
    assert found["test/accuracy"] == pytest.approx({int(row["round"]): float(row["accuracy"]) for row in rounds if row["accuracy"]})


@needs["mlflow"]
def test_mlflow_has_every_round(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/mlruns"
    rounds = tracked(tmp_path, "mlflow_tracker:MLflow", MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true")
    status, method, metrics, files = read(f"import os; os.environ['MLFLOW_ALLOW_FILE_STORE'] = 'true'\n{MLFLOW}", store)
    assert (status, method) == ("FINISHED", "hbn")
    assert metrics["loss"] == pytest.approx({int(row["round"]): float(row["loss"]) for row in rounds})
    assert metrics["test/accuracy"] == pytest.approx({int(row["round"]): float(row["accuracy"]) for row in rounds if row["accuracy"]})
    assert {"accuracy.png", "labels.png", "model.safetensors", "summary.md"} <= set(files)


@needs["wandb"]
def test_wandb_offline_has_every_round(tmp_path: Path) -> None:
    rounds = tracked(tmp_path, "wandb_tracker:WandB", WANDB_MODE="offline", WANDB_SILENT="true")
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in read(WANDB, str(file)) if "loss" in row]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == pytest.approx([float(row["loss"]) for row in rounds])
    assert [row.get("test/accuracy", "") for row in rows] == pytest.approx([float(a) if (a := row["accuracy"]) else "" for row in rounds])
