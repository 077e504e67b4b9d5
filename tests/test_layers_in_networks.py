"""The layers inside a network: freezing, observing, saving."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.layers import freeze_statistics
from fl_bn.bn.observation import observe, pooled
from fl_bn.bn.roles import Role, roles
from fl_bn.methods import METHODS
from tests.networks import SmallCNN, seeded_network

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {k: t.clone() for k, t in model.state_dict().items() if roles(model)[k] in (Role.STATISTIC, Role.COUNTER)}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[k], model.state_dict()[k]) for k in before)


@pytest.mark.parametrize("name", ["fedavg", "hbn", "fbn"])
def test_freeze_keeps_dropout_active_statistics_still_and_affine_training(name: str) -> None:
    model = convert(SmallCNN(), METHODS[name]()).train()
    before = statistics(model)
    freeze_statistics(model)
    torch.manual_seed(0)
    first, second = model(X), model(X)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert unchanged(model, before)
    assert all(module.weight.grad.abs().sum() > 0 for module in (model[1], model[5]))
    quiet = copy.deepcopy(model).eval()
    assert torch.equal(quiet(X), quiet(X))  # control: eval() of the whole model switches dropout off
    model.train()
    model(X)
    assert unchanged(model, before)  # no mode thaws a layer
    freeze_statistics(model, False)
    assert all(module.training for module in model.modules())
    if name == "fedavg":
        model(X)
        assert not unchanged(model, before)  # control: an unfrozen layer moves


@pytest.mark.parametrize("name", ["fedavg", "hbn", "fbn"])
def test_observe_records_the_raw_input_and_nothing_else_changes(name: str) -> None:
    model = convert(seeded_network("plain", dtype=torch.float64), METHODS[name]()).train()
    twin = copy.deepcopy(model)
    seen: list[Tensor] = []
    handle = model[5].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    with observe(model) as observed:
        outputs = [model(X.double()), model(X[:2].double())]
    handle.remove()
    assert all(torch.equal(out, twin(x.double())) for out, x in zip(outputs, (X, X[:2]), strict=True))
    assert [part.count for part in observed["5"]] == [6 * 64, 2 * 64]
    flat = torch.cat([x.movedim(1, -1).reshape(-1, 6) for x in seen])
    together = pooled(observed)["5"]
    assert torch.allclose(together.mean, flat.mean(0), rtol=1e-12)
    assert torch.allclose(together.var, flat.var(0, unbiased=False), rtol=1e-12)
    normalised = model[5](flat.view(-1, 6, 1, 1)).view(-1, 6)
    assert not torch.allclose(together.mean, normalised.mean(0), rtol=1e-12)  # control: what comes out
    model(X.double())
    assert len(observed["5"]) == 2  # the hooks are gone


def test_observe_sees_arguments_by_name_and_layers_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(2 * self.norm(input=x))

    model = Twice()
    with observe(model) as observed:
        model(torch.randn(5, 3))
    assert [part.count for part in observed["norm"]] == [5, 5]
    assert pooled(observed)["norm"].count == 10
