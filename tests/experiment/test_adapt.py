"""``hold-out`` and ``fl-bn adapt``: the domain is in no run, a run's folder is all that is needed, and bad input ends with a sentence."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fl_bn.federation.adaptation import HOW
from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS, Role
from fl_bn.run.adapt import newcomer
from tests.experiment.inside import client_samples, config, dataset, ends_well, ends_with_a_sentence, evaluate, rows, source_model
from tests.listed import listed

KEYS: dict[str, Any] = {
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
    x, y = np.random.default_rng(0).integers(0, 256, (40, 8, 8, channels), dtype=np.uint8), np.arange(40) % 10
    np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=255 - x[:20], y_test=y[:20])
    return f"npz:{folder / name}.npz"


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


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedavg"])
def test_the_command_end_to_end(method: str, runs: Path, tmp_path: Path) -> None:
    run = copied(runs / method, tmp_path)
    text = adapted(run)
    folder, found = run / "adapt-contrast", rows(run / "adapt-contrast" / "adaptation.csv")
    personal = METHODS[method]().keeps(Role.STATISTIC)
    expected = [how for how in HOW if how != "nearest" or personal]
    assert [row["how"] for row in found] == expected
    assert ("left out: nearest: " in text) != personal
    test = newcomer(config({**KEYS, "method": method})).test
    for row in found:
        model = copy.deepcopy(source_model(config({**KEYS, "method": method})))
        model.load_state_dict(load_file(folder / f"model-{row['how']}.safetensors"), strict=True)
        if row["how"] != "test-batch":
            assert evaluate(model, test)["accuracy"] == pytest.approx(float(row["accuracy"]))
        assert f"{100 * float(row['accuracy']):.1f}" in text
        assert int(row["test_samples"]) == len(test)
    by_how = {row["how"]: float(row["accuracy"]) for row in found}
    before = float(found[0]["accuracy_before"])
    assert by_how["average-affine"] > before + 0.2  # a third of the contrast is what own statistics undo
    assert {path.name for path in folder.iterdir()} == {
        "adaptation.csv",
        "adaptation.png",
        *(f"model-{how}.safetensors" for how in expected),
    }


@pytest.mark.parametrize("tested", [{"validation-share": 0.2}, {"evaluate-on": "training"}])
def test_a_newcomer_is_tested_on_its_test_samples_whatever_the_run_was_tested_on(tested: dict[str, Any], tmp_path: Path) -> None:
    for domain in ({"data": own_data(tmp_path, "mine")}, {}):
        plain, own = (newcomer(config({**KEYS, **keys}), **domain) for keys in ({}, tested))
        assert torch.equal(plain.x, own.x)
        assert torch.equal(plain.test.x, own.test.x)


def test_data_of_ones_own(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "silobn", tmp_path)
    adapted(run, "--data", own_data(tmp_path, "mine"), "--how", "recompute,test-batch", "--samples", 30)
    found = rows(run / "adapt-mine" / "adaptation.csv")
    assert [(row["how"], row["statistics_samples"]) for row in found] == [("recompute", "30"), ("test-batch", "0")]


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
    text = adapted(run)
    found = rows(run / "adapt-contrast" / "adaptation.csv")
    assert ([row["how"] for row in found], found[0]["accuracy_before"]) == (["average-affine", "recompute", "test-batch"], "")
    assert "left out: nearest: " in text
    again = load_file(run / "adapt-contrast" / "model-average-affine.safetensors")
    assert all(torch.allclose(again[name], tensor, rtol=1e-5) for name, tensor in whole.items())


@listed(
    ("args", "about"),
    [
        (["--how", "guess"], "--how"),
        (["--domain", "fog"], "'fog'"),
        (["--domain", "none", "--data", "digits"], "--data"),
        (["--data", "nowhere"], "dataset"),
        (["--data", "npz:nowhere.npz"], "'nowhere.npz'"),
        (["--data", "grey"], "3 channels"),
        (["--how", "nearest"], "nearest"),
    ],
)
def test_bad_input_ends_with_a_sentence(args: list[str], about: str, runs: Path, tmp_path: Path) -> None:
    given = [own_data(tmp_path, "grey", channels=1) if arg == "grey" else arg for arg in args]
    ends_with_a_sentence("adapt", "--model", runs / "fedavg", *given, about=about)


def test_a_folder_that_is_no_runs(runs: Path, tmp_path: Path) -> None:
    ends_with_a_sentence("adapt", "--model", tmp_path, about="config.toml")
    model = copied(runs / "fedavg", tmp_path) / "model.safetensors"
    model.write_bytes(b"half a file")
    ends_with_a_sentence("adapt", "--model", model.parent, about="model.safetensors")
    model.unlink()
    ends_with_a_sentence("adapt", "--model", model.parent, about="model.safetensors")


def test_a_domain_that_the_run_knew_is_said_and_results_are_not_overwritten(runs: Path, tmp_path: Path) -> None:
    args = ("--domain", "invert", "--output", tmp_path / "out", "--how")
    assert "beware: the run was trained on invert" in adapted(runs / "fedavg", *args, "recompute")
    ends_with_a_sentence("adapt", "--model", runs / "fedavg", *args, "test-batch", about=str(tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").glob("model-*")] == ["model-recompute.safetensors"]
