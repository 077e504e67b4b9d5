"""``fl-bn recalibrate`` end to end: a finished run's folder, or a file of weights, in; exact statistics and what they are worth, out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file

from fl_bn.flower import RunFailed, run_in_process
from fl_bn.methods import Role
from fl_bn.roles import roles
from fl_bn.run.assembly import at_client
from fl_bn.run.recalibrate import elsewhere, planned, rows
from tests.experiment import inside
from tests.experiment.inside import (
    ConfigError,
    RunConfig,
    config,
    ends_well,
    ends_with_a_sentence,
    parse_overrides,
    refusing,
    source_model,
)
from tests.integration.runs import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on digits, a few classes per client."""
    return tiny(tmp_path_factory.mktemp("runs"), "fedavg", **{"partition": "classes", "partition-parameter": 4.0, "rounds": 4})


@pytest.fixture(scope="module")
def done(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("out") / "exact"
    result = inside.command("recalibrate", trained, "--output", folder, "--run-config", "pictures=true")
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_a_finished_run(trained: Path, done: tuple[Path, str]) -> None:
    folder, text = done[0], " ".join(done[1].split())
    found = rows(folder)
    assert [row.number for row in found] == list(range(len(found)))
    accuracies = [row.metric for row in found]
    assert all(value is not None for value in accuracies)
    assert f"accuracy before: {found[0].metric:.1%}, after: {found[-1].metric:.1%}" in text
    assert re.search(r"1 pass over (\d) BatchNorm layers: layer by layer, with \1 exchanges, which makes all of them exact", text)
    before, after = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "running" in name}
    names = {"recalibration.csv", "recalibration.png", "summary.md", "rounds.csv", "labels.png", "config.toml", "clients.csv"}
    assert names <= {path.name for path in folder.iterdir()}
    assert "accuracy.png" not in {path.name for path in folder.iterdir()}
    assert matplotlib.image.imread(folder / "recalibration.png").std() > 0.01
    lines = inside.rows(folder / "recalibration.csv")
    layers = [name.removesuffix(".running_mean") for name in before if name.endswith("running_mean")]
    assert [(line["pass"], line["layer"]) for line in lines] == [(str(row.number), layer) for row in found[1:] for layer in layers]


def test_the_line_that_is_printed_makes_the_same_run(done: tuple[Path, str], tmp_path: Path) -> None:
    folder, text = done
    line = next(line for line in text.splitlines() if line.startswith("flwr run . --run-config "))
    words = shlex.split(line)
    assert words[5:] == ["--federation-config", "options.num-supernodes=3"] or words[5:] == []
    keys = parse_overrides(words[4])
    there = run_in_process({**RunConfig().to_mapping(), **keys, "output": str(tmp_path)})
    assert there is not None
    a, b = (load_file(path / "model.safetensors") for path in (folder, there))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert words[4] in elsewhere(config(keys))


def test_weights_that_no_federation_trained(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "mine.pt"
    torch.save(load_file(trained / "model.safetensors"), weights)
    keys = "model='mlp' dataset='digits'"
    ends_well("recalibrate", weights, "--run-config", f"{keys} device='cpu' pictures=false", "--passes", "1")
    assert [row.number for row in rows(tmp_path / "mine-recalibrated")] == [0, 1]
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
    path = tiny(tmp_path, "fedavg", **{"rounds": 1, "scale-start": "uniform"})
    made = planned(path, {})
    assert made.scale_start == "one"
    kept = load_file(path / "model.safetensors")
    found = source_model(made).state_dict()
    scales = [name for name, role in roles(source_model(made)).items() if role is Role.AFFINE and name.endswith("weight")]
    assert scales
    assert all(torch.equal(found[name], kept[name]) for name in scales)
    assert not any(torch.equal(found[name], torch.ones_like(found[name])) for name in scales)  # control
