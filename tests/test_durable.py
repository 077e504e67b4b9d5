"""Files that are whole or absent: failures half-way, every damaged byte, every kind of tensor, and equal tensors in equal files."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor
from typer.testing import CliRunner

from fl_bn.app import adapt
from fl_bn.app.config import RunConfig
from fl_bn.app.history import PASSES, History
from fl_bn.app.sweep import run as sweeps
from fl_bn.app.sweep.file import Sweep
from fl_bn.cli.main import app as command
from fl_bn.federation.recalibration import Movement, Pass
from fl_bn.support.durable import STALE, UNFINISHED, Damaged, append, in_order, load_tensors, save_tensors, write
from tests.listed import listed
from tests.refusals import naming

OLD, NEW = b"old" * 100, b"new" * 5000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: the kernel writes what fits, and then refuses, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, OLD)
    for size in (len(OLD), len(NEW) - 1):
        with room_for(size), pytest.raises(OSError, match="File too large"):
            write(path, NEW)
        assert (names(tmp_path), path.read_bytes()) == (["file"], OLD)
    with room_for(len(NEW)):
        write(path, NEW)
    assert (names(tmp_path), path.read_bytes()) == (["file"], NEW)


CLIENT = SimpleNamespace(test=SimpleNamespace(y=torch.zeros(2, dtype=torch.long)))
WRITERS: dict[str, Callable[[Path], object]] = {
    "adaptation.csv": lambda path: adapt.write([], CLIENT, RunConfig(), path.parent),  # type: ignore[arg-type]
    "sweep.toml": lambda path: sweeps.run(Sweep("a title", {"rounds": 2}, {}), sweeps.Plan([], [], {}), path.parent, 1, print),
    "privacy.jsonl": lambda path: append(path, OLD),
}


@listed("file", WRITERS)
def test_a_writer_of_results_names_the_file_that_does_not_fit_and_leaves_what_was_there(file: str, tmp_path: Path) -> None:
    (path := tmp_path / file).write_bytes(OLD)
    with room_for(len(OLD) + 10 if file == "privacy.jsonl" else 10), pytest.raises(OSError, match=file):
        WRITERS[file](path)
    assert (names(tmp_path), path.read_bytes()) == ([file], OLD)


def test_what_a_full_disk_has_no_room_for_waits(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.begin()
    history.add_passes([Pass(1, (Movement("bn", 0.5, 2.0),), 3, True)])
    with room_for(10), pytest.raises(OSError, match=PASSES):
        history.lengths()
    assert (tmp_path / PASSES).read_bytes() == b""
    history.lengths()
    assert (tmp_path / PASSES).read_text().splitlines() == ["pass,clients,layer,mean-moved,variance-factor", "1,3,bn,0.5,2.0"]


def test_a_command_says_in_one_sentence_that_the_disk_is_full(tmp_path: Path) -> None:
    with chdir(tmp_path), room_for(10):
        done = CliRunner().invoke(command, ["new", "mine"])
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1)
    assert "File too large: 'mine/" in done.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_content_is_on_the_disk_before_its_name_and_the_name_and_new_folders_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut after ``write`` has returned can lose a run's first checkpoint with the folder that holds it."""
    calls: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write(tmp_path / "outer" / "inner" / "file", NEW)
    assert {"inner", "outer", tmp_path.name} <= set(calls)
    assert calls[-2].startswith(UNFINISHED)
    assert calls[-1] == "inner"


def test_files_that_a_dead_writer_left_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    dead, alive, other = tmp_path / f"{UNFINISHED}dead", tmp_path / f"{UNFINISHED}alive", tmp_path / "mine"
    for left, age in ((dead, STALE + 60), (alive, STALE - 60), (other, 10 * STALE)):
        left.write_bytes(OLD)
        os.utime(left, (time.time() - age,) * 2)
    write(tmp_path / "file", NEW)
    assert names(tmp_path) == [alive.name, "file", "mine"]


# Tensors

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)
base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
TENSORS: dict[str, Tensor] = {
    **{str(kind): torch.tensor([[0, 1, 2], [3, 250 % 128, 1]]).to(kind) for kind in KINDS},
    **{f"0-dim {kind}": torch.tensor(1).to(kind) for kind in KINDS},
    "not numbers": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45], dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "all": base,
    "a view of it": base[1],
    "again": base,
    "transposed": base.T,
    "with a gradient": torch.ones(2, requires_grad=True),
    "a name/with slashes, ünï çôdé and \"quotes\"": torch.ones(1),
}  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    save_tensors(path, TENSORS, {"what": 'a "test"', "empty": "", "ünï": "çôdé"})
    tensors, about = load_tensors(path)
    assert about == {"what": 'a "test"', "empty": "", "ünï": "çôdé"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        got = tensors[name]
        assert (got.dtype, got.shape, bits(got)) == (tensor.dtype, tensor.shape, bits(tensor)), name
        assert not got.requires_grad
    tensors["all"][0, 0] = 99  # what shared memory does so no more
    assert tensors["again"][0, 0] == base[0, 0] == 0
    assert load_file(path).keys() == TENSORS.keys()  # any reader opens it


def test_equal_tensors_give_equal_files() -> None:
    about, tensors = (
        {name: f"value of {name}" for name in ("rounds", "größe", 'a "quote"', "z", "y", "x", "w")},
        {"b": base, "a": torch.ones(1)},
    )
    plain = {save(tensors, about) for _ in range(20)}
    (data,) = {in_order(one) for one in plain}
    assert len(plain) > 1, "control: safetensors itself does not sort"
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(data).items())


def refused(data: bytes) -> bool:
    """Read a file that is in memory: tens of thousands are read in a second."""
    try:
        load_tensors(SimpleNamespace(read_bytes=lambda: data))  # type: ignore[arg-type]
    except Damaged:
        return True
    return False


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    save_tensors(tmp_path / "small", {"a": torch.tensor([1.5, -2.0]), "b": torch.tensor(7)}, {"round": "12"})
    return (tmp_path / "small").read_bytes()


def test_every_other_byte_and_every_missing_or_additional_end_is_found(small: bytes) -> None:
    assert not refused(small)  # control
    missed = [
        (at, value)
        for at, was in enumerate(small)
        for value in range(256)
        if value != was and not refused(small[:at] + bytes([value]) + small[at + 1 :])
    ]
    assert missed == []
    assert [length for length in range(len(small)) if not refused(small[:length])] == []
    assert all(refused(small + more) for more in (b"\0", small, small[8:]))


def test_what_is_wrong_is_said_with_the_files_name(small: bytes, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "plain", {"round": "3"})
    (tmp_path / "text").write_text("accuracy,loss\n")
    (tmp_path / "short").write_bytes(small[:-1])
    for name in ("plain", "text", "short"):
        with naming(f"{tmp_path / name}: ", Damaged):
            load_tensors(tmp_path / name)
    with pytest.raises(FileNotFoundError):  # absent is not damaged
        load_tensors(tmp_path / "absent")
