"""Whole runs of tasks other than classification, and of tables: metrics' names are those of columns, files and log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from fl_bn import Task
from fl_bn.app.assembly import task
from fl_bn.app.checks.run import own_form
from fl_bn.data.dataset import load
from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS, Role
from fl_bn.task import CLASS
from tests.experiment.inside import (
    OwnData,
    Samples,
    client_samples,
    config,
    dataset,
    evaluate,
    kebab,
    refusing,
    run_centralised,
    source_model,
)
from tests.experiment.test_sites import play
from tests.integration.runs import table
from tests.listed import listed

SHORT: dict[str, Any] = {
    "model": "mlp", "clients": 3, "rounds": 4, "local-steps": 4, "batch-size": 16, "learning-rate": 0.05, "evaluate-every": 2,
    "partition": "iid", "device": "cpu",
}  # fmt: skip


class Grades(Task):
    """A task of one's own: grades 0 to 4 that a network with one output tells as a number."""

    name, metric, higher_is_better = "grades", "mean-distance", False

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.smooth_l1_loss(output.squeeze(1), targets.to(output.dtype))

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"distance": (output.squeeze(1) - targets).abs().sum(), "samples": len(targets)}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        return {"mean-distance": float(sums["distance"] / sums["samples"])}


class Clash(Grades):
    metric = "seconds"


def data(path: str) -> tuple[np.ndarray, ...]:
    x = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    y = np.clip(np.rint(x.sum(1) + 2), 0, 4).astype(int)
    return x[:200], y[:200], x[200:], y[200:]


def values(path: str) -> tuple[np.ndarray, ...]:
    x, _, a, _ = data(path)
    return x, x[:, :2] * 3.0 + 1, a, a[:, :2] * 3.0 + 1


def tags(path: str) -> tuple[np.ndarray, ...]:
    x, _, a, _ = data(path)
    return x, x[:, :3] > 0.5, a, a[:, :3] > 0.5


def model(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def run(folder: Path, **keys: Any) -> Path:
    path = run_in_process({**SHORT, "output": str(folder), "name": "run", **kebab(keys)})
    assert path is not None
    return path


@pytest.mark.parametrize("method", ["fbn", "fedbn"])
def test_a_task_of_ones_own_is_one_file_and_one_line(method: str, tmp_path: Path) -> None:
    keys = {"dataset": f"{__name__}:data", "model": f"{__name__}:model", "method": method}
    path = run(tmp_path / "runs", **keys, task=f"{__name__}:Grades")
    found, files = table(path / "rounds.csv"), {file.name for file in path.iterdir()}
    own = ["mean-distance", "mean-distance-std", "mean-distance-max"]
    assert [name for name in found[0] if name.startswith(("mean-", "accuracy"))] == own
    assert float(found[3]["mean-distance"]) < float(found[1]["mean-distance"])
    assert {"mean-distance.png", "summary.md"} <= files
    assert "accuracy.png" not in files
    assert f"mean-distance after round 4: **{float(found[3]['mean-distance']):.4g}**" in (path / "summary.md").read_text()
    assert "accuracy" not in (path / "summary.md").read_text()
    if METHODS[method]().keeps(Role.STATISTIC):
        worst = [float(row["mean-distance"]) for row in table(path / "clients.csv") if row["round"] == "4"]
        assert float(found[3]["mean-distance-max"]) == max(worst) > min(worst)


@pytest.mark.parametrize("name", ["regression", "multi-label", "classification-auc"])
def test_shipped_tasks_run_and_their_metrics_are_what_the_saved_model_measures(name: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": f"{__name__}:{'values' if name == 'regression' else 'tags'}", "task": name, "method": "fbn"}
    if name == "classification-auc":
        keys |= {"dataset": "csv", "data-path": ",".join(str(hospital(tmp_path / "data", number)) for number in range(3)), **OF_TABLES}
    made, path = config({**SHORT, **keys}), run(tmp_path, **keys)
    last, of = table(path / "rounds.csv")[-1], task(made, dataset(made).y_train)
    assert float(last[of.metric]) > 0.5
    model = source_model(made)
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    found = evaluate(model, Samples(dataset(made).x_test, dataset(made).y_test), task=of).result()
    found = {key: value for key, value in found.items() if not key.startswith(CLASS)}
    assert {key: float(last["test-loss" if key == "loss" else key]) for key in found} == pytest.approx(found)
    assert (path / "labels.png").exists() == (name == "classification-auc")  # else there are no classes to count
    union = run_centralised(config({**made.to_mapping(), "method": "fedavg", "output": ""}))
    assert union.records[-1].evaluation[of.metric] > 0.5


@listed(
    ("keys", "about"),
    [
        ({"dataset": "{}:values"}, "task='regression'"),
        ({"dataset": "{}:data", "task": "regression"}, "values"),
        ({"dataset": "{}:values", "task": "regression", "partition": "classes"}, "values"),
        ({"dataset": "{}:data", "task": "{}:Grades"}, "mlp"),
        ({"dataset": "{}:data", "model": "{}:model", "task": "{}:Clash"}, "'seconds'"),
        ({"dataset": "{}:values", "model": "{}:model", "task": "regression"}, "(2, 2)"),
        ({"dataset": "{}:data", "task": "os:system"}, "'os:system'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_client_works(keys: dict[str, Any], about: str, tmp_path: Path) -> None:
    made = {key: value.format(__name__) if isinstance(value, str) else value for key, value in keys.items()}
    with refusing(about):
        run(tmp_path, method="fedavg", **made)


# Runs on CSV files: a folder of sites in one process, and sites that each have their own file


SCHEME: dict[str, Any] = {
    "target": "y",
    "classes": ["a", "b"],
    "numeric": {"u": {}, "v": {"mean": 100, "std": 10}},
    "categorical": {"w": ["p", "q"]},
}
OF_TABLES: dict[str, Any] = {
    "dataset": "csv", "clients": 3, "partition": "natural", "task": "classification-auc", "rounds": 2, "evaluate-every": 1,
}  # fmt: skip


def hospital(folder: Path, number: int) -> Path:
    rng = np.random.default_rng(number)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["u,v,w,y"]
    for i in range(40):
        label = i % 2
        u, v = rng.normal(2 * label), rng.normal(100 + number, 10)
        lines.append(f"{u:.3f},{v:.3f},{'pq'[int(rng.integers(2))]},{'ab'[label]}")
    file = folder / f"site{number}.csv"
    file.write_text("\n".join(lines) + "\n")
    (folder / "columns.toml").write_text(tomli_w.dumps(SCHEME))
    return file


def test_sites_with_their_own_files_train_under_one_description(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    files = [hospital(tmp_path / f"machine{number}", number) for number in range(3)]
    nodes = [{"dataset": "csv", "data-path": str(file)} for file in files]
    form = own_form(nodes[0], {})
    assert [form[key] for key in ("dataset", "classes", "channels", "image-size")] == ["sites", 2, 4, 1]
    own = {"model": "mlp", "method": "fedbn", "task": "classification-auc", "local-steps": 2, "device": "cpu"}
    values = {**OF_TABLES, "partition": "auto", **form, **own, "output": str(tmp_path / "runs"), "name": "run"}
    assert [0 < float(row["auc"]) <= 1 for row in table(play(values, nodes) / "rounds.csv")] == [True, True]
    own = OwnData("csv", str(files[1]))
    train, test, counts = client_samples(config(values), 1, own)
    assert (len(train), len(test), counts) == (32, 8, (16, 16))

    def anew() -> None:
        load.__globals__["_load"].cache_clear()
        client_samples.cache_clear()

    whole = files[1].read_text()
    files[1].write_text(whole + "1,2,secret,a\n")
    anew()
    with refusing("site1.csv", "line 42", "'w'") as caught:
        client_samples(config(values), 1, own)
    assert "secret" not in str(caught.value)  # it is told to the server
    assert caught.value.__cause__ is None
    assert "secret" in log.text
    files[1].write_text(whole)
    with refusing("columns-digest", form["columns-digest"]):
        client_samples(config({**values, "columns-digest": ""}), 1, own)
    description = files[1].parent / "columns.toml"
    description.write_text(description.read_text().replace('"a"', '"c"').replace('"b"', '"a"').replace('"c"', '"b"'))  # b is 0 here
    anew()
    with refusing("columns.toml", "digest"):
        client_samples(config(values), 1, own)
