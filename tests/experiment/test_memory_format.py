"""Where clients' networks lie in channels last: where it is faster and works, or as a run asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fl_bn.app.memory_layout import memory_format, overrun
from tests.experiment.inside import refusing
from tests.integration.runs import tiny
from tests.listed import listed
from tests.networks import Wired


def strided(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 1, stride=2), nn.Flatten())


def viewed() -> nn.Module:
    """A network of a user's own: ``view`` needs the usual layout."""
    return Wired(lambda parts, x: parts.head(parts.conv(x).view(x.shape[0], -1)), conv=nn.Conv2d(1, 4, 3), head=nn.Linear(4 * 6 * 6, 10))


@listed(
    ("network", "image", "device", "wanted"),
    [
        pytest.param(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), (1, 8), "cpu", torch.channels_last, id="convolutions"),
        pytest.param(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), (1, 8), "cpu", torch.contiguous_format, id="none"),
        pytest.param(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), (1, 8), "cuda", torch.contiguous_format, id="GPU"),
        pytest.param(strided(15), (15, 8), "cpu", torch.contiguous_format, id="a layer that oneDNN computes wrongly"),
        pytest.param(strided(16), (16, 8), "cpu", torch.channels_last, id="enough channels"),
        pytest.param(viewed(), (1, 8), "cpu", torch.contiguous_format, id="view"),
    ],
)
def test_auto_takes_channels_last_where_it_is_faster_and_works(
    network: nn.Module, image: tuple[int, int], device: str, wanted: torch.memory_format
) -> None:
    before = {name: (tensor.clone(), tensor.stride()) for name, tensor in network.state_dict().items()}
    assert memory_format("auto", network, image, torch.device(device)) is wanted
    assert all(torch.equal(t, before[name][0]) and t.stride() == before[name][1] for name, t in network.state_dict().items())
    if overrun(network):  # torch would write past its memory
        with refusing("memory-format='channels-last'", "'0'", by=ValueError):
            memory_format("channels-last", network, image, torch.device(device))


def test_auto_is_the_default_and_has_the_bits_of_what_it_chooses(tmp_path: Path) -> None:
    unsaid, last, usual = (
        load_file(tiny(tmp_path / str(n), "fbn", model="digits-cnn-small", rounds=1, **keys) / "model.safetensors")
        for n, keys in enumerate(({}, {"memory-format": "channels-last"}, {"memory-format": "contiguous"}))
    )
    assert all(torch.equal(unsaid[name], tensor) for name, tensor in last.items())
    assert any(not torch.equal(unsaid[name], tensor) for name, tensor in usual.items())  # control
