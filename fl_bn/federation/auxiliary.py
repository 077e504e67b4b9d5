"""Describe what is sent or kept beside the model: control variates and momentum.

A section of auxiliary tensors has one for every parameter that is shared and
trained.

Making Batch Normalization Great in Federated Deep Learning, Zhong, Chen, Chao,
appendix C.4, treats momentum between rounds in three ways. ``reset``: it starts
from zeros. ``local``: each client keeps its buffers. ``global``: the server
averages them like weights and sends them back, which doubles the payload.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.federation.values import Named, Sections
from fl_bn.objectives import CONTROL

if TYPE_CHECKING:
    from fl_bn.federation.settings import LocalTraining

MAINTAIN = ("reset", "local", "global")
Buffers = dict[str, dict[str, Tensor]]  # torch's name of the buffer -> name of the parameter -> buffer


@dataclass(frozen=True)
class Auxiliary:
    """Describe one section of auxiliary tensors in instructions and replies.

    The server's tensors start as zeros. With ``added``, a round adds the sum of the
    clients' tensors divided by the number of all clients (SCAFFOLD). Otherwise
    their average replaces them (momentum).

    Attributes:
        scalar: Whether it has one number per parameter, such as Adam's step count.
        at_least: The smallest allowed value in replies.
    """

    section: str
    added: bool = False
    scalar: bool = False
    at_least: float = float("-inf")

    def like(self, parameter: Tensor) -> Tensor:
        """Return CPU zeros in the shape of ``parameter``, or one zero if ``scalar``."""
        return torch.zeros((), dtype=parameter.dtype) if self.scalar else torch.zeros_like(parameter, device="cpu")

    def combine(self, before: Named, parts: Sequence[Named], weights: Sequence[float], clients: int) -> dict[str, Tensor]:
        """Return the server's tensors after a round, in the dtypes of those ``before``.

        ``clients`` is the number of all clients of the run.
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


CONTROLS = Auxiliary(CONTROL, added=True)
"""SCAFFOLD's control variates."""
BUFFERS = {
    "sgd": {"momentum_buffer": Auxiliary("momentum")},
    "adam": {
        "exp_avg": Auxiliary("momentum"),
        "exp_avg_sq": Auxiliary("second-moment", at_least=0.0),
        "step": Auxiliary("steps", scalar=True, at_least=0.0),
    },
}
"""Optimiser -> torch's name of a buffer -> its section in messages."""


class Momentum:
    """Carry an optimiser's buffers between rounds, if ``maintain`` is not ``reset``.

    ``received`` is from the instruction, ``kept`` from the client's state.
    """

    def __init__(
        self, settings: LocalTraining, parameters: Mapping[str, nn.Parameter], shared: Container[str], received: Sections, kept: Named
    ) -> None:
        self._shares = settings.maintain == "global"
        self._sections = {buffer: kind.section for buffer, kind in BUFFERS[settings.optimizer].items()}
        self._parameters, self._shared, self._received, self._kept = parameters, shared, received, kept
        self._after: Buffers = {}

    def load(self, optimizer: Optimizer) -> None:
        """Load earlier rounds' buffers, as far as they exist."""
        buffers: Buffers = {}
        for entry, tensor in self._kept.items():
            key, _, name = entry.partition("/")
            buffers.setdefault(key, {})[name] = tensor
        if self._shares:
            for key, section in self._sections.items():
                buffers[key] = buffers.get(key, {}) | self._received[section]
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self._parameters.items():
            if buffers and id(parameter) in mine and all(name in of for of in buffers.values()):
                state = {key: of[name].to(parameter, copy=True) for key, of in buffers.items()}
                if "step" in state:  # torch counts on the CPU, in float32
                    state["step"] = state["step"].reshape(()).float().cpu()
                optimizer.state[parameter] = state

    def keep(self, optimizer: Optimizer) -> None:
        """Copy the optimiser's buffers after training, as far as they exist."""
        self._after = {key: {} for key in self._sections}
        for name, parameter in self._parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if key in self._after and value is not None:
                    self._after[key][name] = torch.as_tensor(value).detach().clone()

    def to_send(self, state: Named) -> Sections:
        """Return section -> name -> buffer to send, in the dtypes of the model's ``state``.

        Buffers of parameters that this round did not train are sent as received.
        """
        if not self._shares:
            return {}
        new = {section: {n: t.to(state[n].dtype) for n, t in self._after.get(key, {}).items()} for key, section in self._sections.items()}
        return {section: {**self._received[section], **own} for section, own in new.items()}

    def to_keep(self) -> dict[str, Tensor]:
        """Return the buffers that the client keeps and does not send."""
        sent = self._shared if self._shares else ()
        return {f"{key}/{name}": t for key, of in self._after.items() for name, t in of.items() if name not in sent}
