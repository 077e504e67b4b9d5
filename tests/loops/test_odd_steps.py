"""Steps that fail, optimisers without a rate or with several, inputs that torch cannot compare, replies that come late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from fl_bn import Federation, convert, methods
from fl_bn.methods import Method
from fl_bn.objectives import Objective, Scaffold
from tests.loops.loops import RATE, net, opened


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=made).double(), torch.randint(0, 2, (16,), generator=made)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x, y = batch(seed)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Diverged(Exception):
    pass


@pytest.mark.parametrize("before", [0, 1], ids=["none before", "a step before"])
@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn(report="all")], ids=lambda method: method.name)
def test_steps_after_one_that_failed_count(method: Method, before: int) -> None:
    """The loop takes another optimiser when the first one's step ends with an error."""

    def fails() -> float:
        raise Diverged

    with opened(method) as round:
        sgd = SGD(round.model.parameters(), RATE)
        for _ in range(before):
            train(round.model, sgd)
        with pytest.raises(Diverged):
            torch.optim.LBFGS(round.model.parameters()).step(fails)
        for seed in range(3):
            train(round.model, sgd, seed)
    assert round.steps == before + 3
    if method.name == "fbn":
        assert int(round.reply(64)[0].sections["moments"]["1.count"]) == 16 * (before + 3)


class Signs(torch.optim.Optimizer):
    """An optimiser without a learning rate, as those are that choose it themselves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.01 * p.grad.sign()


@pytest.mark.parametrize("method", [methods.fbn(), methods.fixbn(freeze_after=0)], ids=lambda method: method.name)
def test_an_optimiser_without_a_rate_trains(method: Method) -> None:
    with opened(method) as round:
        train(round.model, Signs(round.model.parameters()))
    assert round.steps == 1


def two_groups(model: Any) -> list[SGD]:
    return [SGD([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3:].parameters()}], lr=RATE)]


def two_optimisers(model: Any) -> list[SGD]:
    return [SGD(model[0].parameters(), 0.01), SGD(model[3:].parameters(), RATE)]


def uphill(model: Any) -> list[SGD]:
    return [SGD(model.parameters(), RATE, maximize=True)]


def usual(model: Any) -> list[SGD]:
    return [SGD(part.parameters(), RATE) for part in (model[0], model[3:])]


REFUSED: list[tuple[Callable[[Any], list[SGD]], str]] = [
    (two_groups, "rates"),
    (two_optimisers, "rates"),
    (uphill, "maximize"),
]


def scaffolded(made: Callable[[Any], list[SGD]], objective: Objective) -> dict[str, Tensor]:
    with opened(methods.fedavg(), objective=objective) as round:
        optimizers, (x, y) = made(round.model), batch()
        round.backward(lambda: F.cross_entropy(round.model(x), y), x)
        gradients = {name: p.grad.clone() for name, p in round.model.named_parameters()}
        for optimizer in optimizers:
            optimizer.step()
    sent = round.reply(16)[0].sections["control"]
    return {name: (sent[name] - gradient).abs().max() for name, gradient in gradients.items() if name in sent and not name.startswith("1.")}


@pytest.mark.parametrize(("made", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_scaffold_takes_one_rate_and_a_descent(made: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaffolded(made, Scaffold())


def test_control_scaffold_s_variate_is_the_gradient_at_one_rate() -> None:
    found = scaffolded(usual, Scaffold())
    assert found
    assert max(found.values()) < 1e-6


def test_a_federation_refuses_several_rates_under_scaffold_before_it_trains() -> None:
    with pytest.raises(ValueError, match="rate"):
        Federation(
            net(), methods.fedavg(), [[batch()]] * 2, objective=Scaffold(),
            optimizer=lambda parameters: SGD([{"params": [p], "lr": RATE / (i + 1)} for i, p in enumerate(parameters)]),
        )  # fmt: skip


class Any4(nn.Module):
    """Take inputs of any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        if x.is_nested:
            x = torch.stack([part.mean(0) for part in x.unbind()])
        return self.net(x.to_dense() if x.layout is not torch.strided else x.double())  # type: ignore[no-any-return]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "COO": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "CSC": Tensor.to_sparse_csc,
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "jagged": lambda x: torch.nested.nested_tensor([part.expand(3, 4) for part in x], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout_are_trained_on(layout: str) -> None:
    method, (x, y) = methods.fedavg(), batch()
    with opened(method, network=Any4) as round:
        F.cross_entropy(round.model(LAYOUTS[layout](x)), y).backward()
        SGD(round.model.parameters(), RATE).step()
    assert round.steps == 1


@pytest.mark.parametrize("method", [methods.fedavg(), methods.fedbn(), methods.fbn()], ids=lambda method: method.name)
def test_a_reply_after_the_network_s_next_round_is_refused(method: Method) -> None:
    """One network serves two clients: the first one's late reply would have the second one's weights."""
    model, rounds = convert(net(), method), []
    for client in (0, 1):
        with opened(method, model) as round:
            train(model, SGD(model.parameters(), RATE), client)
        rounds.append(round)
    with pytest.raises(ValueError, match="reply"):
        rounds[0].reply(16, client=0)
    assert rounds[1].reply(16, client=1)[0].client == 1


def test_an_export_in_the_round_leaves_no_trace() -> None:
    with opened(methods.fbn()) as round:
        torch.export.export(round.model.eval(), (batch()[0],))
        round.model.train()
        train(round.model, SGD(round.model.parameters(), RATE))
    assert int(round.reply(16)[0].sections["moments"]["1.count"]) == 16
