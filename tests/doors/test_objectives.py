"""Objectives in ``Federation``: how they call the network, and those of one's own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_bn import Classification, Federation, methods
from fl_bn.objectives import Moon, Objective, Round, Start, Step
from tests.doors.test_others_networks import batch, federation


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, age: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.body(x + age)).relu())
        return out


class Third(Classification):
    """Calls the network in a way of its own."""

    def read(self, batch: Any) -> tuple[Any, Any]:
        return batch[:2], batch[2]

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs[0], age=inputs[1])


def test_moon_calls_networks_of_several_inputs_as_the_task_does() -> None:
    """Before, it failed in round 2, when a client first had a model of its own."""
    x, y = batch(8)
    age = torch.linspace(-1, 1, 8)[:, None]
    forms: list[tuple[Any, dict[str, Any]]] = [
        ({"x": x, "age": age, "label": y}, {}),
        (((x, age), y), {}),
        ((x, age, y), {"task": Third()}),
    ]
    found = []
    for form, task in forms:
        fed = Federation(TwoInputs(), methods.fedavg(), [[form] * 2, [form]], objective=Moon(), progress=False, **task)
        found.append([record.loss for record in fed.run(3)])
    plain = Federation(TwoInputs(), methods.fedavg(), [[forms[0][0]] * 2, [forms[0][0]]], progress=False)
    assert found[0] == found[1] == found[2] != [record.loss for record in plain.run(3)]


class Noisy(Objective):
    """Compute the loss on noisy inputs, as consistency objectives do."""

    name: ClassVar[str] = "noisy"

    def begin(self, start: Start) -> Round:
        return NoisyRound(start)


class NoisyRound(Round):
    def __init__(self, start: Start) -> None:
        self.model, self.inputs = start.model, list[Any]()

    def gradient(self, step: Step) -> Tensor:
        self.inputs.append(step.x)
        with torch.no_grad():
            assert torch.equal(step.output(self.model), self.model(step.x))
            self.model(step.x + torch.zeros_like(step.x))
        return super().gradient(step)


def test_an_objective_of_ones_own_gets_the_inputs_themselves() -> None:
    """Before, it got a function in a `Federation`, and a tensor in a loop of one's own."""
    federation(objective=Noisy()).run(1)


class OtherName(Classification):
    """Name the argument of ``forward`` in another way than ``Task`` does."""

    def forward(self, model: nn.Module, x: Any) -> Any:
        return model(x)


def test_a_task_may_name_the_inputs_of_forward_as_it_likes() -> None:
    losses = [[r.loss for r in federation(task=task, objective=Moon()).run(2)] for task in (OtherName(), Classification())]
    assert losses[0] == losses[1]
