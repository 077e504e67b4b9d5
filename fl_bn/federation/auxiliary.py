"""Tensors that travel beside the weights, one per shared parameter that learns: control variates, momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_bn.federation.momentum import SECTIONS
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Method
from fl_bn.objectives import CONTROL
from fl_bn.roles import roles

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Auxiliary:
    """One section, the same downwards and upwards, of the shape of the weights, or one number for each (``scalar``).

    The server's tensors start as zeros. Those that come up are ``added``: their mean, times the share of all clients that sent them
    (SCAFFOLD's control variate); or they replace the server's by their average with the weights' weights (momentum).
    """

    section: str
    added: bool = False
    scalar: bool = False
    at_least: float = float("-inf")

    def like(self, parameter: Tensor) -> Tensor:
        return torch.zeros((), dtype=parameter.dtype) if self.scalar else torch.zeros_like(parameter, device="cpu")

    def combine(self, before: Named, parts: Sequence[Named], weights: Sequence[float], clients: int) -> dict[str, Tensor]:
        """The server's tensors after a round in which ``parts`` came, of ``clients`` in all."""
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
    """List what travels beside the weights when clients train as ``settings`` say: control variates, the optimiser's buffers."""
    found = [Auxiliary(CONTROL, added=True)] if settings.objective.travels else []
    if settings.maintain == "global":
        for buffer, section in SECTIONS[settings.optimizer].items():
            found.append(
                Auxiliary(section, scalar=buffer == "step", at_least=0.0 if section in ("second-moment", "steps") else float("-inf"))
            )
    return tuple(found)


def has_auxiliary(model: nn.Module, method: Method) -> dict[str, nn.Parameter]:
    """The parameters that have auxiliary: those that learn and are shared, by name."""
    role = roles(model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad and method.shares(role[name])}
