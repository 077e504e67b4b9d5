"""Choose how the tensors of a network's convolutions lie in memory."""

from __future__ import annotations

import torch
from torch import nn

from fl_bn.bn.modules import copied
from fl_bn.bn.roles import inputs_like
from fl_bn.federation.network import AUTO, MEMORY_FORMATS
from fl_bn.flower.compat import LOGGER
from fl_bn.support.wire import reason

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)  # torch has channels-last kernels for these

VECTOR = 16  # float32 values in the widest vector register of a CPU (AVX-512)
OVERRUN = "oneDNN writes past the memory of layer {!r}, a strided 1 x 1 convolution of few channels, in channels-last on a CPU"


def memory_format(name: str, model: nn.Module, image: tuple[int, int], device: torch.device) -> torch.memory_format:
    """Return the memory format of the clients' networks, for images of ``(channels, size)``.

    On a CPU, ``auto`` is channels-last for 2-D convolutions, since it was at least
    as fast for all networks that were measured (``benchmarks/results/peers.md``).
    On a GPU, ``auto`` is contiguous, because channels-last gained nothing there
    (``benchmarks/results/gpu.md``). A network that cannot compute in channels-last
    stays contiguous, because of ``view`` after a convolution, or of a layer that
    ``overrun`` names.

    Raises:
        ValueError: ``name`` is channels-last, but torch would write past the memory
            of one of the layers.
    """
    broken = overrun(model) if device.type == "cpu" else ""
    if name != AUTO:
        if broken and MEMORY_FORMATS[name] is torch.channels_last:
            raise ValueError(f"memory-format='{name}' cannot be used: {OVERRUN.format(broken)}. Take 'auto'")
        return MEMORY_FORMATS[name]
    if device.type != "cpu" or not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return torch.contiguous_format
    if broken:
        LOGGER.info("memory-format: the network stays contiguous: %s", OVERRUN.format(broken))
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


def overrun(model: nn.Module) -> str:
    """Return the first layer, if any, whose gradient oneDNN computes wrongly in channels-last.

    On CPUs, it writes past its buffer for strided 1 x 1 convolutions of fewer input
    channels than a vector register holds. Then the process crashes, or weights get
    wrong gradients (https://github.com/uxlfoundation/oneDNN/issues/6035).
    """
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and layer.in_channels < VECTOR)
    return next((name for name, layer in layers if set(layer.kernel_size) == {1} and set(layer.stride) != {1}), "")
