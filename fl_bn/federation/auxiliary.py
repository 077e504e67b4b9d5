"""Describe auxiliary tensors, which are sent with the weights: control variates and optimiser buffers.

Each section of auxiliary tensors has one tensor for every parameter that is both shared and trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_bn.federation.locality import Locality
from fl_bn.federation.momentum import SECTIONS
from fl_bn.federation.payload import Named
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Place
from fl_bn.objectives import CONTROL


@dataclass(frozen=True)
class Auxiliary:
    """Describe one section of auxiliary tensors. Instructions and replies both have this section.

    The server's tensors start as zeros. With ``added``, a round adds to them the sum of the clients' tensors divided by the
    number of all clients (SCAFFOLD's control variate). Otherwise the average of the clients' tensors replaces the server's
    tensors (momentum). This average uses the same weights as the average of the model.

    Attributes:
        section: The section's name.
        added: Whether the clients' tensors are added to the server's.
        scalar: True: one number per parameter, such as Adam's step count. False: a tensor of the parameter's shape.
        at_least: The smallest allowed value in replies.
    """

    section: str
    added: bool = False
    scalar: bool = False
    at_least: float = float("-inf")

    def like(self, parameter: Tensor) -> Tensor:
        """Return the initial tensor for ``parameter``: zeros on the CPU, in its shape, or a single zero if ``scalar``."""
        return torch.zeros((), dtype=parameter.dtype) if self.scalar else torch.zeros_like(parameter, device="cpu")

    def combine(self, before: Named, parts: Sequence[Named], weights: Sequence[float], clients: int) -> dict[str, Tensor]:
        """Return the server's tensors after a round.

        Args:
            before: The server's tensors before the round.
            parts: The clients' tensors of this round.
            weights: The clients' weights.
            clients: The number of all clients of the run, including those outside this round.

        Returns:
            Name -> tensor, in the dtypes of ``before``.
        """
        new, total = {}, float(sum(weights))
        for name, old in before.items():
            if self.added:
                mean = sum(part[name].double() for part in parts) / clients
                new[name] = (old.double() + mean).to(old.dtype)
            else:
                mean = sum(part[name].double() * (weight / total) for part, weight in zip(parts, weights, strict=True))
                new[name] = torch.as_tensor(mean).to(old.dtype)
        return new


def auxiliary(settings: LocalTraining) -> tuple[Auxiliary, ...]:
    """Return the auxiliary sections that training with ``settings`` needs: control variates, optimiser buffers."""
    kinds = [Auxiliary(CONTROL, added=True)] if settings.objective.travels else []
    if settings.maintain == "global":
        for buffer, section in SECTIONS[settings.optimizer].items():
            kinds.append(
                Auxiliary(section, scalar=buffer == "step", at_least=0.0 if section in ("second-moment", "steps") else float("-inf"))
            )
    return tuple(kinds)


def has_auxiliary(model: nn.Module, locality: Locality) -> dict[str, nn.Parameter]:
    """Return the parameters that have auxiliary tensors, by name: those that are trained and shared."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and locality.place[name] is Place.SHARED}
