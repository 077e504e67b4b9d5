"""Choose how the tensors of a network's convolutions lie in memory."""

from __future__ import annotations

import torch
from torch import nn

from fl_bn.derived import copied
from fl_bn.federation.network import AUTO, MEMORY_FORMATS
from fl_bn.flower.log import LOGGER
from fl_bn.roles import inputs_like
from fl_bn.support.wire import reason

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)  # torch has channels-last kernels for these


def memory_format(name: str, model: nn.Module, image: tuple[int, int], device: torch.device) -> torch.memory_format:
    """Return the memory format of the clients' networks.

    On a CPU, ``auto`` is channels-last if the network has 2-D convolutions. Channels-last was at least as fast for all
    networks that were measured (``benchmarks/results/memory-format.md``). On a GPU, ``auto`` is contiguous, because
    channels-last gained nothing there (``benchmarks/results/gpu.md``). A network that cannot compute in channels-last
    stays contiguous; ``view`` after a convolution is the usual reason.

    Args:
        name: The value of the key ``memory-format``.
        model: The network.
        image: ``(channels, size)`` of the network's inputs, which are ``size`` pixels high and wide.
        device: The device on which the clients train.
    """
    if name != AUTO:
        return MEMORY_FORMATS[name]
    if device.type != "cpu" or not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return torch.contiguous_format
    channels, size = image
    trial = copied(model).to(memory_format=torch.channels_last).eval()
    try:
        with torch.no_grad():
            trial(inputs_like(trial).new_zeros((1, channels, size, size)))
    except Exception as error:  # whatever the network raises; if it does so in any format, training reports it
        LOGGER.info("memory-format: the network stays contiguous, because it fails in channels-last: %s", reason(str(error)))
        return torch.contiguous_format
    return torch.channels_last
