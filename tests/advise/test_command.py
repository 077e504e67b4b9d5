"""The command ``fl-bn advise``: what it prints and writes, and what it refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_the_advice_is_printed_and_written(tmp_path: Path) -> None:
    config = keys(tmp_path, partition="classes", clients=4, **{"partition-parameter": 1.0, "batch-size": 32, "local-steps": 5})
    code, said = called("--run-config", config, "--output", str(tmp_path / "out"))
    assert code == 0, said
    assert "Nearest regime: one class. Problem one class." in said
    assert "There: fbn is ahead of all others." in said
    found = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert found["nearest"] == "one class"
    assert found["candidates"] == ["fbn", "gn"]  # fedavg, the third, is far behind
    assert found["measured"]["label_skew"] == 1.0
    assert (found["chosen"], found["final"]) == ("", None)
    page = (tmp_path / "out" / "advice.md").read_text()
    assert "| fbn | 91.0 %, +70.0 points to plain BatchNorm |" in page
    assert not (tmp_path / "out" / "pilot").exists()


@pytest.mark.parametrize("how", ["file", "kind"])
def test_data_are_named_as_an_argument(tmp_path: Path, how: str) -> None:
    file = small_npz(tmp_path)
    code, said = called(
        f"npz:{file}" if how == "kind" else str(file), "--run-config", "model='mlp' clients=3", "--output", str(tmp_path / "out")
    )
    assert code == 0, said
    assert json.loads((tmp_path / "out" / "advice.json").read_text())["measured"]["middle"] == 12  # the default: a class each


@pytest.mark.parametrize("spelling", ["list", "arguments"])
def test_each_of_several_files_is_a_client_and_their_cameras_are_a_shift_of_features(tmp_path: Path, spelling: str) -> None:
    files = small_sites(tmp_path)
    data = [",".join(files)] if spelling == "list" else files
    found = {}
    for keys in ("", "clients=5", "partition='classes' clients=10"):
        code, said = called(*data, "--run-config", f"model='mlp' batch-size=32 {keys}", "--output", str(tmp_path / "out"))
        assert code == 0, said
        advice = json.loads((tmp_path / "out" / "advice.json").read_text())
        assert ("5 clients, feature shift" in said) == ("classes" not in keys)
        found[keys] = (advice["measured"]["clients"], advice["nearest"], advice["measured"]["label_skew"])
    assert found == {
        "": (5, "domains", 0.0),
        "clients=5": (5, "domains", 0.0),
        "partition='classes' clients=10": (10, "one class", 1.0),  # control: a partition that is named divides all samples anew
    }
    code, said = called(*data, "--run-config", "clients=10", "--output", str(tmp_path / "out"))
    assert (code, "data-path names 5 files or folders, each of which is a client" in " ".join(said.split())) == (2, True)


def test_a_method_that_the_run_config_does_not_allow_is_left_out(tmp_path: Path) -> None:
    own = {"partition": "iid", "clients": 4, "batch-size": 32, "local-steps": 20}
    for secure, candidates, left_out in ((True, ["fixbn", "gn"], ["fedtan"]), (False, ["fedtan", "fixbn"], [])):
        config = keys(tmp_path, **own, **{"secure-aggregation": secure})
        code, said = called("--run-config", config, "--output", str(tmp_path / f"out{secure}"))
        assert code == 0, said
        found = json.loads((tmp_path / f"out{secure}" / "advice.json").read_text())
        assert (found["nearest"], found["candidates"], list(found["left-out"])) == ("many steps", candidates, left_out)
        assert ("fedtan is left out: " in said) == secure


@pytest.mark.slow
def test_a_pilot_goes_on_with_the_best(tmp_path: Path) -> None:
    own = {"partition": "iid", "clients": 4, "rounds": 6, "local-steps": 5, "batch-size": 8}
    out = tmp_path / "out"
    arguments = ["--pilot", "--methods", "fedavg,fbn,gn", "--run-config", keys(tmp_path, **own), "--output", str(out)]
    code, said = called(*arguments)
    assert code == 0, said
    found = json.loads((out / "advice.json").read_text())
    assert [rung["rounds"] for rung in found["pilot"]] == [6, 6]
    assert found["chosen"] in found["candidates"]
    assert (out / f"{found['chosen']}-seed0" / "model.safetensors").exists()
    before = {file: file.stat().st_mtime_ns for file in out.glob("**/rounds.jsonl")}
    assert called(*arguments)[0] == 0
    assert {file: file.stat().st_mtime_ns for file in out.glob("**/rounds.jsonl")} == before  # nothing ran again


@listed(
    ("arguments", "sentence"),
    [
        (["digits", "--run-config", "dataset='digits'"], "the data are named twice, as 'digits' and with dataset='digits'"),
        (["--run-config", "method='fbn'"], "advise chooses the method, but got method='fbn'"),
        (["--run-config", "fedprox-mu=0.7"], "fedprox-mu"),
        (["--methods", "fbn"], "--methods names candidates for --pilot: add --pilot, or leave out --methods"),
        (["digit"], "dataset must be one of"),
        (["npz:nowhere.npz"], "nowhere.npz"),
        (["--run-config", "dataset='sites' classes=4 channels=1 image-size=4"], "the clients' data are at their sites"),
        (["--run-config", "partion='iid'"], "unknown config key 'partion'"),
        (["--pilot", "--methods", "fbm"], "'fbm'"),
    ],
)
def test_refused_in_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    code, said = called(*arguments, "--output", str(tmp_path / "out"))
    assert code == 2
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "out" / "pilot").exists()
