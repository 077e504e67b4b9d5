"""The application with a network of one's own: an integer parameter, an infinite mask, spectral norm, a wrapper, and a kept buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from fl_bn.flower import run_in_process
from tests.doors.inner import app, build
from tests.experiment.small_data import small_config

SOURCE = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, classes, channels, image_size):
        super().__init__()
        self.kind = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("site_mean", torch.zeros(()))
        wide = channels * image_size**2
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(wide, 8))
        self.layers = nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))

    def forward(self, x):
        assert x.is_floating_point()
        if self.training:
            self.site_mean.copy_(x.mean())
        return self.layers(x)

def plain(classes, channels, image_size):
    return Own(classes, channels, image_size)

def wrapped(classes, channels, image_size):
    return nn.DataParallel(Own(classes, channels, image_size))
"""
SHAPE = {"classes": 4, "channels": 1, "image_size": 4}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_buffers.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def ran(tmp_path: Path, **keys: Any) -> Path:
    config = {**small_config(tmp_path), "model": "own_buffers:wrapped", "clients": 2, "partition": "iid", "output": "runs"}
    config["pictures"] = False
    folder = run_in_process({**config, **{key.replace("_", "-"): value for key, value in keys.items()}})
    assert folder is not None
    return folder


def net() -> nn.Module:
    return build("own_buffers:plain", **SHAPE)


def test_the_run_s_file_and_those_of_the_commands_load_into_the_plain_network(tmp_path: Path) -> None:
    folder = ran(tmp_path, method="fedavg", name="own")
    data = f"npz:{tmp_path / 'small.npz'}"
    for command in (["recalibrate", "runs/own"], ["adapt", "--model", "runs/own", "--data", data, "--how", "recompute"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    files = [folder / "model.safetensors", *tmp_path.glob("runs/own-recalibrated/model.safetensors"), *folder.glob("*/model-*.safetensors")]
    assert len(files) == 3
    for file in files:
        model = net()
        model.load_state_dict(load_file(file))
        assert int(model.layers[2].num_batches_tracked) == 1
        weight = model.eval().layers[1].weight.detach()
        assert abs(float(torch.linalg.matrix_norm(weight, 2)) - 1) < 1e-5  # u and v are those of the averaged weight
    assert float(model.site_mean) != 0  # averaged, as nothing else is stated


def test_secure_aggregation_sums_what_travels(tmp_path: Path) -> None:
    """The mask of -inf and the singular vectors are in no sum."""
    folder = ran(tmp_path, method="fedavg", secure_aggregation=True, clients=3)
    model = net()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(model.mask, net().mask)
    assert abs(float(torch.linalg.matrix_norm(model.eval().layers[1].weight.detach(), 2)) - 1) < 1e-5


def test_kept_buffers_are_in_the_clients_files(tmp_path: Path) -> None:
    folder = ran(tmp_path, method="fedavg", buffers="*.site_mean=kept")
    shared = load_file(folder / "model.safetensors")
    assert shared.keys() ^ net().state_dict().keys() == {"site_mean"}
    means = []
    for client in range(2):
        model = net()
        model.load_state_dict(load_file(folder / "clients" / f"client-{client}.safetensors"))
        means.append(float(model.site_mean))
    assert means[0] != means[1] != 0


def test_fl_bn_layers_prints_every_tensor_and_the_buffers_of_each_role() -> None:
    done = CliRunner().invoke(app, ["layers", "own_buffers:plain", "--buffers", "mask=constant,site_mean=kept", "--tensors"])
    assert done.exit_code == 0, done.output
    assert "kept by each client site_mean" in " ".join(done.output.split())
    assert ["layers.2.weight", "affine"] in [line.split()[:2] for line in done.output.splitlines()]
    assert CliRunner().invoke(app, ["layers", "own_buffers:plain", "--buffers", "mask=mine"]).exit_code == 2
