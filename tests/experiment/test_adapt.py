"""A trained model goes on: ``hold-out`` and ``fl-bn adapt`` for a domain in no run, ``fl-bn recalibrate`` for exact statistics."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fl_bn.bn.roles import roles
from fl_bn.federation.recalibration import HOW
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.methods import Role
from fl_bn.run.adapt import newcomer
from fl_bn.run.assembly import at_client
from fl_bn.run.former import PAPERS
from fl_bn.run.history import read_rows
from fl_bn.run.recalibrate import planned
from tests.experiment.inside import (
    ConfigError,
    RunConfig,
    client_samples,
    command,
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
        assert int(row["test_samples"]) == len(test)
    by_how = {row["how"]: float(row["accuracy"]) for row in found}
    before = float(found[0]["accuracy_before"])
    assert by_how["average-affine"] > before + 0.2  # a third of the contrast is what own statistics undo
    assert {path.name for path in folder.iterdir()} == {
        "adaptation.csv",
        *(f"model-{how}.safetensors" for how in HOW),
    }


def test_a_newcomer_is_tested_on_its_test_samples_whatever_the_run_was_tested_on(tmp_path: Path) -> None:
    for domain in ({"data": own_data(tmp_path, "mine")}, {}):
        plain, own = (newcomer(config({**KEYS, **keys}), **domain) for keys in ({}, {"validation-share": 0.2}))
        assert torch.equal(plain.x, own.x)
        assert torch.equal(plain.test.x, own.test.x)


def test_a_domain_whose_test_samples_a_setup_replaced_is_refused() -> None:
    with refusing("contrast", "--data"):
        newcomer(config({**KEYS, "evaluate-on": "training"}))


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
    adapted(run)
    found = rows(run / "adapt-contrast" / "adaptation.csv")
    assert ([row["how"] for row in found], found[0]["accuracy_before"]) == (["average-affine", "recompute", "test-batch"], "")
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


# fl-bn recalibrate: exact statistics, and what they are worth


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on digits, a few classes per client."""
    return tiny(tmp_path_factory.mktemp("runs"), "fedavg", **{"partition": "classes", "partition-parameter": 4.0, "rounds": 4})


@pytest.fixture(scope="module")
def done(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("out") / "exact"
    result = command("recalibrate", trained, "--output", folder, "--run-config", "pictures=true")
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_a_finished_run(trained: Path, done: tuple[Path, str]) -> None:
    folder, text = done[0], " ".join(done[1].split())
    found = read_rows(folder / "rounds.jsonl")[0]
    assert [row["round"] for row in found] == list(range(len(found)))
    assert f"accuracy before: **{found[0]['accuracy']:.1%}**, after: **{found[-1]['accuracy']:.1%}**" in text
    assert re.search(r"1 pass over (\d) BatchNorm layers: layer by layer, with \1 exchanges, which makes all of them exact", text)
    before, after = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "running" in name}
    names = {"recalibration.csv", "summary.md", "rounds.csv", "labels.png", "config.toml", "clients.csv"}
    assert names <= {path.name for path in folder.iterdir()}
    assert "accuracy.png" not in {path.name for path in folder.iterdir()}
    lines = rows(folder / "recalibration.csv")
    layers = [name.removesuffix(".running_mean") for name in before if name.endswith("running_mean")]
    assert [(line["pass"], line["layer"]) for line in lines] == [(str(row["round"]), layer) for row in found[1:] for layer in layers]


def test_weights_that_no_federation_trained(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "mine.pt"
    torch.save(load_file(trained / "model.safetensors"), weights)
    keys = "model='mlp' dataset='digits'"
    ends_well("recalibrate", weights, "--run-config", f"{keys} device='cpu' pictures=false", "--passes", "1")
    assert len(rows(tmp_path / "mine-recalibrated" / "rounds.csv")) == 2
    made = config(parse_overrides(str(tmp_path / "mine-recalibrated" / "config.toml")))
    assert (made.clients, made.partition, made.method, made.calibrate) == (1, "iid", "fedavg", 1)
    ends_with_a_sentence("recalibrate", weights, "--run-config", keys, about="mine-recalibrated")


def test_what_cannot_be_re_calibrated(trained: Path, tmp_path: Path) -> None:
    gn = tiny(tmp_path, "gn")
    fedbn = tiny(tmp_path, "fedbn")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    for args, about in [
        ((gn,), "'gn'"),
        ((fedbn,), "'fedbn'"),
        ((tmp_path / "nowhere",), "nowhere"),
        ((tmp_path / "empty",), "config.toml"),
        ((tmp_path / "notes.txt",), ".txt"),
        ((trained, "--run-config", "rounds=3"), "rounds"),
        ((trained, "--run-config", "learning-rate=0.3"), "learning-rate"),
        ((trained, "--run-config", "model='digits-cnn-small'"), "network"),
    ]:
        ends_with_a_sentence("recalibrate", *args, about=about)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "fedbn", "gn", "notes.txt"]  # refused before a folder was made
    with refusing("rounds=0"):  # data at the sites stay there
        planned(trained, {"dataset": "sites", "classes": 10, "channels": 1, "image-size": 8})


def test_a_run_of_no_rounds_needs_something_to_measure(tmp_path: Path) -> None:
    with refusing("calibrate=-1"):
        config(rounds=0)
    for method in ("silobn", "gn"):
        with pytest.raises((ConfigError, RunFailed)):
            run_in_process({**RunConfig().to_mapping(), "rounds": 0, "calibrate": -1, "method": method, "output": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_clients_need_no_file_of_weights_where_nothing_stays_at_home() -> None:
    fedavg, fedbn = (config({"method": name, "model-weights": "server.pt"}) for name in ("fedavg", "fedbn"))
    assert at_client(fedavg).model_weights == ""
    assert at_client(fedbn).model_weights == "server.pt"  # its own layers start from it
    assert {Role.STATISTIC, Role.AFFINE} <= set(roles(source_model(at_client(fedavg))).values())


def test_the_scales_are_those_of_the_run_and_not_those_that_it_started_from(tmp_path: Path) -> None:
    path = tiny(tmp_path, "fedavg", **{"rounds": 1, "setup": PAPERS, "scale-start": "uniform"})
    made = planned(path, {})
    kept = load_file(path / "model.safetensors")
    found = source_model(made).state_dict()
    scales = [name for name, role in roles(source_model(made)).items() if role is Role.AFFINE and name.endswith("weight")]
    assert scales
    assert all(torch.equal(found[name], kept[name]) for name in scales)
    assert not any(torch.equal(found[name], torch.ones_like(found[name])) for name in scales)  # control
