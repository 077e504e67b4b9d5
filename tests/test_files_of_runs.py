"""Equal tensors give equal files, and a package says of which commit it is, with git and without."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save

from fl_bn.support import commit as commit_module
from fl_bn.support.durable import in_order

ABOUT = {name: f"value of {name}" for name in ("method", "rounds", "seed", "dataset", "größe", 'a "quote"', "z", "y", "x", "w")}
TENSORS = {"b.weight": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(3, dtype=torch.int64), "c": torch.zeros(0)}


def names(data: bytes) -> list[str]:
    return list(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"])


def test_equal_tensors_give_equal_files_whose_metadata_are_in_order(tmp_path: Path) -> None:
    plain = {save(TENSORS, ABOUT) for _ in range(20)}
    (data,) = {in_order(one) for one in plain}
    assert len(plain) > 1, "control: safetensors itself does not sort"
    assert names(data) == sorted(ABOUT)
    loaded = load(data)
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    (tmp_path / "model.safetensors").write_bytes(data)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == ABOUT
    assert in_order(save(TENSORS)) == save(TENSORS)  # without metadata it stays as it is


def test_a_package_without_git_says_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "PACKAGE", tmp_path)
    assert commit_module.commit() == ""
    (tmp_path / "commit.toml").write_text('commit = "1234abc+"\n')
    assert commit_module.commit() == "1234abc+"


def test_a_checkout_says_its_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True, capture_output=True, timeout=60)
    clean = commit_module.commit_of(tmp_path)
    assert clean.isalnum()
    (tmp_path / "file").write_text("2")
    assert commit_module.commit_of(tmp_path) == f"{clean}+"
