"""The record every data set is checked against, and the way from bytes to network input."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from fl_bn.data.record import Dataset, images_to_tensor, resize, to_input
from tests.listed import listed


def small(**changes: object) -> Dataset:
    fields: dict[str, object] = {
        "name": "small",
        "x_train": torch.zeros(4, 3, 8, 8, dtype=torch.uint8),
        "y_train": torch.tensor([0, 1, 2, 1]),
        "x_test": torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
        "y_test": torch.tensor([2, 0]),
        "classes": 3,
    }
    return Dataset(**(fields | changes))  # type: ignore[arg-type]


def test_a_good_record_knows_its_shape() -> None:
    data = small(domain_train=torch.tensor([0, 0, 1, 1]), domain_test=torch.tensor([1, 0]), domains=("a", "b"))
    assert (data.channels, data.image_size, data.domains) == (3, 8, ("a", "b"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.classes = 4  # type: ignore[misc]


@listed(
    ("changes", "message"),
    [
        ({"x_train": torch.zeros(4, 3, 8, 8)}, "x_train must be uint8 (N, C, H, W), but got torch.float32"),
        ({"x_test": torch.zeros(2, 8, 8, dtype=torch.uint8)}, "x_test must be uint8 (N, C, H, W)"),
        ({"x_test": torch.zeros(0, 3, 8, 8, dtype=torch.uint8), "y_test": torch.zeros(0).long()}, "must have at least one sample"),
        ({"x_train": torch.zeros(4, 3, 8, 6, dtype=torch.uint8)}, "those of x_train are 8 high and 6 wide"),
        (
            {"x_test": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)},
            "one shape (C, H, W), but got (3, 8, 8) and (1, 8, 8)",
        ),
        ({"y_train": torch.tensor([0, 1, 2])}, "y_train must be int64 (4,), one for each sample"),
        ({"y_test": torch.tensor([0, 1], dtype=torch.int32)}, "y_test must be int64 (2,)"),
        ({"y_train": torch.tensor([0, 1, 3, 1])}, "y_train must lie in 0..2, but spans 0..3"),
        ({"y_test": torch.tensor([-1, 1])}, "y_test must lie in 0..2, but spans -1..1"),
        ({"domains": ("a",)}, "domain_train is absent"),
        ({"domain_train": torch.zeros(4).long()}, "domain_train is given and domains is ()"),
        (
            {"domain_train": torch.full((4,), 1), "domain_test": torch.zeros(2).long(), "domains": ("a",)},
            "domain_train must lie in 0..0, but spans 1..1",
        ),
    ],
)
def test_a_wrong_record_is_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        small(**changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_spans_minus_one_to_one(dtype: torch.dtype) -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x = to_input(images, dtype)
    assert x.dtype == dtype
    assert (x.min().item(), x.max().item()) == (-1, 1)
    torch.testing.assert_close(x.flatten().diff(), torch.full((255,), 2 / 255, dtype=dtype), rtol=0, atol=1e-6)


def test_input_refuses_floats() -> None:
    with pytest.raises(ValueError, match="expects uint8 images"):
        to_input(torch.zeros(1, 3, 2, 2))


def stripes(size: int) -> Tensor:
    """Columns alternately black and white."""
    return (torch.arange(size) % 2 * 255).to(torch.uint8).expand(2, 3, size, size)


def test_resize_averages_what_it_drops() -> None:
    inner = resize(stripes(32), 16)[..., 2:-2].float()
    assert (inner - 127.5).abs().max() < 32  # without antialiasing only every other column counts ...
    assert stripes(32)[..., ::2].float().sub(127.5).abs().min() > 127  # ... as this control does, and sees black alone


def test_resize_keeps_flat_images_and_the_native_size() -> None:
    flat = torch.full((3, 1, 7, 7), 200, dtype=torch.uint8)
    assert torch.equal(resize(flat, 20), torch.full((3, 1, 20, 20), 200, dtype=torch.uint8))
    assert resize(flat, 0) is flat
    assert resize(flat, 7) is flat


def test_resize_refuses_to_distort() -> None:
    with pytest.raises(ValueError, match="8 high and 6 wide"):
        resize(torch.zeros(1, 3, 8, 6, dtype=torch.uint8), 8)
    with pytest.raises(ValueError, match="must be positive"):
        resize(stripes(8), -1)


def test_images_to_tensor_moves_channels_first() -> None:
    colour = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).reshape(2, 4, 4, 3)
    assert torch.equal(images_to_tensor(colour.numpy()), colour.permute(0, 3, 1, 2))
    grey = colour[..., 0]
    assert torch.equal(images_to_tensor(grey.numpy()), grey[:, None])
    assert images_to_tensor(colour.numpy()).is_contiguous()
