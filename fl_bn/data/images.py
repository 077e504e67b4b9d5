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


def images_to_tensor(array: NDArray[np.uint8]) -> Tensor:
    """Convert (N, H, W) or (N, H, W, C) to a contiguous uint8 tensor (N, C, H, W)."""
    array = array[..., None] if array.ndim == 3 else array
    return torch.from_numpy(np.array(array.transpose(0, 3, 1, 2), order="C"))


def resize(images: Tensor, image_size: int) -> Tensor:
    """Resize square uint8 images (N, C, H, H) bilinearly with antialiasing.

    The last bit may differ between processors. ``image_size`` 0 keeps the size.
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
