"""The application with a network of one's own: an integer parameter, an infinite mask, spectral norm, a wrapper, and a kept buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from fl_bn.flower import run_in_process
from tests.doors.inner import app
from tests.experiment.small_data import small_config


class Own(nn.Module):
    def __init__(self, classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.kind = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("site_mean", torch.zeros(()))
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(channels * image_size**2, 8))
        self.layers = nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_floating_point()
        if self.training:
            self.site_mean.copy_(x.mean())
        return self.layers(x)  # type: ignore[no-any-return]


def wrapped(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.DataParallel(Own(classes, channels, image_size))


def ran(tmp_path: Path, **keys: Any) -> Path:
    own = {"model": "tests.own_loop.test_application:wrapped", "method": "fedavg", "output": str(tmp_path / "runs")}
    folder = run_in_process({**small_config(tmp_path), "clients": 2, "partition": "iid", "pictures": False, **own, **keys})
    assert folder is not None
    return folder


def loaded(file: Path) -> Any:
    """Return the plain network with the tensors of a file, which must be those of its state_dict."""
    model = Own(4, 1, 4)
    model.load_state_dict(load_file(file))
    weight = model.eval().layers[1].weight.detach()  # type: ignore[union-attr]
    assert abs(float(torch.linalg.matrix_norm(weight, 2)) - 1) < 1e-5  # u and v are those of the averaged weight
    return model


def test_the_run_s_file_and_those_of_the_commands_load_into_the_plain_network(tmp_path: Path) -> None:
    folder = ran(tmp_path, name="own")
    data = f"npz:{tmp_path / 'small.npz'}"
    for command in (["recalibrate", str(folder)], ["adapt", "--model", str(folder), "--data", data, "--how", "recompute"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    files = [folder / "model.safetensors", *tmp_path.glob("runs/own-recalibrated/model.safetensors"), *folder.glob("*/model-*.safetensors")]
    assert len(files) == 3
    for model in map(loaded, files):
        assert int(model.layers[2].num_batches_tracked) == 1
        assert float(model.site_mean) != 0  # averaged, as nothing else is stated


def test_secure_aggregation_sums_what_travels(tmp_path: Path) -> None:
    """The mask of -inf and the singular vectors are in no sum."""
    folder = ran(tmp_path, clients=3, **{"secure-aggregation": True})
    assert torch.equal(loaded(folder / "model.safetensors").mask, Own(4, 1, 4).mask)


def test_kept_buffers_are_in_the_clients_files(tmp_path: Path) -> None:
    folder = ran(tmp_path, buffers="*.site_mean=kept")
    assert load_file(folder / "model.safetensors").keys() ^ Own(4, 1, 4).state_dict().keys() == {"site_mean"}
    first, second = (float(loaded(folder / "clients" / f"client-{client}.safetensors").site_mean) for client in range(2))
    assert first != second != 0


def test_the_command_layers_prints_the_role_of_every_tensor() -> None:
    done = CliRunner().invoke(app, ["layers", "tests.own_loop.test_application:wrapped", "--buffers", "*.site_mean=kept", "--tensors"])
    assert "kept by each client module.site_mean" in " ".join(done.output.split())
    assert ["module.layers.2.weight", "affine"] in [line.split()[:2] for line in done.output.splitlines()]
