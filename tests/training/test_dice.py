"""The Dice task: loss and metric by hand and against MONAI and torchmetrics, on images and volumes, trained by a small U-Net in 3-D."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from fl_bn import Dice, Federation, SeededBatches, Segmentation, methods
from tests.training.core import evaluate

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
def test_loss_and_metric_are_those_of_monai_and_torchmetrics(shape: str) -> None:
    losses, segmentation = pytest.importorskip("monai.losses"), pytest.importorskip("torchmetrics.segmentation")
    output, y = batch(SHAPES[shape])
    theirs = losses.DiceLoss(include_background=False, to_onehot_y=True, softmax=True)(output, y.unsqueeze(1))
    assert float(Dice().loss(output, y)) == pytest.approx(float(theirs), rel=1e-6)
    state = Dice().state()
    for part in (slice(0, 1), slice(1, None)):
        state.update(output[part], y[part])
    whole = output.argmax(1).flatten()[None], y.flatten()[None]  # as one image: over all pixels
    metric = segmentation.DiceScore(SHAPES[shape][1], include_background=False, average="macro", input_format="index")
    assert state["dice"] == pytest.approx(float(metric(*whole)), rel=1e-6)
    by_image = segmentation.DiceScore(SHAPES[shape][1], include_background=False, average="macro", input_format="index")
    assert state["dice"] != pytest.approx(float(by_image(output.argmax(1), y)), rel=1e-4)  # control: the mean over images
    assert state["mean-iou"] == evaluated(Segmentation(), output, y)["mean-iou"]


def evaluated(task: Segmentation, output: Tensor, y: Tensor) -> dict[str, float]:
    state = task.state()
    state.update(output, y)
    return state.result()


def test_what_is_nowhere_does_no_harm_and_perfect_is_perfect() -> None:
    y = torch.tensor([[[0, 1], [1, 255]]])  # class 2 is nowhere
    right = 40.0 * F.one_hot(torch.tensor([[[0, 1], [1, 0]]]), 3).permute(0, 3, 1, 2).float()
    assert float(Dice().loss(right, y)) == pytest.approx(0, abs=1e-4)
    assert evaluated(Dice(), right, y)["dice"] == 1
    empty = torch.full_like(y, 255)
    assert float(Dice(cross_entropy=1).loss(right, empty)) == pytest.approx(0, abs=1e-6)
    gradient = right.clone().requires_grad_()
    Dice(cross_entropy=1).loss(gradient, empty).backward()
    assert torch.isfinite(gradient.grad).all()  # type: ignore[arg-type]


def volumes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A bright ball in noise; its voxels are class 1."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(*[torch.arange(8.0)] * 3, indexing="ij"))
    centres = torch.rand(n, 3, generator=generator) * 3 + 2
    mask = ((grid[None] - centres.view(n, 3, 1, 1, 1)).square().sum(1) < 5).long()
    return mask[:, None] + 0.4 * torch.randn(n, 1, 8, 8, 8, generator=generator), mask


@pytest.mark.parametrize("method", ["fbn", "fedbn"])
def test_a_federation_of_volumes_learns_by_it(method: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 2, 3, padding=1))
    clients = [SeededBatches(*volumes(8, seed), 4) for seed in range(2)]
    test = [volumes(6, 5)]
    before = evaluate(net, test, task=Dice()).result()
    fed = Federation(net, methods.METHODS[method](), clients, task=Dice(), optimizer=partial(Adam, lr=0.02), test=test)
    *_, last = fed.run(10)
    assert last.evaluation["dice"] > before["dice"] + 0.5
    assert last.evaluation["loss"] < before["loss"] - 0.2
