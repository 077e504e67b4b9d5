"""Runs on CSV files: a folder of sites in one process, and sites that each have their own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score

from fl_bn.checks.experiment import own_form
from fl_bn.cli.advise import _keys
from fl_bn.data.dataset import load
from fl_bn.models import build
from fl_bn.task import ClassificationAUC
from tests.experiment.inside import OwnData, Samples, client_samples, config, dataset, evaluate, refusing, rows
from tests.experiment.test_sites import play
from tests.experiment.test_task_runs import run

SCHEME: dict[str, Any] = {
    "target": "y",
    "classes": ["a", "b"],
    "numeric": {"u": {}, "v": {"mean": 100, "std": 10}},
    "categorical": {"w": ["p", "q"]},
}
KEYS: dict[str, Any] = {
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
    path = run(tmp_path / "runs", **KEYS, model=model, method="fedavg", data_path=str(tmp_path / "data"))
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
    keys = {**KEYS, "task": "regression"}
    path = run(tmp_path / "runs", **keys, method="fixbn", model="table-mlp", data_path=str(tmp_path / "values"))
    assert {"r2", "mse", "mae"} <= set(rows(path / "rounds.csv")[-1])
    assert float(rows(path / "rounds.csv")[-1]["mse"]) > 0
    hospital(tmp_path / "few", 0), hospital(tmp_path / "few", 1, samples=1), hospital(tmp_path / "few", 2, classes="a")
    path = run(tmp_path / "more", **KEYS, method="fedbn", model="mlp", data_path=str(tmp_path / "few"))
    trained = [row["samples"] for row in rows(path / "clients.csv") if row["round"] == "2"]
    assert trained[1] in ("", "0")  # a batch of one has no variance: it sits out
    assert float(rows(path / "rounds.csv")[-1]["auc"]) > 0
    hospital(tmp_path / "b", 0, classes="b")
    assert dataset(config(dataset="csv", data_path=str(tmp_path / "b"), model="mlp", partition="iid", clients=2)).classes == 2
    assert "'a'" in caplog.text  # no training row has this class


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


def test_advise_finds_a_table_by_its_description_and_by_its_name(tmp_path: Path) -> None:
    file = hospital(tmp_path, 0)
    assert _keys(str(tmp_path), "")["dataset"] == "csv"
    assert _keys(str(file), "") == {"dataset": "csv", "data-path": str(file)}
    (tmp_path / "columns.toml").unlink()
    assert _keys(str(tmp_path), "")["dataset"] == "folder"  # control
