"""Inputs by published constants: as torchvision's transforms would make them, and nothing in the saved weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torchvision

from experiments.standardise import STANDARDS, standardised
from fl_bn.bn.conversion import convert
from fl_bn.data.dataset import to_input
from fl_bn.methods import METHODS
from tests.networks import seeded_network


@pytest.mark.parametrize("method", ["fedavg", "hbn", "gn"])
def test_it_is_torchvision_s_normalisation(method: str) -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = seeded_network("plain").eval()
    model = standardised(seeded_network("plain"), "cifar10", 3).eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    normalise = torchvision.transforms.Normalize(*STANDARDS["cifar10"])
    convert_, again = (lambda m: convert(m, METHODS[method]()).eval()), pickle.loads(pickle.dumps(copy.deepcopy(model)))
    want = convert_(plain)(normalise(images.float() / 255))
    for network in (convert_(model), convert_(again)):
        assert torch.allclose(network(to_input(images)), want, atol=1e-4)
    assert not torch.allclose(convert_(plain)(to_input(images)), want, atol=1e-2)  # control


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="standardise='mnist' has constants for 1 channels, but the images have 3"):
        standardised(seeded_network("plain"), "mnist", 3)
