"""Define the base classes of local objectives: what a client minimises in its round."""

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
    """Hold one batch, for ``Round.gradient``.

    Attributes:
        x: the inputs as the task reads them, a tensor or several.
        again: computes the loss a second time, after ``forward``, with the same
            dropout masks. This pass changes and reports no statistics.
        call: calls a network on inputs, as ``Task.forward`` does. None: they are
            its only argument.
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
        shared: names of trained parameters that are sent.
        kept: ``Finish.kept`` of the client's last round, at first empty.
        received: the tensors of the message's section ``control``, by name.
        counted: whether the server used the client's last reply.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    shared: frozenset[str]
    kept: Tensors = field(default_factory=dict)
    received: Tensors = field(default_factory=dict)
    counted: bool = True

    def anchors(self) -> dict[str, Tensor]:
        """Return copies of the shared trained parameters, by name."""
        return {name: p.detach().clone() for name, p in self.trained.items() if name in self.shared}


@dataclass(frozen=True)
class Finish:
    """Hold the tensors that an objective makes in a round, beside the trained model.

    Attributes:
        kept: stored by the client for its next round, never sent.
        sent: goes to the server in the message's section ``control``.
    """

    kept: Tensors = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)


class Round:
    """Compute the gradients of one client's round, here of the loss alone."""

    def gradient(self, step: Step) -> Tensor:
        """Add one batch's gradient to every ``grad``, and return the loss alone."""
        loss = step.forward()
        loss.backward()
        return loss

    def finish(self, steps: int, learning_rate: float) -> Finish:
        """Return what the client stores and sends, after the last step."""
        return Finish()

    def close(self) -> None:
        """Remove hooks from the model, also after an error."""


@dataclass(frozen=True)
class Objective(Options):
    """Define what clients minimise, here the loss alone (local SGD).

    A subclass adds to the loss or changes gradients. Its fields are options in the
    run config.

    Attributes:
        switch: the field that is above 0 if the objective has an effect. Empty: it
            has none.
        travels: whether both sides send one control variate per shared parameter.
        repeats: whether steps make two passes over their batch.
        anchored: whether the received weights are used.
        corrects: whether steps add to the gradient a term independent of the batch
            (SCAFFOLD).
    """

    name: ClassVar[str] = "none"
    switch: ClassVar[str] = ""
    travels: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    anchored: ClassVar[bool] = False
    corrects: ClassVar[bool] = False

    def begin(self, start: Start) -> Round:
        """Return what computes the gradients of a client's round from ``start``."""
        return Round()

    @property
    def described(self) -> str:
        """Return class and options, such as ``FedProx(mu=0.1)``. Empty: it has no effect."""
        return repr(self) if self.on else ""

    @property
    def on(self) -> bool:
        """Return whether the objective has any effect."""
        return bool(self.switch) and getattr(self, self.switch) > 0


PLAIN = Objective()
