"""Local objectives: a value in the settings that defines what a client minimises in its round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fl_bn.options import Options

Tensors = Mapping[str, Tensor]

CONTROL = "control"  # section of the tensors that SCAFFOLD's server and clients send to each other


@dataclass(frozen=True)
class Step:
    """Hold one batch of a client, for ``Round.gradient``.

    Attributes:
        x: the inputs.
        forward: computes the loss.
        again: after ``forward``, computes the loss once more with the same dropout. The second pass is
            recorded neither in running statistics nor in the client's report.
    """

    x: Tensor
    forward: Callable[[], Tensor]
    again: Callable[[], Tensor]


@dataclass(frozen=True)
class Start:
    """Hold the state at the beginning of a client's round.

    Attributes:
        model: the model with the received weights.
        trained: the parameters that the round changes, by name.
        shared: names of the trained parameters that the server knows.
        kept: tensors that this objective kept at the client after its last round. Empty in its first round.
        received: tensors of the section ``control``.
        counted: whether the server received the tensors that the client sent at the end of its last round.
        full_gradient: computes the gradient of the loss at the present model, by name: the mean over all of
            the client's samples. It changes nothing.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    shared: frozenset[str]
    kept: Tensors = field(default_factory=dict)
    received: Tensors = field(default_factory=dict)
    counted: bool = True
    full_gradient: Callable[[], dict[str, Tensor]] = dict

    def anchors(self) -> dict[str, Tensor]:
        """Copy the shared parameters that this round trains, as received."""
        return {name: p.detach().clone() for name, p in self.trained.items() if name in self.shared}


@dataclass(frozen=True)
class Finish:
    """Hold the result of a client's round, beside the model.

    Attributes:
        kept: tensors for the client's next round, which stay at the client.
        sent: tensors of the section ``control``, which are sent to the server.
    """

    kept: Tensors = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)


class Round:
    """Compute the gradients of one client's round. This base class is the plain objective, the loss alone."""

    def gradient(self, step: Step) -> Tensor:
        """Add the objective's gradient of one batch to every parameter's ``grad``.

        Returns:
            The loss alone, a scalar.
        """
        loss = step.forward()
        loss.backward()
        return loss

    def finish(self, steps: int, learning_rate: float) -> Finish:
        """Return the tensors to keep and to send, after the round's last step."""
        return Finish()

    def close(self) -> None:
        """Remove hooks from the model. It is called after the last step, or after an error."""


@dataclass(frozen=True)
class Objective(Options):
    """Define what clients minimise. This base class is the plain objective, the loss alone (local SGD).

    A subclass adds terms to the loss or changes the gradients. Its fields are its options in the run config.

    Attributes:
        name: the name in the run config.
        travels: whether one control variate per shared parameter is sent to the clients and back.
        repeats: whether each step computes its batch twice.
        anchored: whether the objective uses the weights that the client received, so that the method must share
            weights.
        corrects: whether steps add a correction to the gradient that comes from no loss on the batch (SCAFFOLD).
    """

    name: ClassVar[str] = "none"
    travels: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    corrects: ClassVar[bool] = False

    def begin(self, start: Start) -> Round:
        """Begin a client's round."""
        return Round()

    @property
    def on(self) -> bool:
        """Return whether the objective has any effect.

        With a strength of 0 it is the plain objective: it computes, keeps and sends nothing.
        """
        return False


PLAIN = Objective()
