"""A trained model goes on: ``hold-out`` and ``fl-bn adapt`` for a domain in no run, ``fl-bn recalibrate`` for exact statistics."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fl_bn.federation.recalibration import HOW
from fl_bn.flower import run_in_process
from fl_bn.run.adapt import newcomer
from fl_bn.run.former import PAPERS
from fl_bn.run.history import read_rows
from fl_bn.run.recalibrate import planned
from tests.experiment.inside import (
    client_samples,
    config,
    dataset,
    ends_well,
    ends_with_a_sentence,
    evaluate,
    parse_overrides,
    refusing,
    rows,
    source_model,
)
from tests.experiment.small_data import small_npz
from tests.integration.runs import tiny
from tests.listed import listed

KEYS: dict[str, Any] = {
    "setup": PAPERS,
    "dataset": "digits-plain", "image-size": 8, "shifts": "none,invert,contrast,background", "hold-out": "contrast", "model": "simple-cnn",
    "partition": "domain", "clients": 3, "rounds": 2, "local-steps": 12, "evaluate-every": 2, "pictures": False, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedbn", "silobn", "fedavg"):
        run_in_process({**KEYS, "method": method, "output": str(folder), "name": method})
    return folder


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / run.name)
    return folder / run.name


def adapted(run: Path, *args: object) -> str:
    return ends_well("adapt", "--model", run, *args)


def own_data(folder: Path, name: str, channels: int = 3) -> str:
    return f"npz:{small_npz(folder, name, 0.5, classes=10, side=8, colours=channels)}"


def test_a_domain_held_out_is_in_none_of_the_runs_data_and_the_others_are_as_they_were() -> None:
    data, whole = dataset(config(KEYS)), dataset(config({**KEYS, "hold-out": ""}))
    assert data.domains == ("none", "invert", "background")
    assert whole.domains == ("none", "invert", "contrast", "background")
    for name in data.domains:
        for split in ("train", "test"):
            ours, theirs = (getattr(d, f"x_{split}")[getattr(d, f"domain_{split}") == d.domains.index(name)] for d in (data, whole))
            assert torch.equal(ours, theirs)
    assert len(data.x_train) < len(whole.x_train)
    own = newcomer(config(KEYS))
    assert (own.name, own.seen, newcomer(config(KEYS), "none").seen) == ("contrast", False, True)
    assert torch.equal(own.x, whole.x_train[whole.domain_train == 2])
    for client in range(3):
        assert torch.equal(client_samples(config(KEYS), client)[1].x, data.x_test[data.domain_test == client])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedavg"])
def test_the_command_end_to_end(method: str, runs: Path, tmp_path: Path) -> None:
    run = copied(runs / method, tmp_path)
    text = adapted(run)
    folder, found = run / "adapt-contrast", rows(run / "adapt-contrast" / "adaptation.csv")
    assert [row["how"] for row in found] == list(HOW)
    test = newcomer(config({**KEYS, "method": method})).test
    for row in found:
        model = copy.deepcopy(source_model(config({**KEYS, "method": method})))
        model.load_state_dict(load_file(folder / f"model-{row['how']}.safetensors"), strict=True)
        if row["how"] != "test-batch":
            assert evaluate(model, test)["accuracy"] == pytest.approx(float(row["accuracy"]))
        assert f"{100 * float(row['accuracy']):.1f}" in text
    by_how = {row["how"]: float(row["accuracy"]) for row in found}
    assert by_how["average-affine"] > float(found[0]["accuracy_before"]) + 0.2  # a third of the contrast is what own statistics undo
    assert {path.name for path in folder.iterdir()} == {"adaptation.csv", *(f"model-{how}.safetensors" for how in HOW)}


def test_data_of_ones_own_and_a_domain_that_the_run_knew(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "silobn", tmp_path)
    adapted(run, "--data", own_data(tmp_path, "mine"), "--how", "recompute,test-batch", "--samples", 30)
    found = rows(run / "adapt-mine" / "adaptation.csv")
    assert [(row["how"], row["statistics_samples"]) for row in found] == [("recompute", "30"), ("test-batch", "0")]
    args = ("--domain", "invert", "--output", tmp_path / "out", "--how")
    assert "beware: the run was trained on invert" in adapted(run, *args, "recompute")
    ends_with_a_sentence("adapt", "--model", run, *args, "test-batch", about=str(tmp_path / "out"))  # is not overwritten
    assert [file.name for file in (tmp_path / "out").glob("model-*")] == ["model-recompute.safetensors"]


def test_without_the_clients_models_their_average_will_do(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "fedbn", tmp_path)
    adapted(run, "--how", "average-affine", "--output", tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model-average-affine.safetensors")
    states = [load_file(file) for file in sorted((run / "clients").iterdir())]
    shared = load_file(run / "model.safetensors")
    affine = [name for name in states[0] if name not in shared and name.endswith(("weight", "bias"))]
    shutil.rmtree(run / "clients")
    ends_with_a_sentence("adapt", "--model", run, about="fedbn")
    save_file({name: torch.stack([state[name] for state in states]).double().mean(0) for name in affine}, run / "unseen-client.safetensors")
    adapted(run)
    found = rows(run / "adapt-contrast" / "adaptation.csv")
    assert ([row["how"] for row in found], found[0]["accuracy_before"]) == (["average-affine", "recompute", "test-batch"], "")
    again = load_file(run / "adapt-contrast" / "model-average-affine.safetensors")
    assert all(torch.allclose(again[name], tensor, rtol=1e-5) for name, tensor in whole.items())


# fl-bn recalibrate: exact statistics, and what they are worth


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on digits, a few classes per client."""
    return tiny(tmp_path_factory.mktemp("runs"), "fedavg", **{"partition": "classes", "partition-parameter": 4.0, "rounds": 4})


def test_a_finished_run(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exact"
    text = ends_well("recalibrate", trained, "--output", folder, "--run-config", "pictures=true")
    found = read_rows(folder / "rounds.jsonl")[0]
    assert [row["round"] for row in found] == list(range(len(found)))
    assert f"accuracy before: **{found[0]['accuracy']:.1%}**, after: **{found[-1]['accuracy']:.1%}**" in text
    assert re.search(r"1 pass over (\d) BatchNorm layers: layer by layer, with \1 exchanges, which makes all of them exact", text)
    before, after = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "running" in name}
    files = {path.name for path in folder.iterdir()}
    assert {"recalibration.csv", "summary.md", "rounds.csv", "labels.png", "config.toml"} <= files - {"accuracy.png"} == files
    layers = [name.removesuffix(".running_mean") for name in before if name.endswith("running_mean")]
    lines = [(line["pass"], line["layer"]) for line in rows(folder / "recalibration.csv")]
    assert lines == [(str(row["round"]), layer) for row in found[1:] for layer in layers]


def test_weights_that_no_federation_trained(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "mine.pt"
    torch.save(load_file(trained / "model.safetensors"), weights)
    keys = "model='mlp' dataset='digits'"
    ends_well("recalibrate", weights, "--run-config", f"{keys} device='cpu' pictures=false", "--passes", "1")
    assert len(rows(tmp_path / "mine-recalibrated" / "rounds.csv")) == 2
    made = config(parse_overrides(str(tmp_path / "mine-recalibrated" / "config.toml")))
    assert (made.clients, made.partition, made.method, made.calibrate) == (1, "iid", "fedavg", 1)
    ends_with_a_sentence("recalibrate", weights, "--run-config", keys, about="mine-recalibrated")


@pytest.fixture(scope="module")
def wrong(runs: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, and with what is none."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty").mkdir()
    (folder / "notes.txt").touch()
    for name in ("half", "none"):
        shutil.copytree(runs / "fedavg", folder / name)
    (folder / "half" / "model.safetensors").write_bytes(b"half a file")
    (folder / "none" / "model.safetensors").unlink()
    own_data(folder, "grey", channels=1)
    tiny(folder, "gn"), tiny(folder, "fedbn")
    shutil.copytree(trained, folder / "trained")
    shutil.copytree(runs / "fedavg", folder / "held-out")
    return folder


@listed(
    ("command", "about"),
    [
        ("adapt --model held-out --how guess", "--how"),
        ("adapt --model held-out --domain fog", "'fog'"),
        ("adapt --model held-out --domain none --data digits", "--data"),
        ("adapt --model held-out --data nowhere", "dataset"),
        ("adapt --model held-out --data npz:nowhere.npz", "'nowhere.npz'"),
        ("adapt --model held-out --data npz:grey.npz", "3 channels"),
        ("adapt --model empty", "config.toml"),
        ("adapt --model half", "model.safetensors"),
        ("adapt --model none", "model.safetensors"),
        ("recalibrate gn", "'gn'"),
        ("recalibrate fedbn", "'fedbn'"),
        ("recalibrate nowhere", "nowhere"),
        ("recalibrate empty", "config.toml"),
        ("recalibrate notes.txt", ".txt"),
        ("recalibrate trained --run-config rounds=3", "rounds"),
        ("recalibrate trained --run-config learning-rate=0.3", "learning-rate"),
        ("recalibrate trained --run-config model='digits-cnn-small'", "network"),
    ],
)
def test_bad_input_ends_with_a_sentence(command: str, about: str, wrong: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wrong)
    before = sorted(wrong.rglob("*"))
    ends_with_a_sentence(*command.split(), about=about)
    assert sorted(wrong.rglob("*")) == before  # refused before a folder is made


def test_what_stays_at_the_sites_or_was_replaced_by_a_setup_is_refused(trained: Path) -> None:
    with refusing("rounds=0"):
        planned(trained, {"dataset": "sites", "classes": 10, "channels": 1, "image-size": 8})
    with refusing("contrast", "--data"):
        newcomer(config({**KEYS, "evaluate-on": "training"}))
