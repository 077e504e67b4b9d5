"""Run further forward passes in training mode, and restore running statistics and torch's random generators afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@contextmanager
def unrecorded(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers at the end of the ``with`` block."""
    own = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    for module, buffers in own:  # copies take the changes: torch keeps the buffers themselves for the backward pass
        module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)


@dataclass(frozen=True)
class Draws:
    """Hold the states of torch's random generators, so that a repeated forward pass draws the same dropout."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Draws:
        """Save the present state of the generators."""
        return cls(torch.get_rng_state(), device, torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def again(self) -> None:
        """Restore the saved state of the generators."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
