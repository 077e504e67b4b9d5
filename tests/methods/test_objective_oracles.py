"""Every local objective against its paper's algorithm box, transcribed in ``tests/oracles``, with three clients of unequal sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Moon, Round, Scaffold, Start
from fl_bn.objectives.fedprox import proximal_term
from fl_bn.objectives.moon import contrastive_term
from tests.federation import largest_deviation
from tests.local import train
from tests.methods.objective_rounds import ObjectiveRounds
from tests.networks import seeded_network
from tests.oracles import fedprox, fedsam, moon, scaffold
from tests.oracles.fedavg import Client

SIZES = (6, 14, 10)
FULL = [[0, 1, 2]] * 3
PARTIAL = [[0, 1], [1, 2], [0, 2], [0, 1], [2]]
RATE, NEAR = 0.1, 1e-11
HEADS = {"plain": "9", "resnet": "head"}
Index = list[list[np.ndarray]]

pytestmark = pytest.mark.parametrize("network", HEADS)


@pytest.fixture
def clients(tiny_clients: Callable[..., list[Samples]]) -> list[Samples]:
    return tiny_clients(SIZES)


def net(name: str) -> nn.Module:
    model = seeded_network(name, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batches(clients: list[Samples], pieces: int = 2) -> tuple[Index, list[Client]]:
    """Each client's samples in consecutive batches: as indices, and as tensors."""
    index = [np.array_split(np.arange(len(c)), pieces) for c in clients]
    like = torch.zeros((), dtype=torch.float64)
    return index, [[c.batch(i, like) for i in own] for c, own in zip(clients, index, strict=True)]


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}


@pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])
def test_fedprox_algorithm_2(network: str, schedule: list[list[int]], clients: list[Samples]) -> None:
    index, tensors = batches(clients)
    want = floats(fedprox.algorithm_2(net(network), schedule, tensors, list(SIZES), RATE, 0.7))
    assert largest_deviation(ObjectiveRounds(net(network), FedProx(0.7), clients, index).run(schedule, RATE), want) < NEAR
    for wrong in (FedProx(1.4), FedProx(0.35), PLAIN):  # mu without its half, half of it, none
        assert not largest_deviation(ObjectiveRounds(net(network), wrong, clients, index).run(schedule, RATE), want) < NEAR
    first: dict[str, Tensor] = {}

    class Stale(FedProx):
        """Control: near the first round's weights, for ever."""

        def begin(self, start: Start) -> Round:
            first.update({} if first else start.anchors())
            round = super().begin(start)
            round.anchors = [first[name] for name in start.anchors()]  # type: ignore[attr-defined]
            return round

    assert not largest_deviation(ObjectiveRounds(net(network), Stale(0.7), clients, index).run(schedule, RATE), want) < NEAR


@pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_algorithm_1(network: str, option: int, schedule: list[list[int]], clients: list[Samples]) -> None:
    index, tensors = batches(clients)
    _, everything = zip(*(batches([c], max(1, len(c) // 7)) for c in clients), strict=True)
    everything = [own for (own,) in everything]
    want = scaffold.algorithm_1(net(network), schedule, tensors, list(SIZES), RATE, option, everything)
    names = [name for name, _ in want.x.named_parameters()]

    def deviation(run: ObjectiveRounds) -> float:
        run.run(schedule, RATE)
        off = [largest_deviation(run.server.state_dict(), floats(want.x))]
        off.append(largest_deviation(run.control, dict(zip(names, want.c, strict=True))) if run.control else np.inf)
        off += [largest_deviation(k, dict(zip(names, c, strict=True))) for k, c in zip(run.kept, want.c_i, strict=True) if k]
        return max(off)

    assert deviation(ObjectiveRounds(net(network), Scaffold(option), clients, index)) < NEAR
    for wrong in (Scaffold(3 - option), Scaffold(option, strength=0.5), PLAIN):
        assert not deviation(ObjectiveRounds(net(network), wrong, clients, index)) < NEAR
    if schedule is PARTIAL:  # controls: c moves by the plain mean of S, or with the models' weights

        class Forgets(ObjectiveRounds):
            def round(self, chosen, rate, seed=0) -> None:  # type: ignore[no-untyped-def]
                before = self.control
                super().round(chosen, rate, seed)
                share = len(chosen) / len(self.clients)
                self.control = {name: before[name] + (c - before[name]) / share for name, c in self.control.items()}

        assert not deviation(Forgets(net(network), Scaffold(option), clients, index)) < NEAR


@pytest.mark.parametrize("option", [1, 2])
def test_scaffolds_variates_with_weight_decay_and_half_the_strength(network: str, option: int, clients: list[Samples]) -> None:
    """The server's is the mean of the clients'; each of these is a gradient with the weight decay that SGD adds, whatever the strength."""
    index, _ = batches(clients)
    run = ObjectiveRounds(net(network), Scaffold(option, strength=0.5), clients, index, weight_decay=0.1)
    run.run(PARTIAL, RATE)
    for name, c in run.control.items():
        np.testing.assert_allclose(c, sum(kept[name] for kept in run.kept) / 3, atol=1e-12)
    before, control, own = copy.deepcopy(run.server), run.control, run.kept[0]
    run.round([0], RATE)
    if option == 1:
        gradient = scaffold.g_of_all(before, batches([clients[0]], 1)[1][0], torch.nn.functional.cross_entropy)
        want = [g + 0.1 * p.detach() for g, p in zip(gradient, before.parameters(), strict=True)]
    else:  # two steps of RATE * (gradient + correction)
        moved = [(x - y).detach() / (2 * RATE) for x, y in zip(before.parameters(), run.server.parameters(), strict=True)]
        want = [step - 0.5 * (control[name] - own[name]) for step, name in zip(moved, control, strict=True)]
    for name, c in zip(control, want, strict=True):
        np.testing.assert_allclose(run.kept[0][name], c, atol=1e-12)


@pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])
def test_moon_algorithm_1(network: str, schedule: list[list[int]], clients: list[Samples]) -> None:
    index, tensors = batches(clients)

    def oracle(head: str) -> dict[str, Tensor]:
        return floats(moon.algorithm_1(net(network), schedule, tensors, list(SIZES), RATE, 2.0, 0.5, head)[0])

    def run(objective: Moon) -> dict[str, Tensor]:
        return ObjectiveRounds(net(network), objective, clients, index).run(schedule, RATE)

    want, got = oracle(HEADS[network]), run(Moon(2.0, 0.5))
    assert largest_deviation(got, want) < NEAR
    assert not largest_deviation(got, oracle("7" if network == "plain" else "body.1")) < NEAR  # another layer's representation
    for wrong in (Moon(1.0, 0.5), Moon(2.0, 1.0)):
        assert not largest_deviation(run(wrong), want) < NEAR


def test_moons_fixed_models_are_in_evaluation_mode(network: str, clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    index, tensors = batches(clients)
    want = floats(moon.algorithm_1(net(network), FULL, tensors, list(SIZES), RATE, 2.0, 0.5, HEADS[network])[0])
    monkeypatch.setattr(moon.nn.Module, "eval", lambda self: self.train())  # control: the transcription in training mode
    in_training = floats(moon.algorithm_1(net(network), FULL, tensors, list(SIZES), RATE, 2.0, 0.5, HEADS[network])[0])
    monkeypatch.undo()
    got = ObjectiveRounds(net(network), Moon(2.0, 0.5), clients, index).run(FULL, RATE)
    assert largest_deviation(got, want) < NEAR
    assert not largest_deviation(got, in_training) < NEAR


@pytest.mark.parametrize("schedule", [FULL, PARTIAL], ids=["full", "partial"])
def test_fedsam_algorithm_1(network: str, schedule: list[list[int]], clients: list[Samples]) -> None:
    index, tensors = batches(clients)
    want = floats(fedsam.algorithm_1(net(network), schedule, tensors, list(SIZES), RATE, 0.3))
    twice = floats(fedsam.algorithm_1(net(network), schedule, tensors, list(SIZES), RATE, 0.3, twice=True))
    got = ObjectiveRounds(net(network), FedSAM(0.3), clients, index).run(schedule, RATE)
    assert largest_deviation(got, want) < NEAR
    assert not largest_deviation(got, twice) < NEAR  # control: running statistics of both passes
    for wrong in (FedSAM(0.15), PLAIN):
        assert not largest_deviation(ObjectiveRounds(net(network), wrong, clients, index).run(schedule, RATE), want) < NEAR


def test_fedsam_draws_the_same_dropout_twice(network: str, clients: list[Samples]) -> None:
    index, tensors = batches(clients)

    def dropping() -> nn.Module:
        return seeded_network("cnn" if network == "plain" else network, dtype=torch.float64)

    got = ObjectiveRounds(dropping(), FedSAM(0.3), clients, index)
    got.round([1], RATE, seed=7)
    deviation = {}
    for again in (True, False):
        with torch_seed(8, torch.device("cpu")):
            want = fedsam.algorithm_1(dropping(), [[1]], tensors, list(SIZES), RATE, 0.3, again=again)
        deviation[again] = largest_deviation(got.server.state_dict(), floats(want))
    assert deviation[True] < NEAR
    assert not deviation[False] < NEAR


def test_fedsam_reports_the_first_pass_alone(network: str, clients: list[Samples]) -> None:
    index, _ = batches(clients, 1)
    method, moments = METHODS["fbn"](), {}
    for objective in (FedSAM(0.3), PLAIN):
        model, settings = convert(net(network), method), LocalTraining(64, steps=1, objective=objective)
        moments[objective.name] = train(model, clients[0], index[0], settings, RATE, method).moments
    for name, part in moments["none"].items():
        assert moments["fedsam"][name].count == part.count
        assert torch.equal(moments["fedsam"][name].mean, part.mean)


def test_the_terms_gradients(network: str, rng: np.random.Generator) -> None:
    del network

    def drawn(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    anchors = [drawn(3, 2), drawn(4)]
    weights = [drawn(3, 2).requires_grad_(), drawn(4).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *w: proximal_term(w, anchors, 0.7), weights)
    by_hand = 0.35 * sum(((w - a) ** 2).sum() for w, a in zip(weights, anchors, strict=True))
    torch.testing.assert_close(proximal_term(weights, anchors, 0.7), by_hand, rtol=1e-12, atol=0)
    z, z_global, z_previous = (drawn(5, 3) for _ in range(3))
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: contrastive_term(z, z_global, z_previous, 0.5), z)
    for temperature in (0.1, 0.5, 2.0):
        want = moon.ℓ_con(z, z_global, z_previous, temperature)
        torch.testing.assert_close(contrastive_term(z, z_global, z_previous, temperature), want, rtol=1e-12, atol=0)
        assert not torch.isclose(contrastive_term(z, z_previous, z_global, temperature), want)  # control: drawn to the wrong one
    (pull,) = torch.autograd.grad(contrastive_term(z, z_global, z_global, 0.5), z)
    assert float(pull.abs().max()) < 1e-15
