"""The doctor's checks one by one, each with what makes it say something else."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fl_bn.checks import clock, experiment, machine
from fl_bn.federation.settings import LocalTraining
from fl_bn.support.finding import Finding
from fl_bn.support.loopback import EXCEPTIONS
from fl_bn_site.checks import network
from fl_bn_site.folders import ServerFolder
from tests.deployment import tls_servers
from tests.listed import listed


def install(folder: Path, name: str, version: str) -> Path:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("name", "version", "status", "words"),
    [
        ("flwr", "1.25.0", "ok", "needed: >=1.25,<1.26"),
        ("flwr", "1.26.0", "fail", "1.26.0 is installed, but fl-bn needs >=1.25,<1.26"),
        ("flwr", "1.24.9", "fail", "fl-bn needs"),
        ("flwr", "1.25.3", "warn", "1.25.3 is installed, but 1.25.0 was tested"),
        ("torch", "2.7.1+cu128", "ok", "as tested"),
        ("torch", "2.5.0", "fail", "fl-bn needs >=2.6"),
        ("protobuf", "99.0", "ok", "99.0"),
    ],
)
def test_versions(name: str, version: str, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "packages", name, version))
    (tmp_path / "constraints.txt").write_text("flwr==1.25.0\ntorch==2.7.1\n")
    found = machine.package(name, tmp_path / "constraints.txt")
    assert (found.status, words in found.text) == (status, True), str(found)
    if name == "flwr" and version == "1.25.3":
        assert machine.package(name, tmp_path / "none.txt").status == "ok"


def no_gpu(monkeypatch: pytest.MonkeyPatch, driver: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi" if driver else None)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    assert machine.gpu("cpu", "site.toml").status == "ok"
    if not Path("/proc/driver/nvidia/version").exists():
        assert "training is on the CPU" in machine.gpu("auto", "site.toml").text
        assert machine.gpu("auto", "site.toml").status == "ok"
    found = machine.gpu("cuda:1", "site.toml")
    assert (found.status, "torch sees no GPU" in found.text) == ("fail", True), str(found)
    no_gpu(monkeypatch, driver=True)
    found = machine.gpu("auto", "site.toml")
    assert (found.status, "an NVIDIA driver, but torch sees no GPU" in found.text) == ("warn", True), str(found)


@pytest.mark.parametrize(("free", "status"), [(8 << 30, "ok"), (1 << 20, "warn")])
def test_with_a_gpu(free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one: torch's answers are staged, the doctor's are not."""
    allocated: list[str] = []
    real: Callable[..., torch.Tensor] = torch.ones

    def ones(*shape: int, device: str) -> torch.Tensor:
        allocated.append(device)
        return real(*shape)

    for name, value in (("is_available", True), ("device_count", 2), ("get_device_name", "Some GPU"), ("mem_get_info", (free, 16 << 30))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "ones", ones)
    found = machine.gpu("cuda:1", "site.toml")
    assert (found.status, "Some GPU" in found.text, allocated) == (status, True, ["cuda:1"])
    assert "torch sees only 2 GPUs" in machine.gpu("cuda:2", "site.toml").text


def proc_of(folder: Path, available: int, limit: str = "max", used: int = 0) -> tuple[Path, Path]:
    (folder / "meminfo").write_text(f"MemTotal: 16777216 kB\nMemAvailable: {available} kB\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    return folder, folder


def test_memory(tmp_path: Path) -> None:
    assert machine.memory(*proc_of(tmp_path, 8 << 20)).text == "8.0 of 16.0 GB are free"
    assert machine.memory(*proc_of(tmp_path, 500 << 10)).status == "warn"
    container = machine.memory(*proc_of(tmp_path, 8 << 20, str(2 << 30), (2 << 30) - 1000))
    assert (container.status, "of 2.0 GB" in container.text) == ("warn", True)
    assert machine.memory(tmp_path, tmp_path / "none").status == "ok"


class Usage(NamedTuple):
    free: int


def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw\nmemory {tmp_path}/lost tmpfs rw\n")
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle)))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(8 << 30))
    fine = machine.storage("state", tmp_path / "state" / "deep", mounts)
    assert (fine.status, "not made yet" in fine.text, len(synced)) == ("ok", True, 1), str(fine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mounts"]
    (tmp_path / "lost").mkdir()
    lost = machine.storage("state", tmp_path / "lost", mounts)
    assert (lost.status, "memory (tmpfs)" in lost.text) == ("warn", True), str(lost)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(8 << 20))
    assert machine.storage("state", tmp_path, mounts).status == "warn"
    assert machine.storage("state", mounts, mounts).status == "fail"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = machine.storage("state", tmp_path, mounts)
    assert (found.status, "No space left on device" in found.text) == ("fail", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost", "mounts"]


def test_ports() -> None:
    with tls_servers.listen() as listening:
        port = tls_servers.port_of(listening)
        taken = network.port_free("fleet", f"127.0.0.1:{port}", "fleet in server.toml", running=False)
        assert taken.status == "fail"
        assert f"taken by process {os.getpid()} (" in taken.text
        assert network.port_free("fleet", f"0.0.0.0:{port}", "fleet in server.toml", running=False).status == "fail"
        assert network.port_free("fleet", f"127.0.0.1:{port}", "fleet in server.toml", running=True).status == "ok"
    assert network.port_free("fleet", f"127.0.0.1:{port}", "fleet in server.toml", running=False).status == "ok"
    assert network.holder(port) == ""
    away = network.port_free("fleet", f"192.0.2.1:{port}", "fleet in server.toml", running=False)
    assert (away.status, "192.0.2.1 is not an address of this machine" in away.text) == ("fail", True)


def test_the_ports_of_fedtan_s_runs() -> None:
    first = tls_servers.free_range(3)

    def said(running: bool = False, count: int = 3) -> Finding:
        return network.ports_free("exchange-port", first, first + count - 1, "its lines", running=running)

    assert (said().status, f"{first} to {first + 2} (its lines)" in said().text) == ("ok", True)
    with socket.create_server(("", first + 1)):
        some = said()
        assert (some.status, "only 2 of 3 ports can be used" in some.text, f"0.0.0.0:{first + 1} (its lines) is taken" in some.text) == (
            "warn",
            True,
            True,
        )
        assert (said(running=True).status, "1 of them in use" in said(running=True).text) == ("ok", True)
        with socket.create_server(("", first)):
            assert said().status == "warn"
            none = said(count=2)
            assert (none.status, "needs a port for the layer-wise exchange, and none is free" in none.text) == ("fail", True)


@pytest.mark.parametrize(
    ("variables", "status", "advice"),
    [
        ({}, "ok", ""),
        ({"https_proxy": "http://me:secret@proxy:3128"}, "warn", "export no_proxy=fl.example.org"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "a.org, .example.org"}, "ok", ""),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "ample.org"}, "warn", "export no_proxy=ample.org,fl.example.org"),
        (
            {"https_proxy": "http://proxy:3128", "no_grpc_proxy": "a.org", "no_proxy": "fl.example.org"},
            "warn",
            "export no_grpc_proxy=a.org,fl.example.org",
        ),
    ],
)
def test_proxies_of_grpc(variables: dict[str, str], status: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*network.PROXIES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = network.proxy("fl.example.org")
    assert (found.status, "secret" in str(found), found.do.endswith(advice)) == (status, False, True)
    assert network.proxy("127.0.0.1").status == network.proxy("localhost").status == "ok", "fl-bn excepts this machine itself"


@pytest.mark.parametrize(("state", "status", "words"), [(0, "ok", "to 12 ms at worst"), (5, "warn", "no time service")])
def test_the_kernels_word_on_the_clock(state: int, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def adjtimex(self, buffer: Any) -> int:
            buffer[24:32] = (12_000).to_bytes(8, "little")  # maxerror, microseconds
            return state

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
    found = clock.time_service()
    assert (found.status, words in found.text) == (status, True), str(found)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "ok"),
        ({"fleet": "127.0.0.1:9092"}, "fail"),
        ({"fleet": "127.0.0.1:9092", "superlink": "localhost"}, "ok"),
        ({"control": "0.0.0.0:9093"}, "warn"),
        ({"serverappio": "0.0.0.0:9091"}, "warn"),
    ],
)
def test_who_reaches_the_server(changes: dict[str, str], status: str, tmp_path: Path) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit", 9092, host="fl.example.org")
    for name, value in changes.items():
        tls_servers.write_line(kit / "server" / "server.toml", name, value)
    assert network.exposure(ServerFolder.read(kit / "server")).status == status


@listed(
    ("samples", "size", "rounds", "status", "words"),
    [
        (0, 16, {"steps": 5}, "fail", "would have no training sample"),
        (1, 16, {"steps": 5}, "fail", "which BatchNorm cannot train on"),
        (3, 16, {"steps": 5}, "warn", "the smallest that is drawn has 3"),
        (16, 16, {"epochs": 1}, "ok", "has 16"),
        (17, 16, {"epochs": 1}, "ok", "the last sample joins the batch before it"),
        (33, 16, {"epochs": 1}, "ok", "has 16 (the last sample joins"),
        (18, 16, {"epochs": 1}, "warn", "has 2"),
        (18, 16, {"steps": 1}, "ok", "has 16"),
        (18, 16, {"steps": 2}, "warn", "has 2"),
        (18, 16, {"steps": 2, "drop_last": True}, "ok", "has 16"),
        (15, 16, {"steps": 2, "drop_last": True}, "fail", "drop-last leaves out a batch of fewer than 16"),
    ],
)
def test_the_smallest_batch(samples: int, size: int, rounds: dict[str, int], status: str, words: str) -> None:
    found = experiment.smallest_batch(samples, LocalTraining(size, **rounds))  # type: ignore[arg-type]
    assert (found.status, words in found.text) == (status, True), str(found)


def site_with(folder: Path, x: np.ndarray, y: np.ndarray) -> dict[str, str | int]:
    path = folder / f"{len(list(folder.iterdir()))}.npz"  # a process reads a file once
    np.savez(path, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    return {"dataset": "npz", "data-path": str(path), "partition-id": 0, "num-partitions": 2}


def data_finding(node: dict[str, str | int], **values: str | int) -> Finding:
    found = experiment.site_experiment({"clients": 2, "model": "mlp", **values}, node)
    return next(finding for finding in found if finding.check == "data")


def test_labels_that_look_like_mistakes_are_warned_about(tmp_path: Path) -> None:
    """One label 17 among 0..9 makes 18 classes, and labels 1..10 make 11, unless the run says how many there are."""
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    good = np.arange(40) % 10
    assert data_finding(site_with(tmp_path, x, good)).status == "ok"  # control
    stray = good.copy()
    stray[3] = 17
    found = data_finding(site_with(tmp_path, x, stray))
    assert (found.status, "none of 10, 11, 12, 13, 14, 15, 16; 18 classes, as the largest label is 17" in found.text) == ("warn", True)
    found = data_finding(site_with(tmp_path, x, good + 1))
    assert (found.status, "none of 0; 11 classes" in found.text, "count from 0" in found.do) == ("warn", True, True)
    shape: dict[str, str | int] = {"dataset": "sites", "classes": 10, "channels": 1, "image-size": 8}
    node = site_with(tmp_path, x, good % 3 + 2)  # a site that lacks classes of the run's
    assert data_finding(node, **shape).status == "ok"
    found = data_finding(site_with(tmp_path, x, stray), **shape)
    assert (found.status, "labels up to 17" in found.text) == ("fail", True)


def test_floats_that_became_black_images_are_warned_about(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((40, 8, 8))
    found = data_finding(site_with(tmp_path, x, np.arange(40) % 4))
    assert found.status == "fail"
    assert "np.rint(x * 255).astype('uint8')" in found.text
    found = data_finding(site_with(tmp_path, x.astype("uint8"), np.arange(40) % 4))
    assert (found.status, "no pixel of 0..255 is above 1" in found.text) == ("warn", True)
    assert data_finding(site_with(tmp_path, np.rint(x * 255).astype("uint8"), np.arange(40) % 4)).status == "ok"
