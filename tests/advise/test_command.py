"""The command ``fl-bn advise``: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fl_bn.advise import regimes
from fl_bn.cli.advise import advise
from tests.advise.made_up import MAP
from tests.experiment.small_data import small_config, small_npz, small_sites
from tests.listed import listed

app = typer.Typer()
app.command()(advise)


@pytest.fixture(autouse=True)
def made_up_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "map.json"
    file.write_text(regimes.dump(MAP))
    monkeypatch.setattr(regimes.load, "__defaults__", (file,))


def keys(folder: Path, **values: object) -> str:
    config = {**small_config(folder), **values}
    return " ".join(f"{name}={json.dumps(value)}" for name, value in config.items()).replace('"', "'")


def called(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return done.exit_code, done.output + (str(done.exception) if done.exception and done.exit_code not in (0, 2) else "")


def test_the_advice_is_printed(tmp_path: Path) -> None:
    config = keys(tmp_path, partition="classes", clients=4, **{"partition-parameter": 1.0, "batch-size": 32, "local-steps": 5})
    code, said = called("--run-config", config, "--output", str(tmp_path / "out"))
    assert code == 0, said
    assert "4 clients, label skew" in said
    assert "Problem one class" in said
    assert [line.split()[1:6:2] for line in said.splitlines() if "│ fbn" in line] == [["fbn", "91.0", "+70.0"]]
    assert re.search(r"label skew +│ 1 +│ 1 ", said)
    assert not (tmp_path / "out").exists()  # nothing was run


@pytest.mark.parametrize("how", ["file", "kind"])
def test_data_are_named_as_an_argument(tmp_path: Path, how: str) -> None:
    file = small_npz(tmp_path)
    code, said = called(f"npz:{file}" if how == "kind" else str(file), "--run-config", "model='mlp' clients=3")
    assert code == 0, said
    assert re.search(r"samples of a client +│ 12 ", said)  # the default: a class each


@pytest.mark.parametrize("spelling", ["list", "arguments"])
def test_each_of_several_files_is_a_client_and_their_cameras_are_a_shift_of_features(tmp_path: Path, spelling: str) -> None:
    files = small_sites(tmp_path)
    data = [",".join(files)] if spelling == "list" else files
    found = {}
    for keys in ("", "clients=5", "partition='classes' clients=10"):
        code, said = called(*data, "--run-config", f"model='mlp' batch-size=32 {keys}")
        assert code == 0, said
        (found[keys],) = re.findall(r"npz: (.*\w)", said)
        assert ("Problem domains" in said) == ("classes" not in keys)
    assert found == {
        "": "5 clients, feature shift",
        "clients=5": "5 clients, feature shift",
        "partition='classes' clients=10": "10 clients, label skew",  # control: a partition that is named divides all samples anew
    }
    code, said = called(*data, "--run-config", "clients=10")
    assert (code, "data-path names 5 clients" in " ".join(said.split())) == (2, True)


def test_each_of_several_tables_is_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network for tables needs no key. Control: a partition that is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "columns.toml").write_text('target = "y"\nclasses = ["a", "b"]\n[numeric.x]\n[numeric.z]\n')
    rng = np.random.default_rng(0)
    for site in range(3):
        lines = [f"{rng.normal() + 4 * site:.3f},{site},{'ab'[n % 2]}" for n in range(60)]  # z is constant at each site
        (tmp_path / f"{site}.csv").write_text("x,z,y\n" + "\n".join(lines) + "\n")
    for data in (["0.csv", "1.csv", "2.csv"], ["."]):
        assert "csv: 3 clients, feature shift" in called(*data)[1]
    assert "csv: 2 clients, alike" in called(".", "--run-config", "partition='iid' clients=2")[1]


def test_a_method_that_the_run_config_does_not_allow_is_named_with_the_reason(tmp_path: Path) -> None:
    own = {"partition": "iid", "clients": 4, "batch-size": 32, "local-steps": 20}
    for secure in (True, False):
        code, said = called("--run-config", keys(tmp_path, **own, **{"secure-aggregation": secure}))
        assert code == 0, said
        assert ("cannot run: " in said) == secure


@pytest.mark.slow
def test_a_pilot_compares_the_best_on_validation_samples(tmp_path: Path) -> None:
    own = {"partition": "iid", "clients": 4, "rounds": 6, "local-steps": 5, "batch-size": 8}
    out = tmp_path / "out"
    arguments = ["--pilot", "--run-config", keys(tmp_path, **own), "--output", str(out)]
    code, said = called(*arguments)
    assert code == 0, said
    ran = {path.parent.name: tomllib.loads(path.read_text()) for path in out.glob("runs/*/config.toml")}
    assert {config["method"] for config in ran.values()} == {"fedavg", "hbn", "gn"}
    assert {(config["rounds"], config["validation-share"]) for config in ran.values()} == {(6, 0.2)}
    assert "Validation accuracy" in said
    before = {file: file.stat().st_mtime_ns for file in out.glob("**/rounds.jsonl")}
    assert called(*arguments)[0] == 0
    assert {file: file.stat().st_mtime_ns for file in out.glob("**/rounds.jsonl")} == before  # nothing ran again


@listed(
    ("arguments", "sentence"),
    [
        (["digits", "--run-config", "dataset='digits'"], "the data are named twice, as 'digits' and with dataset='digits'"),
        (["--run-config", "method='fbn'"], "advise looks at every method, but got method='fbn'"),
        (["--run-config", "fedprox-mu=0.7"], "fedprox-mu"),
        (["digit"], "dataset must be one of"),
        (["npz:nowhere.npz"], "nowhere.npz"),
        (["--run-config", "dataset='sites' classes=4 channels=1 image-size=4"], "the clients' data are at their sites"),
        (["--run-config", "partion='iid'"], "unknown config key 'partion'"),
    ],
)
def test_refused_in_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    code, said = called(*arguments, "--output", str(tmp_path / "out"))
    assert code == 2
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
