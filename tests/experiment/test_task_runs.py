"""Whole runs of tasks other than classification, and of tables: metrics' names are those of columns, files and log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score

from fl_bn import MultiLabel, Regression
from fl_bn.checks.run import own_form
from fl_bn.data.dataset import load
from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS, Role
from fl_bn.models import build
from fl_bn.report import write_report
from fl_bn.run.assembly import forget, task
from fl_bn.sweep.compare import check_metric, comparison
from fl_bn.task import ClassificationAUC
from tests.experiment.inside import (
    OwnData,
    Samples,
    client_samples,
    config,
    dataset,
    ends_well,
    evaluate,
    kebab,
    refusing,
    rows,
    run_centralised,
    source_model,
)
from tests.experiment.test_sites import play
from tests.listed import listed

SHORT: dict[str, Any] = {
    "model": "mlp", "clients": 3, "rounds": 4, "local-steps": 4, "batch-size": 16, "learning-rate": 0.05, "evaluate-every": 2,
    "partition": "iid", "device": "cpu",
}  # fmt: skip
PACKAGE = '''
"""A task of one's own, and data for it: grades 0 to 4 that a network with one output tells as a number."""

import numpy as np
from torch import nn
from torch.nn import functional as F

from fl_bn.task import Task


class Grades(Task):
    name, metric, higher_is_better = "grades", "mean-distance", False

    def loss(self, output, targets):
        return F.smooth_l1_loss(output.squeeze(1), targets.to(output.dtype))

    def sums(self, output, targets):
        return {"distance": (output.squeeze(1) - targets).abs().sum(), "samples": len(targets)}

    def metrics(self, sums):
        return {"mean-distance": float(sums["distance"] / sums["samples"])}


def data(path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    y = np.clip(np.rint(x.sum(1) + 2), 0, 4).astype(int)
    return x[:200], y[:200], x[200:], y[200:]


def values(path):
    x, y, a, b = data(path)
    return x, x[:, :2] * 3.0 + 1, a, a[:, :2] * 3.0 + 1


def tags(path):
    x, y, a, b = data(path)
    return x, x[:, :3] > 0.5, a, a[:, :3] > 0.5


def model(classes, channels, image_size):
    return nn.Sequential(nn.Linear(channels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class Twice(nn.Module):
    """Answers with a dict, as transformers' networks do."""

    def __init__(self, classes, channels):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(channels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))

    def forward(self, x):
        return {"hidden": x, "logits": self.net(x)}


def answers_in_a_dict(classes, channels, image_size):
    return Twice(classes, channels)


def no_task():
    return "a task"


def raises():
    return {}["a"]


class Clash(Grades):
    metric = "seconds"
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of one's own, in one file; its name."""
    name = f"own_task_{abs(hash(tmp_path)):x}"
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / f"{name}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    yield name
    forget()


def run(folder: Path, **keys: Any) -> Path:
    path = run_in_process({**SHORT, "output": str(folder), "name": "run", **kebab(keys)})
    assert path is not None
    return path


@pytest.mark.parametrize("method", ["fbn", "fedbn"])
def test_a_task_of_ones_own_is_one_file_and_one_line(method: str, package: str, tmp_path: Path) -> None:
    keys = {"dataset": f"{package}:data", "model": f"{package}:model", "method": method}
    path = run(tmp_path / "runs", **keys, task=f"{package}:Grades")
    found, files = rows(path / "rounds.csv"), {file.name for file in path.iterdir()}
    own = ["mean-distance", "mean-distance-std", "mean-distance-max"]
    assert [name for name in found[0] if name.startswith(("mean-", "accuracy"))] == own
    assert float(found[3]["mean-distance"]) < float(found[1]["mean-distance"])
    assert {"mean-distance.png", "summary.md"} <= files
    assert "accuracy.png" not in files
    said = f"{float(found[3]['mean-distance']):.4g}"
    assert f"mean-distance after round 4: **{said}**" in (path / "summary.md").read_text()
    assert "accuracy" not in (path / "summary.md").read_text()
    assert f"  mean-distance {said}" in (path / "run.log").read_text()
    if METHODS[method]().keeps(Role.STATISTIC):
        worst = [float(row["mean-distance"]) for row in rows(path / "clients.csv") if row["round"] == "4"]
        assert float(found[3]["mean-distance-max"]) == max(worst) > min(worst)
    plain = run(tmp_path / "plain", **keys | {"model": f"{package}:answers_in_a_dict"})  # control: the same data and no such line
    assert float(rows(plain / "rounds.csv")[-1]["accuracy"]) > 0.3


@pytest.mark.parametrize(("name", "data"), [("regression", "values"), ("multi-label", "tags")])
def test_shipped_tasks_run_and_their_metrics_are_what_the_saved_model_measures(name: str, data: str, package: str, tmp_path: Path) -> None:
    made = config({**SHORT, "method": "fbn", "dataset": f"{package}:{data}", "task": name})
    path = run(tmp_path, method="fbn", dataset=f"{package}:{data}", task=name)
    last, of = rows(path / "rounds.csv")[-1], task(made, dataset(made).y_train)
    assert isinstance(of, Regression if name == "regression" else MultiLabel)
    assert float(last[of.metric]) > 0.5
    model = source_model(made)
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    test = Samples(dataset(made).x_test, dataset(made).y_test)
    found = evaluate(model, test, task=of).result()
    assert {key: float(last["test-loss" if key == "loss" else key]) for key in found} == pytest.approx(found)
    line = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    assert line[of.metric] == float(last[of.metric])
    assert "per-class" not in line
    assert "labels.png" not in {file.name for file in path.iterdir()}  # there are no classes to count
    union = run_centralised(config({**made.to_mapping(), "method": "fedavg", "output": ""}))
    assert union.records[-1].evaluation[of.metric] > 0.5


@pytest.mark.slow
def test_npz_files_of_values_and_of_sets_of_labels(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    brightness = x.reshape(60, -1).mean(1) / 20
    for name, y in (("values", brightness), ("tags", np.stack([x[:, 0, 0] > 99, x[:, 1, 1] > 99], 1))):
        np.savez(tmp_path / f"{name}.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    keys = {"dataset": "npz", "data_path": str(tmp_path / "values.npz"), "task": "regression"}
    assert math.isfinite(float(rows(run(tmp_path / "a", **keys, method="hbn") / "rounds.csv")[-1]["mse"]))
    tagged = run(tmp_path / "b", dataset="npz", data_path=str(tmp_path / "tags.npz"), task="multi-label", method="silobn")
    last = rows(tagged / "rounds.csv")[-1]
    assert 0 <= float(last["mean-average-precision-min"]) <= float(last["mean-average-precision"]) <= 1


FLIPPED = {"setup": "experiments.papers:Papers", "attack": "label-flip"}


@listed(
    ("keys", "about"),
    [
        ({"dataset": "{}:values"}, "task='regression'"),
        ({"dataset": "{}:tags"}, "task='multi-label'"),
        ({"dataset": "{}:data", "task": "regression"}, "values"),
        ({"dataset": "{}:values", "task": "classification"}, "values"),
        ({"dataset": "{}:values", "task": "regression", "partition": "classes"}, "values"),
        ({"dataset": "{}:tags", "task": "multi-label", "partition": "dirichlet"}, "sets of labels"),
        (
            {"dataset": "{}:values", "task": "regression", "byzantine": 1, **FLIPPED},
            "values",
        ),
        ({"dataset": "{}:data", "task": "{}:no_task"}, "str"),
        ({"dataset": "{}:data", "task": "{}:Grades"}, "mlp"),
        ({"dataset": "{}:data", "model": "{}:model", "task": "{}:Clash"}, "'seconds'"),
        ({"dataset": "{}:values", "model": "{}:model", "task": "regression"}, "(2, 2)"),
        ({"dataset": "{}:data", "task": "os:system"}, "'os:system'"),
        ({"dataset": "{}:data", "task": "{}:raises"}, "KeyError"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_client_works(keys: dict[str, Any], about: str, package: str, tmp_path: Path) -> None:
    made = {key: value.format(package) if isinstance(value, str) else value for key, value in keys.items()}
    with refusing(about):
        run(tmp_path, method="fedavg", **made)


def test_tables_of_another_task_put_the_lowest_error_first(package: str, tmp_path: Path) -> None:
    base = {**SHORT, "dataset": f"{package}:data", "model": f"{package}:model", "task": f"{package}:Grades", "rounds": 2}
    cells = comparison(["fedavg:learning-rate=0.0001", "fedavg"], [0], base, "two rates").cells(tmp_path)
    for cell in cells:
        run_in_process(cell.config.to_mapping())
        cell.write_outcome("finished", 0.0)
    (tmp_path / "sweep.toml").write_text("[report]\nat = 'best'\n")
    write_report(tmp_path)
    best = next(line for line in (tmp_path / "table.md").read_text().splitlines() if "**" in line)
    assert best.startswith("| fedavg |")
    mixed = ["fedavg", "fbn:task='auto';model='mlp'"]
    with refusing("accuracy", "mean-distance"):
        check_metric(comparison(mixed, [0], base, "mixed").cells(tmp_path / "other"))


def test_adaptation_and_recalibration_of_a_regression(package: str, tmp_path: Path) -> None:
    path = run(tmp_path, method="fedavg", dataset=f"{package}:values", task="regression")
    text = ends_well("adapt", "--model", path, "--data", f"{package}:values", "--output", tmp_path / "adapted")
    found = rows(tmp_path / "adapted" / "adaptation.csv")
    assert float(found[0]["r2_before"]) == pytest.approx(float(rows(path / "rounds.csv")[-1]["r2"]), rel=1e-5)
    assert f"{float(found[0]['r2']):.4g}" in text
    assert "r2 before" in ends_well("recalibrate", path, "--output", tmp_path / "again")


# Runs on CSV files: a folder of sites in one process, and sites that each have their own file


SCHEME: dict[str, Any] = {
    "target": "y",
    "classes": ["a", "b"],
    "numeric": {"u": {}, "v": {"mean": 100, "std": 10}},
    "categorical": {"w": ["p", "q"]},
}
OF_TABLES: dict[str, Any] = {
    "dataset": "csv", "clients": 3, "partition": "natural", "task": "classification-auc", "rounds": 2, "evaluate_every": 1,
}  # fmt: skip


def hospital(folder: Path, number: int, samples: int = 40, classes: str = "ab", regression: bool = False) -> Path:
    rng = np.random.default_rng(number)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["u,v,w,y"]
    for i in range(samples):
        label = i % len(classes)
        u, v = rng.normal(2 * label), rng.normal(100 + number, 10)
        lines.append(f"{u:.3f},{v:.3f},{'pq'[int(rng.integers(2))]},{f'{u + v / 10:.3f}' if regression else classes[label]}")
    file = folder / f"site{number}.csv"
    file.write_text("\n".join(lines) + "\n")
    scheme = {key: value for key, value in SCHEME.items() if key != "classes"} if regression else SCHEME
    (folder / "columns.toml").write_text(tomli_w.dumps(scheme))
    return file


@pytest.mark.parametrize("model", ["mlp", "table-mlp"])
def test_the_auc_of_a_run_is_scikit_learn_s_on_the_test_rows(model: str, tmp_path: Path) -> None:
    for number in range(3):
        hospital(tmp_path / "data", number)
    path = run(tmp_path / "runs", **OF_TABLES, model=model, method="fedavg", data_path=str(tmp_path / "data"))
    last, data = rows(path / "rounds.csv")[-1], load("csv", str(tmp_path / "data"))
    net = build(model, classes=2, channels=4, image_size=1)
    net.load_state_dict(load_file(path / "model.safetensors"))
    score = net.eval()(data.x_test).softmax(1)[:, 1].detach().numpy()
    assert float(last["auc"]) == pytest.approx(roc_auc_score(data.y_test, score), abs=0.01)
    assert float(last["auc"]) != pytest.approx(roc_auc_score(1 - data.y_test, score), abs=0.01)  # control: the other class's
    assert float(last["accuracy"]) == pytest.approx(evaluate(net, Samples(data.x_test, data.y_test))["accuracy"], abs=1e-6)
    one_class = ClassificationAUC()
    assert np.isnan(float(one_class.metrics(one_class.sums(torch.tensor([[1.0, 0.0]]), torch.tensor([0])))["auc"]))


def test_regression_and_a_site_of_one_row_and_one_without_a_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        hospital(tmp_path / "values", number, regression=True)
    keys = {**OF_TABLES, "task": "regression"}
    path = run(tmp_path / "runs", **keys, method="fixbn", model="table-mlp", data_path=str(tmp_path / "values"))
    assert {"r2", "mse", "mae"} <= set(rows(path / "rounds.csv")[-1])
    assert float(rows(path / "rounds.csv")[-1]["mse"]) > 0
    hospital(tmp_path / "few", 0), hospital(tmp_path / "few", 1, samples=1), hospital(tmp_path / "few", 2, classes="a")
    path = run(tmp_path / "more", **OF_TABLES, method="fedbn", model="mlp", data_path=str(tmp_path / "few"))
    trained = [row["samples"] for row in rows(path / "clients.csv") if row["round"] == "2"]
    assert trained[1] in ("", "0")  # a batch of one has no variance: it sits out
    assert float(rows(path / "rounds.csv")[-1]["auc"]) > 0
    hospital(tmp_path / "b", 0, classes="b")
    assert dataset(config(dataset="csv", data_path=str(tmp_path / "b"), model="mlp", partition="iid", clients=2)).classes == 2
    assert "label 0" in caplog.text  # no training row has this class


def test_sites_with_their_own_files_train_under_one_description(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [hospital(tmp_path / f"machine{number}", number) for number in range(3)]
    nodes = [{"dataset": "csv", "data-path": str(file)} for file in files]
    form = own_form(nodes[0], {})
    assert {key: form[key] for key in ("dataset", "classes", "channels", "image-size")} == {
        "dataset": "sites", "classes": 2, "channels": 4, "image-size": 1,
    }  # fmt: skip
    values = {**form, "method": "fedbn", "model": "mlp", "task": "classification-auc", "clients": 3, "rounds": 2, "evaluate-every": 1,
              "local-steps": 2, "device": "cpu", "output": str(tmp_path / "runs"), "name": "run"}  # fmt: skip
    found = rows(play(values, nodes) / "rounds.csv")
    assert [row["aggregated"] for row in found] == ["True", "True"]
    assert 0 < float(found[-1]["auc"]) <= 1
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
    assert "secret" in caplog.text
    files[1].write_text(whole)
    with refusing("columns-digest", form["columns-digest"]):
        client_samples(config({**values, "columns-digest": ""}), 1, own)
    description = files[1].parent / "columns.toml"
    description.write_text(description.read_text().replace('"a"', '"c"').replace('"b"', '"a"').replace('"c"', '"b"'))  # b is 0 here
    anew()
    with refusing("columns.toml", "digest"):
        client_samples(config(values), 1, own)
