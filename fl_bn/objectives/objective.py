"""Local objective: a value in the settings, which begins a client's round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fl_bn.options import Options

Tensors = Mapping[str, Tensor]

CONTROL = "control"  # section of the tensors that SCAFFOLD's server sends down and its clients send up


@dataclass(frozen=True)
class Step:
    """One batch of a client.

    Attributes:
        x: the inputs.
        forward: computes the loss.
        again: after ``forward``, computes the loss once more with the same dropout. Nothing is recorded,
            neither in running statistics nor in the client's report.
    """

    x: Tensor
    forward: Callable[[], Tensor]
    again: Callable[[], Tensor]


@dataclass(frozen=True)
class Start:
    """State at the beginning of a client's round.

    Attributes:
        model: holds the received weights.
        trained: the parameters that the round changes, by name.
        shared: names of the trained parameters that the server knows.
        kept: tensors that this objective kept at the client after its last round. Empty in its first.
        received: tensors of the section ``control``.
        counted: the server received the tensors that the client sent at the end of that last round.
        full_gradient: computes the gradient of the loss at the present model, the mean over all of the
            client's samples, by name. It changes nothing.
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
    """Result of a client's round, beside the model.

    Attributes:
        kept: tensors for the client's next round, which stay at the client.
        sent: tensors of the section ``control``.
    """

    kept: Tensors = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)


class Round:
    """A client's round under the plain objective, the loss alone."""

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
    """Define what clients minimise; this base class is the plain objective, the loss alone (local SGD).

    A subclass adds terms to the loss or changes the steps. Its fields are its options in the run config.

    Attributes:
        name: in the run config.
        travels: one control variate per shared parameter is sent to the clients and back.
        repeats: each step computes its batch twice.
        anchored: clients are compared with the server's weights, so the method must share weights.
        corrects: the gradient of a step is not the gradient of any loss on its batch.
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
