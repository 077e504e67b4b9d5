"""The Dice loss by hand and against MONAI, on images and volumes. Its metric is in test_task.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn import Dice

SHAPES = {"images": (3, 5, 7, 6), "volumes": (3, 5, 4, 3, 6)}  # B, C, and the rest


def batch(shape: tuple[int, ...], ignored: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    if ignored:
        y[:, 0] = 255
    return output, y


def plain(output: Tensor, targets: Tensor, first: int = 1) -> float:
    """One image, one class, one pixel after the other."""
    losses = []
    for scores, mask in zip(output, targets, strict=True):
        probability = scores.softmax(0).flatten(1)
        of_classes = []
        for label in range(first, len(scores)):
            hit = size = 0.0
            for p, y in zip(probability[label].tolist(), mask.flatten().tolist(), strict=True):
                if y != 255:
                    hit, size = hit + p * (y == label), size + p + (y == label)
            of_classes.append(1 - (2 * hit + 1e-5) / (size + 1e-5))
        losses.append(sum(of_classes) / len(of_classes))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_is_that_of_a_plain_implementation(shape: str, ignored: bool) -> None:
    output, y = batch(SHAPES[shape], ignored)
    assert float(Dice().loss(output, y)) == pytest.approx(plain(output, y), rel=1e-9)
    assert float(Dice(background=True).loss(output, y)) == pytest.approx(plain(output, y, first=0), rel=1e-9)
    assert float(Dice().loss(output, y)) != pytest.approx(plain(output, y, first=0), rel=1e-3)  # control: with the background
    together = plain(output.transpose(0, 1).flatten(1)[None].unsqueeze(-1), y.flatten()[None, :, None])
    assert float(Dice().loss(output, y)) != pytest.approx(together, rel=1e-6)  # control: over the batch, which does not add up
    both = Dice(cross_entropy=0.5).loss(output, y)
    pixels = torch.stack([F.cross_entropy(a[None], b[None], ignore_index=255) for a, b in zip(output, y, strict=True)])
    assert float(both) == pytest.approx(plain(output, y) + 0.5 * float(pixels.mean()), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_is_that_of_monai(shape: str) -> None:
    losses = pytest.importorskip("monai.losses")
    output, y = batch(SHAPES[shape])
    theirs = losses.DiceLoss(include_background=False, to_onehot_y=True, softmax=True)(output, y.unsqueeze(1))
    assert float(Dice().loss(output, y)) == pytest.approx(float(theirs), rel=1e-6)


def test_what_is_nowhere_does_no_harm_and_perfect_is_perfect() -> None:
    y = torch.tensor([[[0, 1], [1, 255]]])  # class 2 is nowhere
    right = 40.0 * F.one_hot(torch.tensor([[[0, 1], [1, 0]]]), 3).permute(0, 3, 1, 2).float()
    assert float(Dice().loss(right, y)) == pytest.approx(0, abs=1e-4)
    state = Dice().state()
    state.update(right, y)
    assert state["dice"] == 1
