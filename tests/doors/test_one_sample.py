"""A batch of one sample, a client of one sample, a loader that is empty the second time: one policy in every door."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, SeededBatches, convert, local_round, methods, server_state
from fl_bn.federation.federation import Diverged
from fl_bn.federation.local import Samples
from fl_bn.federation.one_sample import without_variance
from fl_bn.methods import METHODS
from fl_bn.roles import batch_norms
from tests.doors.doors import ALL, DOORS, apart, through

ROUNDS = 2
LEFT_OUT = "left out a batch of one sample in round 1"
NEEDS = {"fedavg", "static-bn", "single", "fixbn", "fedbn", "silobn", "hbn", "fedtan", "fedtan2", "fedavg-alg2"}
NEEDS_NOT = {"gn", "ln", "gn-ws", "fixup", "fedfn", "fbn"}
UNDEFINED_HERE = {"in", "fedwon"}  # need a spatial extent
sgd = partial(SGD, lr=0.1)


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def conv(pooled: bool = False) -> nn.Sequential:
    """``pooled``: its BatchNorm sees one value per channel and sample."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*(layers if pooled else [layers[i] for i in (0, 2, 3, 1, 4, 5)])).double()


def samples(n: int, seed: int = 0) -> Samples:
    x = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Samples(x, x.flatten(1)[:, :3].argmax(1))


def batches(*sizes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    own = samples(20, seed)
    return list(zip(own.x[: sum(sizes)].split(sizes), own.y[: sum(sizes)].split(sizes), strict=True))


def trained(method: str, *loaders: Any, net: nn.Module | None = None, **options: Any) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The shared model after ``ROUNDS``, and the clients' samples by round."""
    chosen = options.pop("chosen", None) or METHODS[method]()
    fed = Federation(net or linear(), chosen, loaders, optimizer=sgd, progress=False, **options)
    records = list(fed.run(ROUNDS))
    return fed.model.state_dict(), [[client.samples for client in record.clients] for record in records]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_method_is_in_one_of_three_lists() -> None:
    assert set(METHODS) == NEEDS | NEEDS_NOT | UNDEFINED_HERE


@pytest.mark.parametrize("method", sorted(NEEDS - {"fixbn", "fedtan2"}))
def test_a_batch_of_one_is_left_out_with_one_line_that_names_the_client(method: str, log: pytest.LogCaptureFixture) -> None:
    found, counted = trained(method, batches(5, 4), batches(4, 3, 1, seed=1), calibrate=0)  # where one sample has a place
    assert counted == [[9, 7]] * ROUNDS
    assert [r.getMessage().split(". ")[0] for r in log.records if "left out" in r.getMessage()] == [f"client 1 {LEFT_OUT}"]
    without, _ = trained(method, batches(5, 4), batches(4, 3, seed=1), calibrate=0)
    weights = [name for name in found if "running" not in name]  # static-bn measures them for the evaluation
    assert all(torch.equal(found[name], without[name]) for name in weights)
    if method != "single":  # which shares nothing
        control, _ = trained(method, batches(5, 4), batches(4, 4, seed=1), calibrate=0)
        assert not all(torch.equal(found[name], control[name]) for name in weights)


@pytest.mark.parametrize("method", sorted(NEEDS_NOT))
def test_a_method_without_batch_statistics_trains_on_it(method: str, log: pytest.LogCaptureFixture) -> None:
    found, counted = trained(method, batches(5, 4), batches(4, 3, 1, seed=1))
    assert counted == [[9, 8]] * ROUNDS
    assert "left out" not in log.text
    assert not same(found, trained(method, batches(5, 4), batches(4, 3, seed=1))[0])  # control


@pytest.mark.parametrize("method", ["fixbn", "fedtan2"])
def test_a_frozen_round_trains_on_it(method: str) -> None:
    _, counted = trained(method, batches(5, 4), batches(4, 3, 1, seed=1))  # frozen from round 2
    assert counted == [[9, 7], [9, 8]]
    affine = methods.fixbn(freeze_after=0, freeze_what="affine")
    assert trained("fixbn", batches(4, 3, 1), chosen=affine)[1] == [[7]] * ROUNDS  # control: its statistics are the batch's


def test_fedtan_begins_with_a_batch_of_one() -> None:
    """The first step normalises with the cohort's statistics: that of the union of (4, 1)."""
    found, counted = trained("fedtan", batches(4), batches(1, seed=1))
    assert counted == [[4, 1]] * ROUNDS
    union = [(torch.cat([batches(4)[0][0], batches(1, seed=1)[0][0]]), torch.cat([batches(4)[0][1], batches(1, seed=1)[0][1]]))]
    central, _ = trained("fedavg", union)
    assert max(float((found[name] - central[name]).abs().max()) for name in central if central[name].is_floating_point()) < 1e-12
    biased, _ = trained("fedavg", batches(4))
    assert not same(central, biased)  # control


def plainly(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Plain PyTorch: ``ROUNDS`` passes over ``data``."""
    net.train()
    for _ in range(ROUNDS):
        optimizer = sgd(net.parameters())
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "static-bn", "hbn"])
def test_batches_of_one_image_have_a_variance_over_its_pixels(method: str, log: pytest.LogCaptureFixture) -> None:
    found, counted = trained(method, batches(1, 1, 1), net=conv())
    assert counted == [[3]] * ROUNDS
    if method == "fedavg":
        plain = plainly(conv(), batches(1, 1, 1))
        assert all(torch.allclose(found[name], plain[name], atol=1e-14) for name in plain if plain[name].is_floating_point())
    assert "left out" not in log.text
    with pytest.raises(Diverged, match="trained on no samples"):  # control: one value per channel
        trained3(method, batches(1, 1, 1), net=conv(pooled=True))
    assert "client 0 left out 3 batches of one sample in round 1" in log.text


def trained3(method: str, *loaders: Any, net: nn.Module) -> None:
    list(Federation(net, METHODS[method](), loaders, optimizer=sgd, progress=False).run(3))


def test_looking_for_a_variance_changes_nothing() -> None:
    net, (x, _) = conv(pooled=True), batches(1)[0]
    net[2].eval()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    assert without_variance(net, batch_norms(net), x) == ["2"]
    assert without_variance(conv(), batch_norms(conv()), x) == []  # control
    assert same(net.state_dict(), before)
    assert [module.training for module in net.modules()] == modes
    assert not net[2]._forward_pre_hooks


def test_a_layer_that_its_owner_holds_in_evaluation_mode_needs_no_variance() -> None:
    class Held(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Held:
            return super().train(False)

    net = linear()
    net[2] = Held(8).double()
    assert trained("fedavg", batches(4, 1), net=net)[1] == [[5]] * ROUNDS
    assert trained("fedavg", batches(4, 1))[1] == [[4]] * ROUNDS  # control


@pytest.mark.parametrize("method", sorted(NEEDS - {"single"}))
def test_a_client_of_one_sample_sits_out_where_batches_have_statistics(method: str, log: pytest.LogCaptureFixture) -> None:
    one, two = (SeededBatches(*vars(samples(n, n)).values(), 4) for n in (1, 9))
    _, counted = trained(method, one, two, chosen=METHODS[method](freeze_after=ROUNDS) if method in ("fixbn", "fedtan2") else None)
    assert counted == [[0, 9]] * ROUNDS
    assert f"client 0 {LEFT_OUT}" in log.text


@pytest.mark.parametrize("door", ALL)
@pytest.mark.parametrize("method", sorted(NEEDS_NOT - {"gn-ws", "fixup"}))
def test_a_client_of_one_sample_trains_otherwise_in_every_door(door: str, method: str) -> None:
    chosen, clients = METHODS[method](), [samples(1, 1), samples(9, 9)]
    found = through(ALL[door], linear(), chosen, clients, 1)
    assert apart(found, through(ALL["federation"], linear(), chosen, clients, 1)) < 1e-12
    assert apart(found, through(ALL["federation"], linear(), chosen, clients[1:] * 2, 1)) > 1e-6  # control


def test_the_application_leaves_such_a_client_out_as_federation_does() -> None:
    clients = [samples(1, 1), samples(9, 9), samples(6, 6)]
    application, federation = (through(ALL[door], linear(), methods.fedavg(), clients, ROUNDS) for door in ("application", "federation"))
    assert apart(application, federation) < 1e-12
    for nobody, others in ((samples(0), True), (samples(2, 1), False)):  # control: two samples train
        same = apart(application, through(ALL["federation"], linear(), methods.fedavg(), [nobody, *clients[1:]], ROUNDS)) < 1e-12
        assert same is others


def test_one_program_lets_a_client_of_one_sample_work_by_itself(log: pytest.LogCaptureFixture) -> None:
    loaders = [SeededBatches(*vars(samples(n, n)).values(), 4) for n in (1, 9)]
    assert trained("gn", *loaders, engine="vectorised")[1] == [[1, 9]] * ROUNDS
    assert trained("hbn", *loaders, engine="vectorised")[1] == [[0, 9]] * ROUNDS
    assert "needs at least 2 samples" in log.text


def test_seeded_batches_of_no_sample_are_none() -> None:
    none = SeededBatches(*vars(samples(0)).values(), 4)
    assert (list(none), len(none), list(none.epochs(0, 0, 1, 2))) == ([], 0, [])
    assert len(list(SeededBatches(*vars(samples(1)).values(), 4))) == 1  # control


@pytest.mark.parametrize("lower_layers", ["hybrid", "shared"])
def test_hbn_leaves_it_out_of_its_pass_where_it_would_break_it(lower_layers: str) -> None:
    method = methods.hbn(lower_layers=lower_layers)

    def measured(*sizes: int) -> list[float]:
        model = convert(linear(), method)
        with local_round(model, method, server_state(linear(), method, rounds=2).instruction()) as round:
            round.measure(batches(*sizes))
        return [number for m in round.report().values() for number in (m.count, *m.mean.tolist())]

    assert (measured(4, 1) == pytest.approx(measured(4))) == (lower_layers == "hybrid")
    assert (measured(4, 1) == pytest.approx(measured(5))) == (lower_layers == "shared")  # where it has a place, as any other


@pytest.mark.parametrize("method", ["fedavg", "hbn", "static-bn"])
def test_one_s_own_loop_is_told_what_to_do(method: str) -> None:
    chosen = METHODS[method]()
    model = convert(linear(), chosen)
    asked = server_state(linear(), chosen, rounds=2).instruction()
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught, local_round(model, chosen, asked) as round:
        round.model(batches(1)[0][0])
    assert "drop_last=True" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="mine") as other, local_round(convert(linear(), chosen), chosen, asked):
        raise ValueError("mine")
    assert not getattr(other.value, "__notes__", [])  # control


@pytest.mark.parametrize("method", sorted(set(METHODS) - UNDEFINED_HERE))
def test_one_sample_is_evaluated(method: str) -> None:
    fed = Federation(linear(), METHODS[method](), [batches(5), batches(4, seed=1)], optimizer=sgd, progress=False)
    list(fed.run(1))
    one = batches(1, seed=2)
    if not fed.method.personal:
        assert fed.evaluate(one)["loss"] == pytest.approx(F.cross_entropy(fed.model(one[0][0]), one[0][1]).item())
    assert fed.evaluate(one)["loss"] != fed.evaluate(batches(5))["loss"]  # control


# Loaders that can be gone through once


class Exhausted:
    """Says that it can be iterated over again, and cannot."""

    def __init__(self) -> None:
        self._once = iter(batches(5))

    def __iter__(self) -> Iterator[Any]:
        return self._once


def test_a_loader_that_is_empty_the_second_time_is_named(log: pytest.LogCaptureFixture) -> None:
    list(Federation(linear(), methods.fedavg(), [batches(5), Exhausted()], optimizer=sgd, progress=False).run(3))
    said = [record.getMessage() for record in log.records if "gave no batch" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("client 1: its loader gave no batch in round 2. Every round iterates over the batches")


def test_that_nobody_trained_is_no_divergence() -> None:
    def failing(loader: Any, optimizer: Any = sgd) -> str:
        with pytest.raises(Diverged) as caught:
            list(Federation(linear(), methods.fedavg(), [loader], optimizer=optimizer, progress=False).run(3))
        return str(caught.value)

    assert "learning rate" not in failing([])
    assert "the client trained on no samples" in failing([])
    x, y = batches(5)[0]
    assert "its own inputs" in (said := failing([(x * torch.nan, y)]))
    assert "learning rate" not in said
    assert failing([(x, y)], partial(SGD, lr=1e38)).endswith("Training diverged: lower the learning rate")  # control


@pytest.mark.slow
def test_worker_processes_tell_of_it_too(log: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(TensorDataset(*vars(samples(9)).values()), batch_size=4)
    found, counted = trained("fedavg", loader, batches(5), workers=2)
    assert counted == [[8, 5]] * ROUNDS
    assert f"client 0 {LEFT_OUT}" in log.text
    assert same(found, trained("fedavg", loader, batches(5))[0])


