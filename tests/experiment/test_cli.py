"""The command ``fl-bn``: ``run``, ``compare`` and ``layers``, by what they write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.experiment.inside import command, ends_well, ends_with_a_sentence, override, said
from tests.integration.runs import TINY
from tests.listed import listed


def keys(**overrides: Any) -> str:
    return override({**TINY, **overrides})


def of_a_comparison(**overrides: Any) -> str:
    """``fl-bn compare`` decides on pictures itself."""
    return override({key: value for key, value in {**TINY, **overrides}.items() if key != "pictures"})


def test_run_and_a_name_that_exists(tmp_path: Path) -> None:
    ends_well("run", "--run-config", keys(method="fbn", rounds=1, output=str(tmp_path), name="mine"))
    assert "accuracy after round 1" in (tmp_path / "mine" / "summary.md").read_text()
    ends_with_a_sentence("run", "--run-config", keys(output=str(tmp_path), name="mine"), about=str(tmp_path / "mine"))


def test_compare_then_again(tmp_path: Path) -> None:
    args = ("compare", "--methods", "centralised,fbn,fedavg:learning-rate=1e30", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path))
    result = command(*args, "--run-config", of_a_comparison(rounds=2, evaluate_every=1))
    assert result.exit_code == 1
    assert "failed fedavg_learning_rate=1e30-seed0: RunFailed:" in said(result)
    lines = (tmp_path / "table.md").read_text().splitlines()
    rows = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    assert rows == {"method", "---", "centralised", "fbn", "fedavg:learning-rate=1e30"}
    assert (tmp_path / "comparison.png").exists()
    assert "[round 2/2]" in (tmp_path / "runs" / "fbn-seed0.log").read_text()
    assert "accuracy after round 2" in (tmp_path / "runs" / "centralised-seed0" / "summary.md").read_text()

    made = {file: file.stat().st_mtime_ns for name in ("centralised", "fbn") for file in tmp_path.glob(f"runs/{name}-seed0/rounds.jsonl")}
    assert len(made) == 2
    ends_well(*args[:2], "centralised,fbn", *args[3:], "--run-config", of_a_comparison(rounds=2, evaluate_every=1))
    assert made == {file: file.stat().st_mtime_ns for file in made}


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
