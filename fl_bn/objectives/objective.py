"""Define the base classes of local objectives. An objective decides what a client minimises in its round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from fl_bn.options import Options

Tensors = Mapping[str, Tensor]

CONTROL = "control"  # section of the tensors that SCAFFOLD's server and clients send to each other


@dataclass(frozen=True)
class Step:
    """Hold one batch of a client, for ``Round.gradient``.

    Attributes:
        x: the inputs, as the task reads them: a tensor, or several.
        again: computes the loss a second time, after ``forward``, with the same dropout masks. This pass
            changes no running statistics, and the statistics of its batch are not reported.
        call: calls a network on inputs, as ``Task.forward`` does. None: the inputs are its only argument.
    """

    x: Any
    forward: Callable[[], Tensor]
    again: Callable[[], Tensor]
    call: Callable[[nn.Module, Any], Any] | None = None

    def output(self, model: nn.Module) -> Any:
        """Return what ``model`` returns for the inputs."""
        return model(self.x) if self.call is None else self.call(model, self.x)


@dataclass(frozen=True)
class Start:
    """Hold the state at the beginning of a client's round.

    Attributes:
        trained: the parameters that the round changes, by name.
        shared: names of the trained parameters that clients and server send to each other.
        kept: the tensors ``Finish.kept`` of the client's last round. Empty in its first round.
        received: the tensors that the server sent in the message's section ``control``, by name.
        counted: whether the server used the reply that the client sent at the end of its last round.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    shared: frozenset[str]
    kept: Tensors = field(default_factory=dict)
    received: Tensors = field(default_factory=dict)
    counted: bool = True

    def anchors(self) -> dict[str, Tensor]:
        """Return copies of the parameters that are both shared and trained, by name."""
        return {name: p.detach().clone() for name, p in self.trained.items() if name in self.shared}


@dataclass(frozen=True)
class Finish:
    """Hold the tensors that an objective makes in a client's round, in addition to the trained model.

    Attributes:
        kept: tensors that the client stores for its next round, and never sends.
        sent: tensors that the client sends to the server in the message's section ``control``.
    """

    kept: Tensors = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)


class Round:
    """Compute the gradients of one client's round. This base class is the loss alone."""

    def gradient(self, step: Step) -> Tensor:
        """Add the gradient of one batch to every parameter's ``grad``, and return the loss alone."""
        loss = step.forward()
        loss.backward()
        return loss

    def finish(self, steps: int, learning_rate: float) -> Finish:
        """Return the tensors that the client stores and sends, after the round's last step."""
        return Finish()

    def close(self) -> None:
        """Remove hooks from the model, after the last step or an error."""


@dataclass(frozen=True)
class Objective(Options):
    """Define what clients minimise. This base class is the plain objective, the loss alone (local SGD).

    A subclass adds terms to the loss or changes the gradients. Its fields are its options in the run config.

    Attributes:
        switch: the field that must be above 0 for the objective to have an effect. Empty: it has none.
        travels: whether server and clients send each other one control variate per shared parameter.
        repeats: whether each step makes two passes over its batch.
        anchored: whether the objective uses the weights that the client received.
        corrects: whether each step adds a term to the gradient that does not depend on the batch (SCAFFOLD).
    """

    name: ClassVar[str] = "none"
    switch: ClassVar[str] = ""
    travels: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    corrects: ClassVar[bool] = False

    def begin(self, start: Start) -> Round:
        """Return the object that computes the gradients of one client's round, which begins at ``start``."""
        return Round()

    @property
    def described(self) -> str:
        """Return class and options as text, such as ``FedProx(mu=0.1)``. Empty: it has no effect."""
        return repr(self) if self.on else ""

    @property
    def on(self) -> bool:
        """Return whether the objective has any effect."""
        return bool(self.switch) and getattr(self, self.switch) > 0


PLAIN = Objective()
