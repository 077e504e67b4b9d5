"""``fl-bn recalibrate`` end to end: a finished run's folder, or a file of weights, in; exact statistics and what they are worth, out."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner, Result

from fl_bn.cli.main import app
from fl_bn.federation.recalibration import recalibrate
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.roles import Role, roles
from fl_bn.run.assembly import at_client, client_samples, source_model
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.recalibrate import check, elsewhere, planned, rows
from fl_bn.run.run_directory import to_toml
from tests.integration.runs import tiny


def command(*args: str) -> Result:
    return CliRunner().invoke(app, ["recalibrate", *args])


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg on digits, a few classes per client."""
    return tiny(tmp_path_factory.mktemp("runs"), "fedavg", **{"partition": "classes", "partition-parameter": 4.0, "rounds": 4})


@pytest.fixture(scope="module")
def done(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("out") / "exact"
    return folder, command(str(trained), "--output", str(folder), "--run-config", "pictures=true")


def test_a_finished_run(trained: Path, done: tuple[Path, Result]) -> None:
    folder, result = done
    assert result.exit_code == 0, result.output
    found = rows(folder)
    assert [row.number for row in found] == list(range(len(found)))
    accuracies = [row.metric for row in found]
    assert all(value is not None for value in accuracies)
    text = said(result)
    assert f"accuracy before: {found[0].metric:.1%}, after: {found[-1].metric:.1%}" in text
    assert re.search(r"1 pass over (\d) BatchNorm layers: layer by layer, with \1 exchanges, which makes all of them exact", text)
    before, after = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "running" in name}
    names = {"recalibration.csv", "recalibration.png", "summary.md", "rounds.csv", "labels.png", "config.toml", "clients.csv"}
    assert names <= {path.name for path in folder.iterdir()}
    assert "accuracy.png" not in {path.name for path in folder.iterdir()}
    assert matplotlib.image.imread(folder / "recalibration.png").std() > 0.01
    with (folder / "recalibration.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    layers = [name.removesuffix(".running_mean") for name in before if name.endswith("running_mean")]
    assert [(line["pass"], line["layer"]) for line in lines] == [(str(row.number), layer) for row in found[1:] for layer in layers]


def test_it_is_the_pure_function_on_the_same_clients(trained: Path, done: tuple[Path, Result]) -> None:
    folder, _ = done
    config = RunConfig.from_mapping(parse_overrides(str(folder / "config.toml")))
    model = source_model(config)
    recalibrate(model, [client_samples(config, client)[0] for client in range(config.clients)])
    after, exact = load_file(folder / "model.safetensors"), model.state_dict()

    def same(tensors: dict[str, Tensor]) -> bool:
        """Up to the order of sums: which kernels torch takes for other batches depends on the processor."""
        return all(torch.allclose(tensor, tensors[name], rtol=1e-5, atol=1e-6) for name, tensor in after.items())

    assert same(exact)
    assert not same(load_file(trained / "model.safetensors"))  # control


def test_the_line_that_is_printed_makes_the_same_run(done: tuple[Path, Result], tmp_path: Path) -> None:
    folder, result = done
    line = next(line for line in result.output.splitlines() if line.startswith("flwr run . --run-config "))
    words = shlex.split(line)
    assert words[5:] == ["--federation-config", "options.num-supernodes=3"] or words[5:] == []
    keys = parse_overrides(words[4])
    there = run_in_process({**RunConfig().to_mapping(), **keys, "output": str(tmp_path)})
    assert there is not None
    a, b = (load_file(path / "model.safetensors") for path in (folder, there))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert words[4] in elsewhere(RunConfig.from_mapping(keys))


def test_weights_that_no_federation_trained(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "mine.pt"
    torch.save(load_file(trained / "model.safetensors"), weights)
    result = command(str(weights), "--run-config", "model='mlp' dataset='digits' device='cpu' pictures=false", "--passes", "1")
    assert result.exit_code == 0, result.output
    assert [row.number for row in rows(tmp_path / "mine-recalibrated")] == [0, 1]
    config = RunConfig.from_mapping(parse_overrides(str(tmp_path / "mine-recalibrated" / "config.toml")))
    assert (config.clients, config.partition, config.method, config.calibrate) == (1, "iid", "fedavg", 1)
    again = command(str(weights), "--run-config", "model='mlp' dataset='digits'")
    assert again.exit_code == 2
    assert "exists already: give another folder (--output), or remove it" in said(again)


def test_what_cannot_be_re_calibrated(trained: Path, tmp_path: Path) -> None:
    gn = tiny(tmp_path, "gn")
    fedbn = tiny(tmp_path, "fedbn")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    for args, message in [
        ((str(gn),), "under method 'gn' this model has no BatchNorm layer"),
        ((str(fedbn),), "method 'fedbn' keeps running statistics at the clients"),
        (
            (str(tmp_path / "nowhere"),),
            "expected the folder of a finished run, or a file of weights (.pt, .pth, .safetensors), but there is nothing there",
        ),
        ((str(tmp_path / "empty"),), "is not the folder of a finished run: expected config.toml and model.safetensors"),
        ((str(tmp_path / "notes.txt"),), "but there is a file .txt"),
        ((str(trained), "--run-config", "rounds=3"), "recalibrate sets rounds itself"),
        ((str(trained), "--run-config", "learning-rate=0.3"), "learning-rate has no effect here, since recalibrate does not train"),
        ((str(trained), "--run-config", "model='digits-cnn-small'"), "it is a file of another network"),
    ]:
        result = command(*args)
        assert message in said(result), result.output
        assert result.exit_code == 2
        assert "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "fedbn", "gn", "notes.txt"]  # refused before a folder was made


def test_data_at_the_sites_stay_there(trained: Path) -> None:
    keys = {"dataset": "sites", "classes": 10, "channels": 1, "image-size": 8}
    with pytest.raises(ConfigError, match="data are at its sites, .*: flwr run . --run-config .*rounds=0"):
        planned(trained, keys)


def test_a_run_of_no_rounds_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rounds must be >= 1, but got 0. A run of 0 rounds .* needs calibrate=-1"):
        RunConfig.from_mapping({"rounds": 0})
    with pytest.raises(ConfigError, match="method 'silobn' keeps running statistics"):
        check(RunConfig.from_mapping({"rounds": 0, "calibrate": -1, "method": "silobn", "model": "mlp"}))
    made = RunConfig.from_mapping({"rounds": 0, "calibrate": -1, "method": "fixbn", "freeze-after": 50})  # what a finished run had
    assert made.round_policy().calibrate == -1
    with pytest.raises((ConfigError, RunFailed)):
        run_in_process({**RunConfig().to_mapping(), "rounds": 0, "calibrate": -1, "method": "gn", "output": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_clients_need_no_file_of_weights_where_nothing_stays_at_home() -> None:
    fedavg, fedbn = (RunConfig.from_mapping({"method": name, "model-weights": "server.pt"}) for name in ("fedavg", "fedbn"))
    assert at_client(fedavg).model_weights == ""
    assert at_client(fedbn).model_weights == "server.pt"  # its own layers start from it
    assert {Role.STATISTIC, Role.AFFINE} <= set(roles(source_model(at_client(fedavg))).values())


def test_the_scales_are_those_of_the_run_and_not_those_that_it_started_from(tmp_path: Path) -> None:
    path = tiny(tmp_path, "fedavg", **{"rounds": 1, "scale-start": "uniform"})
    config = planned(path, {})
    assert config.scale_start == "one"
    kept = load_file(path / "model.safetensors")
    found = source_model(config).state_dict()
    scales = [name for name, role in roles(source_model(config)).items() if role is Role.AFFINE and name.endswith("weight")]
    assert scales
    assert all(torch.equal(found[name], kept[name]) for name in scales)
    assert not any(torch.equal(found[name], torch.ones_like(found[name])) for name in scales)  # control


def test_when_clients_joined_is_no_matter_of_a_run_that_measures(tmp_path: Path) -> None:
    """Before, it was refused: join-rounds must name rounds 1..0."""
    run = tmp_path / "run"
    shutil.copytree(tiny(tmp_path, "fedavg"), run)
    config = tomllib.loads((run / "config.toml").read_text())
    (run / "config.toml").write_text(to_toml({**config, "rounds": 3, "join-rounds": "1:2"}))
    planned_run = planned(run, {})
    assert (planned_run.rounds, planned_run.join_rounds) == (0, "")
