"""``hold-out`` and ``fl-bn adapt``: the domain is in no run, a run's folder is all that is needed, and bad input ends with a sentence."""

from __future__ import annotations

import copy
import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from experiments.definitions.programs.unseen_domain import BEFORE, KNOWN, METHODS, SHIFTS, Row, plan, table
from fl_bn.cli.main import app
from fl_bn.federation.adaptation import HOW
from fl_bn.federation.local import evaluate
from fl_bn.flower import run_in_process
from fl_bn.run import assembly
from fl_bn.run.adapt import adapt, newcomer, read_run, ways
from fl_bn.run.config import ConfigError, RunConfig

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


def command(*args: object) -> Result:
    return CliRunner().invoke(app, ["adapt", *map(str, args)])


def said(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_domain_held_out_is_in_none_of_the_runs_data_and_the_others_are_as_they_were() -> None:
    config, whole = RunConfig.from_mapping(KEYS), assembly.dataset(RunConfig.from_mapping({**KEYS, "hold-out": ""}))
    data, kept = assembly.dataset(config), ("none", "invert", "background")
    assert data.domains == kept
    assert whole.domains == ("none", "invert", "contrast", "background")
    for name in kept:
        for split in ("train", "test"):
            ours, theirs = (getattr(d, f"x_{split}")[getattr(d, f"domain_{split}") == d.domains.index(name)] for d in (data, whole))
            assert torch.equal(ours, theirs)
    assert len(data.x_train) < len(whole.x_train)
    own = newcomer(config)
    assert (own.name, own.seen) == ("contrast", False)
    assert torch.equal(own.x, whole.x_train[whole.domain_train == 2])
    assert newcomer(config, "none").seen
    for client in range(3):
        train, test, _ = assembly.client_samples(config, client)
        mine = data.domain_test == client
        assert torch.equal(test.x, data.x_test[mine])
        assert len(train)


def test_a_domain_that_is_not_there_cannot_be_held_out() -> None:
    with pytest.raises(ConfigError, match="has no domain 'fog'; it has: none, invert, contrast, background"):
        assembly.dataset(RunConfig.from_mapping({**KEYS, "hold-out": "fog"}))
    with pytest.raises(ConfigError, match="'digits-plain' has no domains, so there is no domain 'fog'"):
        assembly.dataset(RunConfig.from_mapping({"dataset": "digits-plain", "hold-out": "fog"}))


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedavg"])
def test_the_command_end_to_end(method: str, runs: Path, tmp_path: Path) -> None:
    run = copied(runs / method, tmp_path)
    result = command("--model", run)
    assert result.exit_code == 0, result.output
    folder = run / "adapt-contrast"
    expected = [how for how in HOW if how != "nearest" or method != "fedavg"]
    with (folder / "adaptation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["how"] for row in rows] == expected
    assert ("left out: nearest: fedavg shares all tensors of BatchNorm" in said(result)) == (method == "fedavg")
    config = RunConfig.from_mapping({**KEYS, "method": method})
    test = newcomer(config).test
    for row in rows:
        model = copy.deepcopy(assembly.source_model(config))
        model.load_state_dict(load_file(folder / f"model-{row['how']}.safetensors"), strict=True)
        if row["how"] != "test-batch":
            assert evaluate(model, test)["accuracy"] == pytest.approx(float(row["accuracy"]))
        assert f"{100 * float(row['accuracy']):.1f}" in said(result)
        assert int(row["test_samples"]) == len(test)
    by_how = {row["how"]: float(row["accuracy"]) for row in rows}
    before = float(rows[0]["accuracy_before"])
    assert by_how["average-affine"] > before + 0.2  # a third of the contrast is what own statistics undo
    assert {path.name for path in folder.iterdir()} == {
        "adaptation.csv",
        "adaptation.png",
        *(f"model-{how}.safetensors" for how in expected),
    }


def test_fedavg_and_silobn_adapt_to_one_model(runs: Path) -> None:
    """The running statistics have no part in the training of either; FedBN's affine has."""
    states = {}
    for method in ("fedavg", "silobn", "fedbn"):
        run = read_run(runs / method)
        states[method] = run.adapt("average-affine", newcomer(RunConfig.from_mapping(KEYS)).x).model.state_dict()
    weights = [name for name in states["fedavg"] if "num_batches" not in name]
    assert all(torch.equal(states["fedavg"][name], states["silobn"][name]) for name in weights)
    assert not all(torch.equal(states["fedavg"][name], states["fedbn"][name]) for name in weights)


def test_samples_are_drawn_by_the_seed_and_the_test_stays_whole() -> None:
    whole = newcomer(RunConfig.from_mapping(KEYS))
    drawn = whole.drawn(20, 0)
    assert len(drawn.x) == 20
    assert torch.equal(drawn.x, whole.drawn(20, 0).x)
    assert not torch.equal(drawn.x, whole.drawn(20, 1).x)
    assert torch.equal(whole.drawn(0, 1).x, whole.x)
    order = drawn.test.x.flatten(1).sum(1).sort().values
    assert torch.equal(order, whole.test.x.flatten(1).sum(1).sort().values)
    assert not torch.equal(drawn.test.y, whole.test.y)


def test_a_newcomer_is_tested_on_its_test_data_though_the_run_was_on_validation_samples() -> None:
    whole, validated = (newcomer(RunConfig.from_mapping({**KEYS, "validation-share": share})) for share in (0.0, 0.2))
    assert torch.equal(whole.x, validated.x)
    assert torch.equal(whole.test.x, validated.test.x)


def test_data_of_ones_own(runs: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, channels in (("mine", 3), ("grey", 1)):
        x, y = rng.integers(0, 256, (40, 8, 8, channels), dtype=np.uint8), np.arange(40) % 10
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    run = copied(runs / "silobn", tmp_path)
    result = command("--model", run, "--data", f"npz:{tmp_path / 'mine.npz'}", "--how", "recompute,test-batch", "--samples", 30)
    assert result.exit_code == 0, result.output
    with (run / "adapt-mine" / "adaptation.csv").open(newline="") as file:
        assert [(row["how"], row["statistics_samples"]) for row in csv.DictReader(file)] == [("recompute", "30"), ("test-batch", "0")]
    refused = command("--model", run, "--data", f"npz:{tmp_path / 'grey.npz'}")
    assert refused.exit_code == 2
    assert "the run takes 3 channels of 8 x 8 pixels, but these data have 1" in said(refused)


def test_without_the_clients_models_their_average_will_do(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "fedbn", tmp_path)
    client = newcomer(RunConfig.from_mapping(KEYS))
    whole = adapt(read_run(run), client, ["average-affine"], 64, torch.device("cpu"))[0]
    states = [load_file(file) for file in sorted((run / "clients").iterdir())]
    shared = load_file(run / "model.safetensors")
    affine = [name for name in states[0] if name not in shared and name.endswith(("weight", "bias"))]
    shutil.rmtree(run / "clients")
    refused = command("--model", run)
    assert refused.exit_code == 2
    assert "with fedbn, scale and shift of BatchNorm stay at the clients" in said(refused)
    save_file({name: torch.stack([state[name] for state in states]).double().mean(0) for name in affine}, run / "unseen-client.safetensors")
    made = read_run(run)
    assert ways(made, "all") == ["average-affine", "recompute", "test-batch"]
    told = adapt(made, client, ["average-affine"], 64, torch.device("cpu"))[0]
    assert told.before is None
    assert told.after.loss == pytest.approx(whole.after.loss, rel=1e-6)
    result = command("--model", run)
    assert "unknown" in said(result)
    assert "left out: nearest: the models of the clients that trained are needed, but not given" in said(result)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--how", "guess"], "--how must be one of all, average-affine, recompute, nearest, test-batch"),
        (["--domain", "fog"], "has no domain 'fog'; it has: none, invert, contrast, background"),
        (["--domain", "none", "--data", "digits"], "--data digits: give one of them"),
        (["--data", "nowhere"], "dataset must be one of digits"),
        (["--data", "npz:nowhere.npz"], "there is no file 'nowhere.npz'"),
        (["--how", "nearest"], "nearest: fedavg shares all tensors of BatchNorm"),
    ],
)
def test_bad_input_ends_with_a_sentence(args: list[str], message: str, runs: Path) -> None:
    result = command("--model", runs / "fedavg", *args)
    assert message in said(result)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_folder_that_is_no_runs(runs: Path, tmp_path: Path) -> None:
    assert "is not the folder of a run, since it has no config.toml" in said(command("--model", tmp_path))
    run = copied(runs / "fedavg", tmp_path)
    (run / "model.safetensors").write_bytes(b"half a file")
    assert "is not a safetensors file" in said(command("--model", run))
    (run / "model.safetensors").unlink()
    assert "model.safetensors is missing" in said(result := command("--model", run))
    assert result.exit_code == 2


def test_a_domain_that_the_run_knew_is_said_to_be_none_that_it_did_not(runs: Path, tmp_path: Path) -> None:
    result = command("--model", runs / "fedavg", "--domain", "invert", "--output", tmp_path / "out", "--how", "recompute")
    assert "beware: the run was trained on invert, so this client is not new to it" in said(result)
    assert (tmp_path / "out" / "model-recompute.safetensors").exists()
    again = command("--model", runs / "fedavg", "--domain", "invert", "--output", tmp_path / "out", "--how", "test-batch")
    assert f"{tmp_path / 'out'} has the results of an earlier adapt" in said(again)
    assert [file.name for file in (tmp_path / "out").glob("model-*")] == ["model-recompute.safetensors"]


def test_the_experiment_holds_every_domain_out_for_every_method_and_seed(tmp_path: Path) -> None:
    cells = plan(tmp_path, "small", "data")
    assert {(c.config.method, c.config.hold_out, c.config.seed) for c in cells} == {
        (method, domain, seed) for method in METHODS.values() for domain in SHIFTS for seed in range(3)
    }
    assert all(c.config.clients == len(SHIFTS) - 1 for c in cells)


def test_the_experiments_table_is_the_mean_over_seeds_and_domains() -> None:
    rows = [
        Row(domain, "FedBN", seed, how, value + seed)
        for domain, value in (("a", 10.0), ("b", 30.0))
        for seed in (0, 1)
        for how in (KNOWN, BEFORE, "recompute")
    ]
    made = table(rows)
    assert made[0] == ("held out", "method", KNOWN, BEFORE, *HOW)
    assert made[1] == ("a", "FedBN", "10.5 (0.7)", "10.5 (0.7)", "-", "10.5 (0.7)", "-", "-")
    assert made[3][:3] == ("mean", "FedBN", "20.5 (0.7)")


@pytest.mark.parametrize("tested", [{"validation-share": 0.2}, {"evaluate-on": "training"}])
def test_data_of_one_s_own_are_tested_on_their_test_samples_whatever_the_run_was_tested_on(tested: dict[str, Any], tmp_path: Path) -> None:
    """Before, they were tested on validation or training samples, under the heading test."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=255 - x[:20], y_test=y[:20])
    for domain in ({"data": f"npz:{tmp_path / 'mine.npz'}"}, {}):
        plain, own = (newcomer(RunConfig.from_mapping({**KEYS, **keys}), **domain) for keys in ({}, tested))
        assert torch.equal(plain.x, own.x)
        assert torch.equal(plain.test.x, own.test.x)
