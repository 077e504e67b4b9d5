"""The command ``fl-bn advise``: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from fl_bn.app.advise import regimes
from fl_bn.app.assembly import source_model
from fl_bn.app.config import RunConfig
from fl_bn.app.overrides import parse_overrides
from tests.advise.test_measure import MAP
from tests.experiment.inside import ends_well, ends_with_a_sentence, override
from tests.experiment.small_data import small_config, small_sites
from tests.listed import listed


@pytest.fixture(autouse=True)
def made_up_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "map.json").write_text(regimes.dump(MAP))
    monkeypatch.setattr(regimes.load, "__defaults__", (tmp_path / "map.json",))
    monkeypatch.setenv("COLUMNS", "200")


def keys(folder: Path, **values: object) -> str:
    return override({**small_config(folder), "clients": 4, "batch_size": 32, **values})


def test_the_advice_is_printed(tmp_path: Path) -> None:
    config = keys(tmp_path, partition="classes", partition_parameter=1.0, local_steps=5)
    said = ends_well("advise", "--run-config", config)
    for part in ("4 clients, label skew", "Problem one class", "│ fbn │ 91.0 │ +70.0 (+65.0 to", "skew │ 1 │ 1 ", "give its model-weights"):
        assert part in said
    torch.save(source_model(RunConfig.from_mapping(parse_overrides(config))).state_dict(), tmp_path / "weights.pt")
    trained = ends_well("advise", "--run-config", f"{config} model-weights='{tmp_path / 'weights.pt'}'")
    assert "freeze-after=0" in trained
    assert "freeze-after=0" not in said


def test_each_of_several_files_is_a_client_and_their_cameras_are_a_shift_of_features(tmp_path: Path) -> None:
    """Control: a partition that is named divides all samples anew."""
    data = small_sites(tmp_path)
    for keys, found in (("", "5 clients, feature shift"), ("partition='classes' clients=10", "10 clients, label skew")):
        said = ends_well("advise", *data, "--run-config", f"model='mlp' batch-size=32 {keys}")
        assert f"npz: {found}" in said
        assert ("Problem domains" in said) == ("classes" not in keys)
    ends_with_a_sentence("advise", *data, "--run-config", "clients=10", about="data-path names 5 clients")


@pytest.mark.slow
def test_a_pilot_compares_the_best_on_validation_samples(tmp_path: Path) -> None:
    config, out = keys(tmp_path, partition="iid", rounds=6, local_steps=5, batch_size=8), tmp_path / "out"
    arguments = ("advise", "--pilot", "--run-config", config, "--output", out)
    assert "Validation accuracy" in ends_well(*arguments)
    ran = [tomllib.loads(path.read_text()) for path in out.glob("runs/*/config.toml")]
    assert {config["method"] for config in ran} == {"fedavg", "hbn", "gn"}
    assert {(config["rounds"], config["validation-share"]) for config in ran} == {(6, 0.2)}
    before = {file: file.stat().st_mtime_ns for file in out.glob("**/rounds.jsonl")}
    ends_well(*arguments)
    assert {file: file.stat().st_mtime_ns for file in out.glob("**/rounds.jsonl")} == before  # nothing ran again


@listed(
    ("arguments", "about"),
    [
        (["digits", "--run-config", "dataset='digits'"], "dataset='digits'"),
        (["--run-config", "method='fbn'"], "method='fbn'"),
        (["npz:nowhere.npz"], "nowhere.npz"),
        (["digits", "--output", "out"], "need --pilot"),
        (["--run-config", "dataset='sites' classes=4 channels=1 image-size=4"], "sites"),
    ],
)
def test_refused_in_one_sentence(arguments: list[str], about: str) -> None:
    ends_with_a_sentence("advise", *arguments, about=about)
