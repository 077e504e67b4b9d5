"""Convert and resize images.

Legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_RESIZE_CHUNK = 1024  # images turned into floats at a time: a whole set as float32 takes four times its size


def to_input(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert samples of a data set to the input of a network.

    The constants for images are fixed. The data's own mean and deviation would centre better. But they are statistics of
    the clients' data, and would have to leave the clients before training starts.

    >>> to_input(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])

    Args:
        x: uint8 images, which become -1..1; measurements (floats), which keep their values; or other whole numbers
            (indices of an embedding), which stay as they are.
        dtype: dtype of images and measurements in the result.
    """
    if x.dtype == torch.uint8:
        return x.to(dtype).div_(255).sub_(0.5).div_(0.5)
    return x.to(dtype) if x.is_floating_point() else x


def images_to_tensor(array: NDArray[np.uint8]) -> Tensor:
    """Convert an array (N, H, W) or (N, H, W, C) to a contiguous uint8 tensor (N, C, H, W)."""
    array = array[..., None] if array.ndim == 3 else array
    return torch.from_numpy(np.array(array.transpose(0, 3, 1, 2), order="C"))


def resize(images: Tensor, image_size: int) -> Tensor:
    """Resize square uint8 images (N, C, H, H) bilinearly with antialiasing.

    The last bit may differ between processors, as floats are rounded.

    Args:
        images: (N, C, H, H).
        image_size: pixels along each side. 0 keeps the size.

    Returns:
        (N, C, image_size, image_size).
    """
    if image_size in (0, images.shape[2]):
        return images
    resized = [
        functional.interpolate(chunk.float(), size=(image_size, image_size), mode="bilinear", antialias=True)
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)
        for chunk in torch.split(images, _RESIZE_CHUNK)
    ]
    return torch.cat(resized)
