"""Augmentations: every result is one that the rule allows, drawn evenly, from the generator alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as reference

from fl_bn.data.augment import AUGMENTATIONS, augmenter
from tests.refusals import naming

IMAGES = [name for name in AUGMENTATIONS if name not in ("none", "segmentation")]


def images(n: int = 6, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def augmented(name: str, x: Tensor, seed: int = 0) -> Tensor:
    y = torch.arange(len(x))
    found, labels = augmenter(name, np.random.default_rng(seed))(x, y)
    assert labels is y
    return found


@pytest.mark.parametrize("name", IMAGES)
@given(n=st.integers(1, 5), height=st.integers(4, 12), width=st.integers(4, 12), seed=st.integers(0, 99))
def test_form_and_randomness(name: str, n: int, height: int, width: int, seed: int) -> None:
    x = images(n, height, width)
    before = x.clone()
    torch_state = torch.random.get_rng_state()
    found = augmented(name, x, seed)
    assert (found.shape, found.dtype) == (x.shape, torch.uint8)
    assert torch.equal(x, before)  # samples are shared
    assert torch.equal(found, augmented(name, x, seed))
    assert torch.equal(torch_state, torch.random.get_rng_state())


def test_half_of_the_images_are_mirrored_with_their_masks() -> None:
    x = images(2000, 4, 6)
    found, masks = augmenter("segmentation", np.random.default_rng(0))(x, x[:, 0].long())
    assert torch.equal(found[:, 0].long(), masks)
    for result in (found, augmented("flip", x)):
        kept, mirrored, upside_down = ((result == candidate).flatten(1).all(1) for candidate in (x, x.flip(-1), x.flip(-2)))
        assert (kept ^ mirrored).all()
        assert 900 < int(kept.sum()) < 1100
        assert not upside_down.any()  # control


@pytest.mark.parametrize(("name", "padding"), [("crop-flip", 4), ("crop-flip-2", 2)])
def test_crop_flip_is_one_of_all_crops_and_each_comes(name: str, padding: int) -> None:
    x = images(1, 6, 6).expand(3000, -1, -1, -1)
    padded = functional.pad(x[0], (padding,) * 4)
    places = range(2 * padding + 1)
    crops = [padded[:, t : t + 6, s : s + 6] for t in places for s in places]
    allowed = {tuple(crop.flatten().tolist()) for c in crops for crop in (c, c.flip(-1))}
    found = {tuple(image.flatten().tolist()) for image in augmented(name, x)}
    assert found <= allowed
    assert len(found) > 0.95 * len(allowed) - 4  # crops of black corners alone coincide
    wider = functional.pad(padded, (1,) * 4)
    assert tuple(wider[:, :6, :6].flatten().tolist()) not in allowed  # control: one pixel too far


def test_flip_rotate_is_torchvisions_rotation() -> None:
    x, angles = images(4, 33, 33), np.random.default_rng(3).uniform(-30, 30, 4)
    for image, before, angle in zip(augmented("flip-rotate", x, seed=3), x, angles, strict=True):
        turned = [reference.rotate(b, float(a), InterpolationMode.NEAREST) for b in (before, before.flip(-1)) for a in (angle, -angle)]
        agreement = [(image == t).float().mean() for t in turned]
        assert max(agreement) > 0.97  # a pixel on the edge may fall either way
        assert sorted(agreement)[-2] < 0.9  # control: the other way, or not mirrored


def test_resized_crop_reads_a_box_of_the_image() -> None:
    ramp = torch.arange(32).repeat(32, 1) * 8
    x = torch.stack([ramp, ramp.T]).to(torch.uint8)[None].expand(500, -1, -1, -1)
    found = augmented("resized-crop", x).float()
    across, down = (found[:, 0, 0, -1] - found[:, 0, 0, 0]).abs() / 248, (found[:, 1, -1, 0] - found[:, 1, 0, 0]) / 248
    assert 0.05 < (across * down).min() < 0.4 < (across * down).mean() < 0.6 < (across * down).max() <= 1  # uniform in 0.08..1, some cut
    assert 0.70 < (across / down).min() < (across / down).max() < 1.43
    assert ((found[:, 0, 0, -1] > found[:, 0, 0, 0]).float().mean() - 0.5).abs() < 0.1  # mirrored half of the time


def test_none_is_nothing_and_wrong_uses_are_refused() -> None:
    rng = np.random.default_rng(0)
    assert augmenter("none", rng) is None
    with naming("'cutout'"):
        augmenter("cutout", rng)
    with naming("one label"):
        augmenter("flip", rng)(images(2), torch.zeros(2, 8, 8))
