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

from fl_bn.app.adapt import newcomer
from fl_bn.app.former import PAPERS
from fl_bn.app.history import read_rows
from fl_bn.federation.recalibration import HOW
from fl_bn.flower import run_in_process
from tests.experiment.inside import config, dataset, ends_well, ends_with_a_sentence, evaluate, parse_overrides, source_model
from tests.experiment.small_data import small_npz
from tests.integration.runs import table, tiny
from tests.listed import listed

KEYS: dict[str, Any] = {
    "setup": PAPERS,
    "dataset": "digits-plain", "image-size": 8, "shifts": "none,invert,contrast,background", "hold-out": "contrast", "model": "simple-cnn",
    "partition": "domain", "clients": 3, "rounds": 2, "local-steps": 12, "evaluate-every": 2, "pictures": False, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedbn", "fedavg"):
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
    for name in data.domains:
        for split in ("train", "test"):
            ours, theirs = (getattr(d, f"x_{split}")[getattr(d, f"domain_{split}") == d.domains.index(name)] for d in (data, whole))
            assert torch.equal(ours, theirs)
    assert torch.equal(newcomer(config(KEYS)).x, whole.x_train[whole.domain_train == whole.domains.index("contrast")])


@pytest.mark.slow
def test_the_command_end_to_end(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "fedbn", tmp_path)
    text = adapted(run)
    folder, found = run / "adapt-contrast", table(run / "adapt-contrast" / "adaptation.csv")
    assert [row["how"] for row in found] == list(HOW)
    made = config({**KEYS, "method": "fedbn"})
    test = newcomer(made).test
    for row in found:
        model = copy.deepcopy(source_model(made))
        model.load_state_dict(load_file(folder / f"model-{row['how']}.safetensors"), strict=True)
        if row["how"] != "test-batch":
            assert evaluate(model, test)["accuracy"] == pytest.approx(float(row["accuracy"]))
        assert f"{100 * float(row['accuracy']):.1f}" in text
    by_how = {row["how"]: float(row["accuracy"]) for row in found}
    assert by_how["average-affine"] > float(found[0]["accuracy_before"]) + 0.2  # a third of the contrast is what own statistics undo
    assert {path.name for path in folder.iterdir()} == {"adaptation.csv", *(f"model-{how}.safetensors" for how in HOW)}


def test_data_of_ones_own_and_a_domain_that_the_run_knew(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "fedbn", tmp_path)
    last = read_rows(run / "rounds.jsonl")[0][-1]
    assert [*last["per-domain"].values()] == [client["accuracy"] for client in last["clients"]]  # a client has a domain
    adapted(run, "--data", own_data(tmp_path, "mine"), "--how", "recompute,test-batch", "--samples", 30)
    found = table(run / "adapt-mine" / "adaptation.csv")
    assert [(row["how"], row["statistics_samples"]) for row in found] == [("recompute", "30"), ("test-batch", "0")]
    args = ("--domain", "invert", "--output", tmp_path / "out", "--how")
    assert "beware: the run was trained on invert" in adapted(run, *args, "recompute")
    ends_with_a_sentence("adapt", "--model", run, *args, "test-batch", about=str(tmp_path / "out"))  # is not overwritten
    assert [file.name for file in (tmp_path / "out").glob("model-*")] == ["model-recompute.safetensors"]


def test_without_the_clients_models_their_average_will_do(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "fedbn", tmp_path)
    states = [load_file(file) for file in sorted((run / "clients").iterdir())]
    shared = load_file(run / "model.safetensors")
    affine = [name for name in states[0] if name not in shared and name.endswith(("weight", "bias"))]
    shutil.rmtree(run / "clients")
    ends_with_a_sentence("adapt", "--model", run, about="fedbn")
    save_file({name: torch.stack([state[name] for state in states]).double().mean(0) for name in affine}, run / "unseen-client.safetensors")
    adapted(run)
    found = table(run / "adapt-contrast" / "adaptation.csv")
    assert ([row["how"] for row in found], found[0]["accuracy_before"]) == (["average-affine", "recompute", "test-batch"], "")


# fl-bn recalibrate: exact statistics, and what they are worth


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on digits, a few classes per client."""
    return tiny(tmp_path_factory.mktemp("runs"), "fedavg", **{"partition": "classes", "partition-parameter": 4.0, "rounds": 4})


def test_a_finished_run(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exact"
    text = ends_well("recalibrate", trained, "--output", folder)
    found = read_rows(folder / "rounds.jsonl")[0]
    assert f"accuracy before: **{found[0]['accuracy']:.1%}**, after: **{found[-1]['accuracy']:.1%}**" in text
    assert re.search(r"1 pass over (\d) BatchNorm layers: layer by layer, with \1 exchanges, which makes all of them exact", text)
    before, after = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "running" in name}
    layers = [name.removesuffix(".running_mean") for name in before if name.endswith("running_mean")]
    lines = [(line["pass"], line["layer"]) for line in table(folder / "recalibration.csv")]
    assert lines == [(str(row["round"]), layer) for row in found[1:] for layer in layers]


def test_weights_that_no_federation_trained(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "mine.pt"
    torch.save(load_file(trained / "model.safetensors"), weights)
    keys = "model='mlp' dataset='digits'"
    ends_well("recalibrate", weights, "--run-config", f"{keys} device='cpu' pictures=false", "--passes", "1")
    assert len(table(tmp_path / "mine-recalibrated" / "rounds.csv")) == 2
    made = config(parse_overrides(str(tmp_path / "mine-recalibrated" / "config.toml")))
    assert (made.clients, made.partition, made.method, made.calibrate) == (1, "iid", "fedavg", 1)
    ends_with_a_sentence("recalibrate", weights, "--run-config", keys, about="mine-recalibrated")


@pytest.fixture(scope="module")
def wrong(runs: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty").mkdir()
    for name in ("half", "held-out"):
        shutil.copytree(runs / "fedavg", folder / name)
    (folder / "half" / "model.safetensors").write_bytes(b"half a file")
    own_data(folder, "grey", channels=1)
    shutil.copytree(runs / "fedbn", folder / "fedbn")
    shutil.copytree(trained, folder / "trained")
    return folder


@listed(
    ("command", "about"),
    [
        ("adapt --model {}/held-out --how guess", "--how"),
        ("adapt --model {}/held-out --domain fog", "'fog'"),
        ("adapt --model {}/held-out --data npz:nowhere.npz", "'nowhere.npz'"),
        ("adapt --model {}/held-out --data npz:{}/grey.npz", "3 channels"),
        ("adapt --model {}/held-out --output {}/grey.npz/in-a-file", "grey.npz"),
        ("adapt --model {}/half", "model.safetensors"),
        ("recalibrate {}/fedbn", "'fedbn'"),
        ("recalibrate {}/empty", "config.toml"),
        ("recalibrate {}/trained --run-config learning-rate=0.3", "learning-rate"),
        ("recalibrate {}/trained --run-config model='digits-cnn-small'", "network"),
    ],
)
def test_bad_input_ends_with_a_sentence(command: str, about: str, wrong: Path) -> None:
    before = sorted(wrong.rglob("*"))
    ends_with_a_sentence(*command.format(*[wrong] * 2).split(), about=about)
    assert sorted(wrong.rglob("*")) == before  # refused before a folder is made
