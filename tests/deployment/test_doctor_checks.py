"""The doctor's checks one by one, each with what makes it say something else."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fl_bn.checks import run as experiment
from fl_bn.federation.settings import LocalTraining
from fl_bn.support.flower_config import flower_config
from fl_bn.support.loopback import EXCEPTIONS
from fl_bn_site import checks
from tests.deployment import tls_servers
from tests.deployment.inner import Finding, ServerFolder, machine
from tests.listed import listed


@listed(("python", "status"), [("3.12.4", "ok"), ("3.8.1", "fail")])
def test_versions(python: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: python)
    assert machine.packages().status == status


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.gpu("cpu", "site.toml").status == "ok"
    assert machine.gpu("cuda:1", "site.toml").status == "fail"
    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi")  # a driver, which torch does not see
    assert machine.gpu("auto", "site.toml").status == "warn"


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one: torch's answers are staged, the doctor's are not."""
    allocated: list[str] = []
    real: Callable[..., torch.Tensor] = torch.ones

    def ones(*shape: int, device: str) -> torch.Tensor:
        allocated.append(device)
        return real(*shape)

    monkeypatch.setattr(torch, "ones", ones)
    for free, status in ((8 << 30, "ok"), (1 << 20, "warn")):
        told = {"is_available": True, "device_count": 2, "get_device_name": "Some GPU", "mem_get_info": (free, 16 << 30)}
        for name, value in told.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        assert machine.gpu("cuda:1", "site.toml").status == status
    assert allocated == ["cuda:1", "cuda:1"]
    assert machine.gpu("cuda:2", "site.toml").status == "fail"


class Usage(NamedTuple):
    free: int


def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw\nmemory {tmp_path}/lost tmpfs rw\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(8 << 30))
    assert machine.storage("state", tmp_path / "state" / "deep", mounts).status == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mounts"]
    (tmp_path / "lost").mkdir()
    assert machine.storage("state", tmp_path / "lost", mounts).status == "warn"  # in memory
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(8 << 20))
    assert machine.storage("state", tmp_path, mounts).status == "warn"
    assert machine.storage("state", mounts, mounts).status == "fail"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert machine.storage("state", tmp_path, mounts).status == "fail"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost", "mounts"]


@listed(
    ("variables", "advice"),
    [
        ({}, ""),
        ({"https_proxy": "http://me:secret@proxy:3128"}, "export no_proxy=fl.example.org"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "a.org, .example.org"}, ""),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "ample.org"}, "export no_proxy=ample.org,fl.example.org"),
        (
            {"https_proxy": "http://proxy:3128", "no_grpc_proxy": "a.org", "no_proxy": "fl.example.org"},
            "export no_grpc_proxy=a.org,fl.example.org",
        ),
    ],
)
def test_proxies_of_grpc(variables: dict[str, str], advice: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in (*checks.PROXIES, *EXCEPTIONS):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        found = checks.proxy("fl.example.org")
        assert (found.status, "secret" in str(found), found.do.endswith(advice)) == ("warn" if advice else "ok", False, True)
        assert checks.proxy("127.0.0.1").status == "ok", "fl-bn excepts this machine itself"


@listed(
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
    assert checks.exposure(ServerFolder.read(kit / "server")).status == status


@listed(
    ("samples", "rounds", "status"),
    [
        (0, {"steps": 5}, "fail"),
        (1, {"steps": 5}, "fail"),
        (3, {"steps": 5}, "warn"),
        (16, {"epochs": 1}, "ok"),
        (17, {"epochs": 1}, "ok"),  # the last sample joins the batch before it
        (18, {"epochs": 1}, "warn"),
        (18, {"steps": 1}, "ok"),
        (18, {"steps": 2}, "warn"),
        (18, {"steps": 2, "drop_last": True}, "ok"),
        (15, {"steps": 2, "drop_last": True}, "fail"),
    ],
)
def test_the_smallest_batch(samples: int, rounds: dict[str, int], status: str) -> None:
    found = experiment.smallest_batch(samples, LocalTraining(16, **rounds))  # type: ignore[arg-type]
    assert found.status == status, str(found)


def site_with(folder: Path, x: np.ndarray, y: np.ndarray) -> dict[str, str | int]:
    path = folder / f"{len(list(folder.iterdir()))}.npz"  # a process reads a file once
    np.savez(path, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    return {"dataset": "npz", "data-path": str(path), "partition-id": 0, "num-partitions": 2}


def data_finding(node: dict[str, str | int], **values: str | int) -> Finding:
    found = experiment.site_experiment(flower_config({"clients": 2, "model": "mlp", **values}), node)
    return next(finding for finding in found if finding.check == "data")


def test_labels_that_look_like_mistakes_are_warned_about(tmp_path: Path) -> None:
    """One label 17 among 0..9 makes 18 classes, and labels 1..10 make 11, unless the run says how many there are."""
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    good = np.arange(40) % 10
    stray = np.where(np.arange(40) == 3, 17, good)
    shape: dict[str, str | int] = {"dataset": "sites", "classes": 10, "channels": 1, "image-size": 8}
    for labels, of_run, status in (
        (good, {}, "ok"),
        (stray, {}, "warn"),
        (good + 1, {}, "warn"),
        (good % 3 + 2, shape, "ok"),  # a site that lacks classes of the run's
        (stray, shape, "fail"),
    ):
        assert data_finding(site_with(tmp_path, x, labels), **of_run).status == status


def test_floats_that_became_black_images_are_warned_about(tmp_path: Path) -> None:
    x, labels = np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 4
    for images, status in ((x, "fail"), (x.astype("uint8"), "warn"), (np.rint(x * 255).astype("uint8"), "ok")):
        found = data_finding(site_with(tmp_path, images, labels))
        assert found.status == status
    assert "round them" in data_finding(site_with(tmp_path, x, labels)).text


# Handshakes


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return tls_servers.make_kit(tmp_path / "kit", 9092)


def shaken(kit: Path, authority: Path | None = None, server: Path | None = None, host: str = "localhost") -> Finding:
    """What the handshake with the kit's server finds."""
    with tls_servers.listen() as listening, tls_servers.serving(listening, server or kit / "server") as port:
        return checks.handshake(host, port, authority or kit / "sites" / "A" / "ca.crt")


@listed(
    ("hosts", "begins", "ends", "status"),
    [
        (["localhost"], -9, 40, "ok"),
        (["localhost"], -9, -1, "fail"),
        (["localhost"], 2, 9, "fail"),
        (["elsewhere.example.org"], -9, 40, "fail"),
    ],
)
def test_dates_and_names_of_a_certificate(tmp_path: Path, hosts: list[str], begins: float, ends: float, status: str) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit", 9092)
    tls_servers.reissue(kit, hosts, begins, ends)
    assert shaken(kit).status == status


def test_a_stranger_with_a_certificate_of_the_right_name_and_what_is_no_tls(kit: Path, tmp_path: Path) -> None:
    other = tls_servers.make_kit(tmp_path / "other", 9092)
    assert shaken(kit, server=other / "server").status == "fail"
    assert shaken(kit, authority=other / "server" / "ca.crt", server=other / "server").status == "ok"
    with tls_servers.listen() as listening, tls_servers.serving(listening, None) as port:
        assert checks.handshake("localhost", port, kit / "server" / "ca.crt").status == "fail"
    (tmp_path / "ca.crt").write_text("no certificate")
    for authority in (tmp_path / "ca.crt", tmp_path / "gone.crt"):
        assert shaken(kit, authority=authority).status == "fail"
