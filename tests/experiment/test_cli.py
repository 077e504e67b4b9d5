"""The command ``fl-bn``: what ``run``, ``compare`` and ``layers`` write, in a pipe, and what Ctrl-C leaves."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.experiment.inside import command, ends_well, ends_with_a_sentence, override, said
from tests.experiment.small_data import small_sites
from tests.experiment.terminal import in_a_pipe
from tests.integration.runs import TINY, bits, differences
from tests.listed import listed


def tiny_keys(**overrides: Any) -> str:
    return override({**TINY, **overrides})


def of_a_comparison(**overrides: Any) -> str:
    """``fl-bn compare`` decides on pictures itself."""
    return override({key: value for key, value in {**TINY, **overrides}.items() if key != "pictures"})


def test_run_and_a_name_that_exists(tmp_path: Path) -> None:
    ends_well("run", "--run-config", tiny_keys(method="fbn", rounds=1, output=str(tmp_path), name="mine"))
    assert "accuracy after round 1" in (tmp_path / "mine" / "summary.md").read_text()
    ends_with_a_sentence("run", "--run-config", tiny_keys(output=str(tmp_path), name="mine"), about=str(tmp_path / "mine"))


@pytest.mark.slow
def test_compare_then_again(tmp_path: Path) -> None:
    args = ("compare", "--methods", "centralised,fbn,fedavg:learning-rate=1e30", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path))
    result = command(*args, "--run-config", of_a_comparison(rounds=2, evaluate_every=1))
    assert result.exit_code == 1
    assert "failed fedavg_learning_rate=1e30-seed0: RunFailed:" in said(result)
    lines = (tmp_path / "table.md").read_text().splitlines()
    rows = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    assert rows == {"method", "---", "centralised", "fbn", "fedavg:learning-rate=1e30"}
    assert (tmp_path / "report.html").exists()
    assert "[round 2/2]" in (tmp_path / "runs" / "fbn-seed0.log").read_text()
    assert "accuracy after round 2" in (tmp_path / "runs" / "centralised-seed0" / "summary.md").read_text()

    made = {file: file.stat().st_mtime_ns for name in ("centralised", "fbn") for file in tmp_path.glob(f"runs/{name}-seed0/rounds.jsonl")}
    assert len(made) == 2
    ends_well(*args[:2], "centralised,fbn", *args[3:], "--run-config", of_a_comparison(rounds=2, evaluate_every=1))
    assert made == {file: file.stat().st_mtime_ns for file in made}


def test_run_and_compare_take_each_of_several_files_as_a_client(tmp_path: Path) -> None:
    keys = f"dataset='npz' data-path='{','.join(small_sites(tmp_path))}' model='mlp' rounds=1 local-steps=1 device='cpu'"
    ends_well("run", "--run-config", f"{keys} pictures=false output='{tmp_path}' name='run'")
    ends_well("compare", "--methods", "fedavg", "--seeds", "1", "--jobs", "1", "--output", tmp_path, "--run-config", keys)
    for folder in ("run", "runs/fedavg-seed0"):
        made = tomllib.loads((tmp_path / folder / "config.toml").read_text())
        assert (made["clients"], made["partition"]) == (5, "natural")
        assert len((tmp_path / folder / "clients.csv").read_text().splitlines()) == 1 + 5
    for name in ("run", "compare"):
        ends_with_a_sentence(name, "--run-config", f"{keys} clients=4", about="clients=4")


@listed("variant", ["nope", "gn:groups=7"])
def test_compare_refuses_a_wrong_variant_before_it_starts(variant: str, tmp_path: Path) -> None:
    keys = ("--run-config", of_a_comparison(rounds=1))
    ends_with_a_sentence("compare", "--methods", f"fbn,{variant}", "--output", tmp_path / "x", *keys, about=variant[-4:])
    assert not (tmp_path / "x").exists()


def test_layers() -> None:
    text = ends_well("layers", "resnet18", "--method", "hbn")
    assert "method hbn: found 20 BatchNorm2d, trained as 20 HybridBatchNorm" in text
    assert "20 tensors of role mixing: stays at its client" in text
    assert "40 tensors of role affine: stays at its client" in said(command("layers", "resnet18", "--method", "fedbn"))
    for args, about in ((("nope",), "model"), (("mlp", "--method", "nope"), "method")):
        ends_with_a_sentence("layers", *args, about=about)


def test_layers_of_a_network_of_ones_own_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\n\ndef {}(classes, channels, image_size):\n    return nn.Sequential(nn.{}(channels))\n"
    (tmp_path / "own_net_of_this_folder.py").write_text(code.format("build", "BatchNorm2d") + code.format("bare", "LayerNorm"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert "1 BatchNorm2d" in ends_well("layers", "own_net_of_this_folder:build", "--method", "fbn")
    averaged, refused = (said(command("layers", "own_net_of_this_folder:bare", "--method", method)) for method in ("fedbn", "fbn"))
    assert "2 tensors of role affine of other norms: shared" in averaged
    assert "stays at its client" not in averaged
    assert "method fedbn is plain federated averaging here" in averaged
    assert "method fbn is about the statistics of BatchNorm" in refused


# What a run prints in a pipe, what Ctrl-C leaves, and that fl-bn resume goes on from there


ROUNDS = 40
SHORT = re.compile(r"\d\d:\d\d:\d\d \[round (\d+)/3\] 3/3 clients  loss \d+\.\d{4}(  accuracy \d+\.\d%)?(  min \d+\.\d%)?  \d+\.\d s")


def run_config(folder: Path, name: str, **changes: object) -> str:
    return override({**TINY, "output": str(folder), "name": name, **changes})


@pytest.mark.slow
def test_a_pipe_and_the_log_file_get_a_short_line_per_round(tmp_path: Path) -> None:
    status, said = in_a_pipe("run", "--run-config", run_config(tmp_path, "run", method="hbn"))
    assert status == 0, said
    assert "\x1b" not in said
    rounds = [line for line in said.splitlines() if "[round" in line]
    assert [SHORT.fullmatch(line)[1] for line in rounds] == ["1", "2", "3"]  # type: ignore[index]
    assert ["accuracy" in line for line in rounds] == [False, True, True]
    assert max(map(len, said.splitlines())) < 140 or str(tmp_path) in max(said.splitlines(), key=len)
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("[round ") == 3
    assert said.splitlines().index(rounds[0]) <= 4  # what becomes of each kind of tensor is elsewhere
    kept = "tensors of role mixing: stays at its client"
    assert kept not in said
    assert kept in log
    assert kept in (tmp_path / "run" / "summary.md").read_text()
    assert log.splitlines()[-1].endswith(f"results: {tmp_path / 'run'}")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that was sent SIGINT after the line of its seventh round, and what it said."""
    folder = tmp_path_factory.mktemp("interrupted")
    long = run_config(folder, "run", method="fedbn", rounds=ROUNDS, pictures=True)
    status, said = in_a_pipe("run", "--run-config", long, interrupt_at=f"[round 7/{ROUNDS}]")
    assert status == 130, said
    assert "Traceback" not in said
    return folder / "run", said


@pytest.mark.slow
def test_ctrl_c_leaves_a_folder_and_says_how_to_go_on(interrupted: tuple[Path, str]) -> None:
    path, said = interrupted
    done = len((path / "rounds.jsonl").read_text().splitlines())
    assert 6 <= done < ROUNDS  # its line is printed before it is written
    assert f"interrupted after round {done} of {ROUNDS}. Go on from round {done // 5 * 5}: fl-bn resume {path}" in said
    assert f"**The run was interrupted** after {done} of {ROUNDS} rounds." in (path / "summary.md").read_text()
    for file in ("accuracy.png", "model.safetensors", "rounds.csv", "run.log", "disclosure.csv"):
        assert (path / file).stat().st_size > 0


@pytest.mark.slow
def test_the_resumed_run_has_the_bits_of_one_that_nobody_interrupted(interrupted: tuple[Path, str], tmp_path: Path) -> None:
    path = Path(shutil.copytree(interrupted[0], tmp_path / "run"))
    early = bits(path)
    status, said = in_a_pipe("resume", str(path))
    assert status == 0, said
    assert f"[round {ROUNDS}/{ROUNDS}] 3/3 clients" in said
    assert "[round 1/" not in said
    ends_well("run", "--run-config", run_config(tmp_path, "whole", method="fedbn", rounds=ROUNDS))
    whole = bits(tmp_path / "whole")
    assert differences(whole, bits(path)) == []
    assert differences(whole, early) != []  # control
    assert "Interrupted" not in (path / "summary.md").read_text()
    ends_with_a_sentence("resume", path, about=f"all of its {ROUNDS} rounds are done")
