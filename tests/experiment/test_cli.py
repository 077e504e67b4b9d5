"""The command ``fl-bn``: what ``run``, ``compare`` and ``layers`` write, and what Ctrl-C leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiment.inside import ends_well, ends_with_a_sentence, in_a_pipe, override
from tests.experiment.small_data import small_sites
from tests.integration.runs import TINY, bits, differences


def test_run_and_compare_take_each_of_several_files_as_a_client(tmp_path: Path) -> None:
    keys = f"dataset='npz' data-path='{','.join(small_sites(tmp_path))}' model='mlp' rounds=1 local-steps=1 device='cpu'"
    named = f"{keys} pictures=false output='{tmp_path}' name='run'"
    ends_well("run", "--run-config", named)
    ends_with_a_sentence("run", "--run-config", named, about=str(tmp_path / "run"))  # it is there
    ends_well("compare", "--methods", "fedavg", "--seeds", "1", "--jobs", "1", "--output", tmp_path, "--run-config", keys)
    for folder in ("run", "runs/fedavg-seed0"):
        assert len((tmp_path / folder / "clients.csv").read_text().splitlines()) == 1 + 5
    for name in ("run", "compare"):
        ends_with_a_sentence(name, "--run-config", f"{keys} clients=4", about="clients=4")


@pytest.mark.slow
def test_layers_of_a_network_of_ones_own_in_this_folder(tmp_path: Path) -> None:
    code = "from torch import nn\n\ndef build(classes, channels, image_size):\n    return nn.Sequential(nn.BatchNorm2d(channels))\n"
    (tmp_path / "own_net.py").write_text(code)
    status, said = in_a_pipe("layers", "own_net:build", "--method", "fbn", folder=tmp_path)
    assert (status, "1 BatchNorm2d" in said) == (0, True), said


# What Ctrl-C leaves, and that fl-bn resume goes on from there


ROUNDS = 40


def run_config(folder: Path, name: str, **changes: object) -> str:
    return override({**TINY, "output": str(folder), "name": name, **changes})


@pytest.mark.slow
def test_ctrl_c_leaves_a_folder_that_goes_on_with_the_bits_of_a_run_that_nobody_interrupted(tmp_path: Path) -> None:
    long = run_config(tmp_path, "run", method="fedbn", rounds=ROUNDS, pictures=True)
    status, said = in_a_pipe("run", "--run-config", long, interrupt_at=f"[round 7/{ROUNDS}]")
    assert (status, "Traceback" in said, "\x1b" in said) == (130, False, False), said
    path = tmp_path / "run"
    done = len((path / "rounds.jsonl").read_text().splitlines())
    assert 6 <= done < ROUNDS  # its line is printed before it is written
    assert f"stopped after round {done} of {ROUNDS}. Go on from round {done // 5 * 5}: fl-bn resume {path}" in said
    assert f"**The run was stopped** after {done} of {ROUNDS} rounds." in (path / "summary.md").read_text()
    for file in ("accuracy.png", "model.safetensors", "rounds.csv", "run.log", "disclosure.csv"):
        assert (path / file).stat().st_size > 0
    early = bits(path)
    status, said = in_a_pipe("resume", str(path))
    assert status == 0, said
    assert "[round 1/" not in said
    ends_well("run", "--run-config", run_config(tmp_path, "whole", method="fedbn", rounds=ROUNDS))
    whole = bits(tmp_path / "whole")
    assert differences(whole, bits(path)) == []
    assert differences(whole, early) != []  # control
    assert "interrupted" not in (path / "summary.md").read_text()
    ends_with_a_sentence("resume", path, about=f"is finished, after {ROUNDS} rounds")
