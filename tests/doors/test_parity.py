"""Every method is the same through each door, and is what it claims to be there: plain PyTorch on the union of the data.

The application (``flwr run .``) is the reference: tests/methods/test_parity_*.py and tests/robust prove it exact. Each comparison has a
control that fails the same bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.local import Samples
from fl_bn.methods import METHODS, LayerReports, Method, Refresh
from fl_bn.moments import Running, ema, plain_average, pool
from fl_bn.roles import batch_norms
from tests.doors.doors import ALL, DOORS, Rounds, Tensors, apart, application, sgd, through, wide
from tests.federation import random_samples, union
from tests.methods.centralised import rough_network
from tests.methods.test_parity_fbn import Centralised
from tests.oracles.nnm import nnm

SIZES, EXACT = (5, 9, 7), 1e-11
ROBUST = Defence(1, "nnm+median", "nnm+median")
METHODS_HERE: dict[str, Method] = {
    "fbn": METHODS["fbn"](momentum=0.1),
    "fbn-all": METHODS["fbn"](momentum=0.1, report="all"),
    "hbn": replace(METHODS["hbn"](lam=0.3, lower_layers="shared"), refresh=Refresh.NOTHING),
    "fixbn": METHODS["fixbn"](freeze_after=1),
    "fedbn": METHODS["fedbn"](),
    "fedtan": METHODS["fedtan"](),
    "robust fbn": METHODS["fbn"](momentum=0.1),
}


def plain_variances(reports: LayerReports) -> Running:
    """The control of FBN and HBN: variances are averaged as if the means agreed."""
    return ema(reports.shared, plain_average(reports.parts, reports.average), 0.1)


def pooled(reports: LayerReports) -> Running:
    """The control of FixBN, which averages."""
    merged = pool(reports.parts, reports.average)
    return Running(merged.mean, merged.var)


CONTROLS: dict[str, tuple[Method, Defence]] = {
    "fbn": (replace(METHODS_HERE["fbn"], combine=plain_variances), NO_DEFENCE),
    "fbn-all": (METHODS_HERE["fbn"], NO_DEFENCE),
    "hbn": (replace(METHODS_HERE["hbn"], combine=plain_variances), NO_DEFENCE),
    "fixbn": (replace(METHODS_HERE["fixbn"], combine=pooled), NO_DEFENCE),
    "fedbn": (METHODS["silobn"](), NO_DEFENCE),
    "fedtan": (METHODS["fedavg-alg2"](), NO_DEFENCE),
    "robust fbn": (METHODS_HERE["robust fbn"], Defence(1, "median", "median")),
}


def clients_of(name: str) -> list[Samples]:
    sizes = (5, 9, 7, 6, 8) if name == "robust fbn" else SIZES
    return wide([random_samples(n, brightness=i / (len(sizes) - 1), seed=i) for i, n in enumerate(sizes)])


def defence_of(name: str) -> Defence:
    return ROBUST if name == "robust fbn" else NO_DEFENCE


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Rounds]:
    """The application's rounds, by method, computed once."""
    found = dict[str, Rounds]()

    def of(name: str) -> Rounds:
        if name not in found:
            clients = clients_of(name)
            found[name] = through(application, rough_network(), METHODS_HERE[name], clients, defence=defence_of(name))
        return found[name]

    return of


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", METHODS_HERE)
def test_rounds_of_several_steps_equal_the_application_s(name: str, door: str, reference: Callable[[str], Rounds]) -> None:
    """A residual network with 5 BatchNorm layers, clients of one and of two local steps."""
    want, clients = reference(name), clients_of(name)
    assert apart(through(DOORS[door], rough_network(), METHODS_HERE[name], clients, defence=defence_of(name)), want) < EXACT
    method, defence = CONTROLS[name]
    wrong = through(DOORS[door], rough_network(), method, clients, defence=defence)
    shared = [{k: t for k, t in tensors.items() if k in want[0]} for tensors in wrong]
    common = [{k: tensors[k] for k in shared[0]} for tensors in want]
    assert not apart(shared, common) < EXACT


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", METHODS_HERE)
def test_a_network_in_channels_last_is_the_same_up_to_the_order_of_sums(name: str, door: str, reference: Callable[[str], Rounds]) -> None:
    want, model = reference(name), rough_network().to(memory_format=torch.channels_last)
    assert any(not p.is_contiguous() for p in model.parameters())
    rounds = through(DOORS[door], model, METHODS_HERE[name], clients_of(name), defence=defence_of(name))
    assert 0 < apart(rounds, want) < 10 * EXACT, "0: it was computed as a contiguous one"


@pytest.mark.parametrize("method", [METHODS["hbn"](lam=1.0, lower_layers="shared"), METHODS["fbn"]()], ids=lambda method: method.name)
def test_statistics_only_exchanges_are_the_application_s(method: Method) -> None:
    """Before round 1, and (HBN) before each evaluation. Own loops have none."""
    clients = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate(SIZES)])
    want = through(application, rough_network(), method, clients, passes=True)
    for door in ("federation", "flower"):
        assert apart(through(DOORS[door], rough_network(), method, clients, passes=True), want) < EXACT, door
        assert not apart(through(DOORS[door], rough_network(), method, clients), want) < EXACT, door


def test_fedtan_by_replay_is_the_same(reference: Callable[[str], Rounds]) -> None:
    """Each client's round comes to the handler once per answer."""
    found = through(DOORS["flower"], rough_network(), METHODS_HERE["fedtan"], clients_of("fedtan"), carrier="replay")
    assert apart(found, reference("fedtan")) < EXACT


# One step, and plain PyTorch on the union of the data


def parameters_and_statistics(model: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def one_step(model: nn.Module, clients: list[Samples], centred: bool = False) -> Tensors:
    """Plain PyTorch: a step of SGD on all data at once; ``centred``: without the mean of each output's gradient, but for the head's."""
    together, optimizer = union(clients), sgd(model.parameters())
    optimizer.zero_grad()
    F.cross_entropy(model(together.x), together.y).backward()
    *hidden, _ = [p for p in model.parameters() if p.dim() > 1]
    for weight in hidden if centred else []:
        if weight[0].numel() >= 8:
            weight.grad -= weight.grad.flatten(1).mean(1).view(-1, *[1] * (weight.dim() - 1))
    optimizer.step()
    return parameters_and_statistics(model)


def fbn_on_the_union(clients: list[Samples]) -> Tensors:
    model = rough_network()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Centralised  # running statistics as constants, then torch's own update
    return one_step(model, clients)


def fixbn_on_the_union(clients: list[Samples]) -> Tensors:
    """Of a frozen round."""
    return one_step(rough_network().eval(), clients, centred=True)


def fedtan_on_the_union(clients: list[Samples]) -> Tensors:
    return one_step(rough_network().train(), clients)


def hbn_on_the_union(clients: list[Samples]) -> Tensors:
    """Statistics: the inputs of every layer on the union, under the statistics that were sent."""
    model, seen = rough_network().eval(), Tensors()

    def look(name: str, x: Tensor) -> None:
        layer = batch_norms(model)[name]
        seen[f"{name}.running_mean"] = 0.7 * layer.running_mean + 0.3 * x.mean((0, 2, 3))
        seen[f"{name}.running_var"] = 0.7 * layer.running_var + 0.3 * x.transpose(0, 1).flatten(1).var(1)

    for name, module in batch_norms(model).items():
        module.register_forward_pre_hook(lambda _, args, name=name: look(name, args[0]))
    with torch.no_grad():
        model(union(clients).x)
    return seen


def fedbn_of_each(clients: list[Samples]) -> Tensors:
    """Algorithm 1, two rounds: each client trains with BatchNorm of its own, and all else is averaged, here by samples."""
    models = [rough_network().train() for _ in clients]
    share = [len(client) / sum(map(len, clients)) for client in clients]
    own, found = set(batch_norms(models[0])), Tensors()
    for _ in range(2):
        states = [one_step(model, [client]) for model, client in zip(models, clients, strict=True)]
        names = [name for name in states[0] if name.rpartition(".")[0] not in own]
        found = {name: sum(state[name] * s for state, s in zip(states, share, strict=True)) for name in names}
        for model in models:
            model.load_state_dict(found, strict=False)
    return found


def robust_of_each(clients: list[Samples]) -> Tensors:
    """NNM and the median of what each client would make of the shared model, by the oracle, in plain loops over NumPy arrays."""
    models = [fbn_on_the_union([client]) for client in clients]
    learnt = [name for name, _ in rough_network().named_parameters()]
    before = parameters_and_statistics(rough_network())
    moved = np.stack([np.concatenate([(m[n] - before[n]).flatten().numpy() for n in learnt]) for m in models])
    change, found, at = np.median(nnm(moved, 1), axis=0), Tensors(), 0
    for name in learnt:
        size = before[name].numel()
        found[name] = before[name] + torch.from_numpy(change[at : at + size]).view_as(before[name])
        at += size
    return found


UNION: dict[str, tuple[Method, Callable[[list[Samples]], Tensors]]] = {
    "fbn": (METHODS_HERE["fbn"], fbn_on_the_union),
    "hbn": (METHODS_HERE["hbn"], hbn_on_the_union),
    "fixbn": (METHODS["fixbn"](freeze_after=0), fixbn_on_the_union),
    "fedbn": (METHODS_HERE["fedbn"], fedbn_of_each),
    "fedtan": (METHODS_HERE["fedtan"], fedtan_on_the_union),
    "robust fbn": (METHODS_HERE["robust fbn"], robust_of_each),
}


def off(found: Rounds, want: Tensors) -> float:
    return max(float((found[-1][name] - tensor).abs().max()) for name, tensor in want.items())


@pytest.mark.parametrize("door", ALL)
@pytest.mark.parametrize("name", UNION)
def test_one_step_is_plain_pytorch_s(name: str, door: str) -> None:
    method, plain_torch = UNION[name]
    clients = clients_of(name)
    want = plain_torch(clients)
    rounds = 2 if name == "fedbn" else 1  # its layers at home matter from round 2 on
    found = through(ALL[door], rough_network(), method, clients, rounds, size=64, defence=defence_of(name))
    assert off(found, want) < 1e-10
    wrong, defence = CONTROLS[name] if name != "fixbn" else (replace(method, centre=False), NO_DEFENCE)
    assert not off(through(ALL[door], rough_network(), wrong, clients, rounds, size=64, defence=defence), want) < 1e-10


@pytest.mark.parametrize("door", ALL)
def test_a_byzantine_client_changes_nothing(door: str) -> None:
    """Five clients with the same data, and one whose images are garbage: what is left is plain PyTorch on the data of the five."""
    (honest,) = wide([random_samples(6)])
    liar = Samples(50 * torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), honest.y)
    clients, want = [honest] * 3 + [liar] + [honest] * 2, fbn_on_the_union([honest])
    want = {name: tensor for name, tensor in want.items() if not name.endswith("running_var")}  # whose Bessel factor has the cohort's count
    method = METHODS["fbn"](momentum=0.1)
    found = through(ALL[door], rough_network(), method, clients, 1, size=64, defence=ROBUST)
    assert off(found, want) < 1e-10
    assert not off(through(ALL[door], rough_network(), method, clients, 1, size=64), want) < 1e-3
