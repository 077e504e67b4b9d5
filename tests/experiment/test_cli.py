"""The command ``fl-bn``: what it prints, what it writes, and that bad input ends with a sentence and status 2."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fl_bn.cli.main import app
from fl_bn.methods import METHODS
from fl_bn.run.config import RunConfig
from fl_bn.run.keys import table
from tests.experiment.small_data import small_sites
from tests.integration.runs import TINY


def command(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def said(result: Result) -> str:
    """Both streams, without rich's line breaks."""
    return " ".join(result.output.split())


def run_config(**overrides: object) -> str:
    values = {**TINY, **{key.replace("_", "-"): value for key, value in overrides.items()}}
    return " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in values.items())


def without_pictures(**overrides: object) -> str:
    """``run_config`` for ``fl-bn compare``, which decides on pictures itself."""
    return run_config(**overrides).replace("pictures=false", "").strip()


def test_run(tmp_path: Path) -> None:
    result = command("run", "--run-config", run_config(method="fbn", rounds=1, output=str(tmp_path), name="mine"))
    assert result.exit_code == 0, result.output
    assert "accuracy after round 1" in (tmp_path / "mine" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"roundz": 3}, "ConfigError: unknown config key 'roundz': did you mean 'rounds'?"),
        ({"rounds": 0}, "ConfigError: rounds must be >= 1, but got 0"),
        ({"model": "nope"}, "ConfigError: model must be one of simple-cnn, digits-cnn-small, mlp"),
        ({"dataset": "nope"}, "ConfigError: dataset must be one of digits"),
        ({"dataset": "npz", "data_path": "nowhere.npz"}, "DataNotFound: dataset 'npz': there is no file 'nowhere.npz'"),
        (
            {"dataset": "digits-plain", "partition": "domain", "partition_parameter": 1.0},
            "ConfigError: partition=domain needs data with domains, but digits-plain has none",
        ),
        ({"partition": "classes", "partition_parameter": 11.0}, "classes per client must be between 1 and 10"),
        ({"method": "gn", "groups": 7}, "7 groups do not divide 64 channels"),
    ],
)
def test_bad_input_ends_with_a_sentence(overrides: dict[str, object], message: str) -> None:
    result = command("run", "--run-config", run_config(output="", **overrides))
    assert message in said(result)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_name_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = command("run", "--run-config", run_config(output=str(tmp_path), name="mine"))
    assert result.exit_code == 2
    assert f"exists already: give another name, remove {tmp_path / 'mine'}, or go on with resume='mine'" in said(result)


def test_compare_then_again(tmp_path: Path) -> None:
    args = ("compare", "--methods", "centralised,fbn,fedavg:learning-rate=1e30", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path))
    result = command(*args, "--run-config", without_pictures(rounds=2, evaluate_every=1))
    assert result.exit_code == 1
    text = said(result)
    assert "failed fedavg_learning_rate=1e30-seed0: RunFailed:" in text
    lines = (tmp_path / "table.md").read_text().splitlines()
    rows = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    assert rows == {"method", "---", "centralised", "fbn", "fedavg:learning-rate=1e30"}
    assert (tmp_path / "comparison.png").exists()
    assert "[round 2/2]" in (tmp_path / "runs" / "fbn-seed0.log").read_text()
    assert "accuracy after round 2" in (tmp_path / "runs" / "centralised-seed0" / "summary.md").read_text()

    made = {file: file.stat().st_mtime_ns for name in ("centralised", "fbn") for file in tmp_path.glob(f"runs/{name}-seed0/rounds.jsonl")}
    assert len(made) == 2
    again = command(*args[:2], "centralised,fbn", *args[3:], "--run-config", without_pictures(rounds=2, evaluate_every=1))
    assert again.exit_code == 0, again.output
    assert made == {file: file.stat().st_mtime_ns for file in made}


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("nope", f"ConfigError: method nope, seed 0: method must be one of {', '.join(METHODS)}, but got 'nope'"),
        ("gn:groups=7", "ConfigError: gn_groups=7-seed0: block1.norm (BatchNorm1d): 7 groups do not divide 64 channels"),
    ],
)
def test_compare_refuses_a_wrong_variant_before_it_starts(variant: str, message: str, tmp_path: Path) -> None:
    keys = ("--run-config", without_pictures(rounds=1))
    result = command("compare", "--methods", f"fbn,{variant}", "--output", str(tmp_path / "x"), *keys)
    assert result.exit_code == 2
    assert message in said(result)
    assert not (tmp_path / "x").exists()


def test_run_and_compare_take_each_of_several_files_as_a_client(tmp_path: Path) -> None:
    keys = f"dataset='npz' data-path='{','.join(small_sites(tmp_path))}' model='mlp' rounds=1 local-steps=1 device='cpu'"
    ran = command("run", "--run-config", f"{keys} pictures=false output='{tmp_path}' name='run'")
    assert ran.exit_code == 0, ran.output
    compared = command("compare", "--methods", "fedavg", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path), "--run-config", keys)
    assert compared.exit_code == 0, compared.output
    for folder in ("run", "runs/fedavg-seed0"):
        made = tomllib.loads((tmp_path / folder / "config.toml").read_text())
        assert (made["clients"], made["partition"]) == (5, "natural")
        assert len((tmp_path / folder / "clients.csv").read_text().splitlines()) == 1 + 5
    for name in ("run", "compare"):
        refused = command(name, "--run-config", f"{keys} clients=4")
        assert "so the run has 5 clients, but clients=4: leave out clients, or name a partition" in said(refused)
        assert refused.exit_code == 2


def test_layers() -> None:
    result = command("layers", "resnet18", "--method", "hbn")
    assert result.exit_code == 0
    text = said(result)
    assert "method hbn: found 20 BatchNorm2d, trained as 20 HybridBatchNorm" in text
    assert "20 tensors of role mixing: stays at its client" in text
    assert "40 tensors of role affine: stays at its client" in said(command("layers", "resnet18", "--method", "fedbn"))


@pytest.mark.parametrize(
    ("args", "message"), [(("nope",), "model must be one of"), (("mlp", "--method", "nope"), "method must be one of fedavg, gn")]
)
def test_layers_refuses_unknown_names(args: tuple[str, ...], message: str) -> None:
    result = command("layers", *args)
    assert result.exit_code == 2
    assert message in said(result)


def test_config_prints_every_key() -> None:
    result = command("config")
    assert result.exit_code == 0
    assert result.output.strip() == table(RunConfig.keys())
    assert "| `server-learning-rate` | `1.0` | > 0 |" in result.output


def test_layers_of_a_network_of_ones_own_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\n\ndef build(classes, channels, image_size):\n    return nn.Sequential(nn.BatchNorm2d(channels))\n"
    (tmp_path / "own_net_of_this_folder.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    result = command("layers", "own_net_of_this_folder:build", "--method", "fbn")
    assert result.exit_code == 0, result.output
    assert "1 BatchNorm2d" in said(result)


def test_layers_says_one_thing_of_a_network_without_batch_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\n\ndef build(classes, channels, image_size):\n    return nn.Sequential(nn.LayerNorm(8))\n"
    (tmp_path / "bare_net_of_this_folder.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    averaged, refused = (said(command("layers", "bare_net_of_this_folder:build", "--method", method)) for method in ("fedbn", "fbn"))
    assert "2 tensors of role affine of other norms: shared" in averaged
    assert "stays at its client" not in averaged
    assert "this model has no BatchNorm layer: method fedbn is plain federated averaging here" in averaged
    assert "method fbn is about the statistics of BatchNorm, but this model has no BatchNorm layer" in refused
