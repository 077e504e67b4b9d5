"""What a local objective is: a value in the settings, and the round of one client that it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fl_bn.options import Options

Named = Mapping[str, Tensor]

CONTROL = "control"  # section of the tensors that SCAFFOLD's server sends down and its clients send up


@dataclass(frozen=True)
class Step:
    """One batch. ``forward`` computes its loss; ``again``, after it, once more: the same dropout, and nothing of it is recorded, neither
    in running statistics nor in what the client reports."""

    x: Tensor
    forward: Callable[[], Tensor]
    again: Callable[[], Tensor]


@dataclass(frozen=True)
class Start:
    """What a client's round begins with.

    ``model`` holds the received weights; ``trained``: the parameters that the round changes, by name; ``shared``: those of them that the
    server knows. ``kept``: what this objective kept at home after the client's round before, empty in its first. ``received``: of
    section ``control``. ``counted``: what it sent after the round that ``kept`` is of has reached the server. ``full_gradient()``: of the
    loss at the model as it is, the mean over all of the client's samples, by name; changes nothing.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    shared: frozenset[str]
    kept: Named = field(default_factory=dict)
    received: Named = field(default_factory=dict)
    counted: bool = True
    full_gradient: Callable[[], dict[str, Tensor]] = dict

    def anchors(self) -> dict[str, Tensor]:
        """Copies of the shared parameters that this round trains, as received."""
        return {name: p.detach().clone() for name, p in self.trained.items() if name in self.shared}


@dataclass(frozen=True)
class Finish:
    """What is left of a round: tensors ``kept`` at home for the client's next, and tensors ``sent`` in section ``control``."""

    kept: Named = field(default_factory=dict)
    sent: Named = field(default_factory=dict)


class Round:
    """A client's round under the plain objective: the loss and nothing else."""

    def gradient(self, step: Step) -> Tensor:
        """Add the objective's gradient of one batch to every parameter's ``grad``; the loss alone is returned."""
        loss = step.forward()
        loss.backward()
        return loss

    def finish(self, steps: int, learning_rate: float) -> Finish:
        """After the round's last step."""
        return Finish()

    def close(self) -> None:
        """Leave nothing on the model: no more steps come, as all are done or one raised."""


@dataclass(frozen=True)
class Objective(Options):
    """What a client minimises, or how it corrects its gradients; its fields are its options. This one: the loss alone (local SGD).

    ``travels``: a control variate per shared parameter travels both ways. ``repeats``: each batch is computed twice. ``anchored``: it
    needs a server that knows the weights. ``corrects``: the gradient of a step is no longer that of a loss on its batch.
    """

    name: ClassVar[str] = "none"
    travels: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    corrects: ClassVar[bool] = False

    def begin(self, start: Start) -> Round:
        return Round()

    @property
    def on(self) -> bool:
        """False where its strength is 0: then it is the plain objective, and nothing of it is computed, kept or sent."""
        return False


PLAIN = Objective()
