"""Files that are whole or absent: failures half-way, kills, every damaged byte, every kind of tensor."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_bn.support import durable
from fl_bn.support.durable import BLANK, CHECKSUM, SUFFIX, UNFINISHED, Damaged, load_tensors, save_tensors, set_aside, write
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


# Writing: one table of the moments at which a writer fails or dies

FULL = OSError(errno.ENOSPC, "No space left on device")
FAILS: dict[str, tuple[str, BaseException]] = {  # the call of ``os`` that fails
    "no file can be opened": ("open", FULL),
    "the disk is full at the end": ("fsync", FULL),
    "the file cannot be renamed": ("replace", FULL),
    "the user interrupts": ("fsync", KeyboardInterrupt()),
}


@listed("there", [True, False])
@listed("case", FAILS)
def test_a_write_that_fails_half_way_leaves_what_was_there_and_nothing_else(case: str, there: bool, tmp_path: Path) -> None:
    path, (call, error) = tmp_path / "file", FAILS[case]
    if there:
        write(path, OLD)

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(durable.os, call, fail)
        with pytest.raises(type(error)):
            write(path, NEW)
    assert names(tmp_path) == (["file"] if there else [])
    assert not there or path.read_bytes() == OLD
    write(path, NEW)  # control: it was the failure alone
    assert path.read_bytes() == NEW


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


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is synced and renamed from here on, in order."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('-')[0]}")
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        calls.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    return calls


def test_content_is_on_the_disk_before_its_name_and_the_name_and_new_folders_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut after ``write`` has returned can lose a run's first checkpoint with the folder that holds it."""
    calls = synced(monkeypatch)
    write(tmp_path / "outer" / "inner" / "file", NEW)
    assert (tmp_path / "outer" / "inner" / "file").read_bytes() == NEW
    assert {"sync inner", "sync outer", f"sync {tmp_path.name.partition('-')[0]}"} <= set(calls)
    assert calls[-3:] == [f"sync {UNFINISHED.rstrip('-')}", "rename to file", "sync inner"]


def test_a_file_system_that_cannot_sync_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems: EINVAL. The file is there, so nothing has failed."""
    fsync = os.fsync

    def no_folders(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    write(tmp_path / "file", NEW)
    assert (names(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], NEW)


def test_files_that_a_dead_writer_left_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    dead, alive, other = tmp_path / f"{UNFINISHED}dead", tmp_path / f"{UNFINISHED}alive", tmp_path / "mine"
    for left, age in ((dead, durable.STALE + 60), (alive, durable.STALE - 60), (other, 10 * durable.STALE)):
        left.write_bytes(OLD)
        os.utime(left, (time.time() - age,) * 2)
    write(tmp_path / "file", NEW)
    assert names(tmp_path) == [alive.name, "file", "mine"]


def test_writers_of_one_folder_and_one_file_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    errors: list[OSError] = []

    def writer(letter: bytes) -> None:
        for i in range(100):
            try:
                write(tmp_path / "file", letter * (1000 + i))
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=writer, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    content = (tmp_path / "file").read_bytes()
    assert (names(tmp_path), len(set(content)), len(content)) == (["file"], 1, 1099)


@listed(("asked", "umask", "got"), [(None, 0o000, 0o600), (None, 0o077, 0o600), (0o666, 0o022, 0o644)])
def test_modes(asked: int | None, umask: int, got: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        for _ in range(2):  # new, and over another
            write(tmp_path / "file", NEW, **({} if asked is None else {"mode": asked}))
            assert (tmp_path / "file").stat().st_mode & 0o777 == got
    finally:
        os.umask(before)


# Tensors

KINDS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
TENSORS: dict[str, Tensor] = {
    **{str(kind): torch.tensor([[0, 1, 2], [3, 250 % 128, 1]]).to(kind) for kind in KINDS},
    **{f"0-dim {kind}": torch.tensor(1).to(kind) for kind in KINDS},
    "not numbers": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45], dtype=torch.float64),
    "tiny": torch.tensor([1 + 2**-52, 1 - 2**-53], dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "all": base,
    "a view of it": base[1],
    "again": base,
    "transposed": base.T,
    "every other": base[:, ::2],
    "expanded": base[:1].expand(5, 4),
    "with a gradient": torch.ones(2, requires_grad=True),
    "a name/with slashes, ünï çôdé and \"quotes\"": torch.ones(1),
}  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / f"tensors{SUFFIX}"
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


ABOUT = st.text(st.characters(codec="utf-8"), max_size=5) | st.just(BLANK) | st.just(2 * BLANK)


@settings(max_examples=30)
@given(about=st.dictionaries(ABOUT, ABOUT, max_size=4))
def test_what_a_file_says_of_itself_comes_back(about: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where it looks like an empty checksum: a run may be called so. And without tensors."""
    path, about = tmp_path_factory.getbasetemp() / "about", {key: value for key, value in about.items() if key != CHECKSUM}
    for tensors in ({"a": torch.ones(2)}, {}):
        save_tensors(path, tensors, about)
        assert load_tensors(path)[1] == about


# Damage


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


def test_every_byte_that_is_another_is_found(small: bytes) -> None:
    assert not refused(small)  # control
    missed = [
        (at, value)
        for at, was in enumerate(small)
        for value in range(256)
        if value != was and not refused(small[:at] + bytes([value]) + small[at + 1 :])
    ]
    assert missed == []


def test_every_missing_or_additional_end_is_found(small: bytes) -> None:
    assert [length for length in range(len(small)) if not refused(small[:length])] == []
    assert all(refused(small + more) for more in (b"\0", b" ", small, small[8:]))
    assert all(refused(small[:at] + small[at + 1 :]) for at in range(len(small)))


def forged(header: Any, data: bytes = b"") -> bytes:
    """A file of any header, whose checksum is right if it has the place for one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    return whole.replace(BLANK.encode(), hashlib.sha256(whole).hexdigest().encode(), 1)


GOOD = {"__metadata__": {CHECKSUM: BLANK}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
FORGED: dict[str, Any] = {
    "no metadata": {},
    "metadata that are text": {"__metadata__": BLANK},
    "a header that is a list": [{"__metadata__": {CHECKSUM: BLANK}}],
    "no checksum": {"__metadata__": {"round": "3"}},
    "a checksum that is a number": {"__metadata__": {CHECKSUM: 64}},
    "a short checksum": {"__metadata__": {CHECKSUM: "0" * 63}},
    "a checksum of other letters": {"__metadata__": {CHECKSUM: "\ud800" * 64}},
    "no tensor's dtype": GOOD | {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "data of another size": GOOD | {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}},
    "nested without end": b'{"__metadata__":' + b"[" * 100_000,
    "not UTF-8": b'{"__metadata__":{"\xff":"x"}}',
}


@listed("case", FORGED)
def test_files_of_others_are_damaged_whatever_is_in_them(case: str) -> None:
    assert not refused(forged(GOOD, b"abcd"))  # control: the forger knows how
    assert refused(forged(FORGED[case], b"abcd"))


def test_what_is_wrong_is_said_with_the_files_name(small: bytes, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "plain", {"round": "3"})
    (tmp_path / "text").write_text("accuracy,loss\n")
    (tmp_path / "short").write_bytes(small[:-1])
    for name in ("plain", "text", "short"):
        with naming(f"{tmp_path / name}: ", Damaged):
            load_tensors(tmp_path / name)
    with pytest.raises(FileNotFoundError):  # absent is not damaged
        load_tensors(tmp_path / "absent")


def test_what_is_set_aside_is_never_lost(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "file").write_bytes(bytes([number]))
        assert set_aside(tmp_path / "file").name == f"file.set-aside-{number + 1}"
    assert names(tmp_path) == [f"file.set-aside-{number + 1}" for number in range(3)]
    assert [(tmp_path / name).read_bytes()[0] for name in names(tmp_path)] == [0, 1, 2]
