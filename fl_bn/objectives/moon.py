"""Define MOON: pull representations towards the received model's, away from the previous one's.

Model-Contrastive Federated Learning, Li, He, Song, CVPR 2021, Algorithm 1, equation
3.

The representation is the input of the network's head or, with the paper's
projection (``with_projection``), the projection's output. The received and the
client's previous model are in evaluation mode, as in the authors' code. In a
client's first round there is no previous model, and no term.

Symbols: z -> z, z_glob -> z_global, z_prev -> z_previous, tau -> temperature, mu ->
mu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.bn.modules import copied
from fl_bn.models.head import head_of
from fl_bn.objectives.objective import Finish, Objective, Round, Start, Step
from fl_bn.options import option


def contrastive_term(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Compute equation 3, ``-log(e^g / (e^g + e^p))``, as a mean over the batch.

    g is the cosine similarity of ``z`` to ``z_global``, p to ``z_previous``, (B, d)
    each, divided by the temperature.
    """
    to_global = F.cosine_similarity(z, z_global, dim=1) / temperature
    to_previous = F.cosine_similarity(z, z_previous, dim=1) / temperature
    return F.softplus(to_previous - to_global).mean()


class _Representation:
    """Record the input (B, d) of ``model``'s head in each pass, in float32 or float64.

    A convolution's input is averaged over all pixels.
    """

    def __init__(self, model: nn.Module) -> None:
        head = head_of(model)
        if head is None:
            raise ValueError(
                "moon compares the inputs of the last linear layer or convolution, but the model has neither: choose another objective"
            )
        self.last: Tensor | None = None
        self._handle = head[1].register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0] if args[0].dtype == torch.float64 else args[0].float()
        self.last = x if x.dim() == 2 else x.flatten(2).mean(2) if not isinstance(module, nn.Linear) else x.flatten(1)

    def take(self) -> Tensor:
        assert self.last is not None
        last, self.last = self.last, None
        return last

    def close(self) -> None:
        self._handle.remove()


class _Fixed:
    """Compute the representations of a frozen copy of ``model`` with ``state``."""

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        self.model = copied(model).eval().requires_grad_(False)
        self.model.load_state_dict(state)
        self._representation = _Representation(self.model)

    @torch.no_grad()
    def __call__(self, step: Step) -> Tensor:
        step.output(self.model)
        return self._representation.take()


class _Contrast(Round):
    def __init__(self, start: Start, mu: float, temperature: float) -> None:
        self.model, self.mu, self.temperature = start.model, mu, temperature
        self.received = _Fixed(start.model, start.model.state_dict()) if start.kept else None
        self.previous = _Fixed(start.model, start.kept) if start.kept else None
        self.own = _Representation(start.model) if start.kept else None

    def gradient(self, step: Step) -> Tensor:
        loss = step.forward()
        if self.own is None or self.received is None or self.previous is None:
            loss.backward()
            return loss
        term = contrastive_term(self.own.take(), self.received(step), self.previous(step), self.temperature)
        (loss + self.mu * term).backward()
        return loss

    def close(self) -> None:
        if self.own is not None:
            self.own.close()

    def finish(self, steps: int, learning_rate: float) -> Finish:
        return Finish(kept={name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()})


@dataclass(frozen=True)
class Moon(Objective):
    """Add MOON's contrastive term to the loss."""

    mu: float = option(1.0, "weight of the contrastive term (mu in the paper); 0: off", ">= 0")
    temperature: float = option(0.5, "temperature of the contrastive term's softmax (tau in the paper)", ">= 1e-6", hidden=True)
    name: ClassVar[str] = "moon"
    switch: ClassVar[str] = "mu"
    anchored: ClassVar[bool] = True

    def begin(self, start: Start) -> Round:
        """Begin a round with the contrastive term, except in the client's first."""
        return _Contrast(start, self.mu, self.temperature)
