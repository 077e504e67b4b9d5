"""A network without BatchNorm: every door says, or refuses, the same before round 1; and whose scale and shift stay at home."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Federation, convert, kinds, local_round, methods, register_batch_norm, server_state
from fl_bn.federation.local import Samples
from fl_bn.federation.norm_layers import looks_like_norm, no_batch_norm, without_subject
from fl_bn.flower import OwnAppStrategy
from fl_bn.flower.app.normalisation import describe_layers
from fl_bn.methods import METHODS
from fl_bn.roles import Role, roles
from tests.doors.doors import ALL, DOORS, apart, through
from tests.test_roles import InPlace

REFUSED = {"static-bn", "fixbn", "hbn", "fbn", "fedtan", "fedtan2", "fedavg-alg2"}
SAID = {"gn", "ln", "in", "fedbn", "silobn"}
SILENT = {"fedavg", "single", "gn-ws", "fixup", "fedfn", "fedwon"}  # averaging was asked for, or something else in the network changes
SENTENCE = "this model has no BatchNorm layer: method {} is plain federated averaging here"


def bare(norm: type[nn.Module] | None = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers[:2], *([norm(8)] if norm else []), *layers[2:]).double()


def data() -> list[Samples]:
    def one(n: int, seed: int) -> Samples:
        x = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return Samples(x, x.flatten(1)[:, :3].argmax(1))

    return [one(5, 0), one(9, 1)]


def test_every_method_is_in_one_of_three_lists() -> None:
    assert set(METHODS) == REFUSED | SAID | SILENT
    assert {name for name, make in METHODS.items() if no_batch_norm(bare(), make())} == REFUSED | SAID
    assert {name for name in REFUSED | SAID if without_subject(METHODS[name]())} == REFUSED


@pytest.mark.parametrize("door", ALL)
@pytest.mark.parametrize("method", sorted(REFUSED))
def test_a_method_about_statistics_is_refused_before_round_1(door: str, method: str) -> None:
    sentence = f"method {method} is about the statistics of BatchNorm, but this model has no BatchNorm layer"
    with pytest.raises(ValueError, match=sentence):
        through(ALL[door], bare(), METHODS[method](), data(), 1)
    if door == "federation":
        assert len(through(ALL[door], bare(nn.BatchNorm1d), METHODS[method](), data(), 1)) == 1  # control


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_the_client_s_half_and_the_strategy_refuse_it_too(method: str) -> None:
    made = METHODS[method]()
    asked = server_state(bare(), methods.fedavg(), rounds=1).instruction()
    with pytest.raises(ValueError, match="no BatchNorm layer"), local_round(convert(bare(), made), made, asked):
        pass
    with pytest.raises(ValueError, match="no BatchNorm layer"):
        OwnAppStrategy(bare(), made)


@pytest.mark.parametrize("door", ALL)
@pytest.mark.parametrize("method", sorted(SAID))
def test_a_method_that_is_averaging_then_says_so_once_and_is_it(door: str, method: str, log: pytest.LogCaptureFixture) -> None:
    averaged = through(ALL[door], bare(), methods.fedavg(), data(), 1)
    assert "BatchNorm" not in "".join(r.getMessage() for r in log.records if r.levelno >= logging.WARNING)
    found = through(ALL[door], bare(), METHODS[method](), data(), 1)
    said = [record.levelname for record in log.records if record.getMessage() == SENTENCE.format(method)]
    assert said == ["WARNING"]
    assert apart(found, averaged) == 0
    log.clear()
    if method == "fedbn":
        with_layer = through(ALL[door], bare(nn.BatchNorm1d), METHODS[method](), data(), 1)
        assert "no BatchNorm layer" not in log.text
        full = through(ALL[door], bare(nn.BatchNorm1d), methods.fedavg(), data(), 1)
        assert with_layer[-1].keys() < full[-1].keys()  # control: something stays at home


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)]
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), *norms, nn.ReLU(), nn.Linear(8, 3)).double()


BATCH_NORM, OTHERS = {"2.weight", "2.bias"}, {"3.weight", "3.bias", "4.weight", "4.bias", "5.weight"}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("method", "travels"), [("fedbn", OTHERS), ("silobn", OTHERS | BATCH_NORM)])
def test_the_scale_and_shift_of_batch_norm_alone_stay_at_home(door: str, method: str, travels: set[str]) -> None:
    found = through(ALL[door], mixed(), METHODS[method](), data())
    affine = {name for name in found[-1] if name in BATCH_NORM | OTHERS}
    assert affine == travels
    assert all(not torch.equal(found[0][name], found[1][name]) for name in travels)  # control: they are trained, and averaged


def test_clients_of_fedbn_have_layer_norm_in_common_and_batch_norm_not() -> None:
    loaders = [[(client.x, client.y)] for client in data()]
    fed = Federation(mixed(), methods.fedbn(), loaders, optimizer=partial(SGD, lr=0.1), progress=False)
    list(fed.run(2))
    one, other = (fed.client_model(i).state_dict() for i in range(2))
    assert all(torch.equal(one[name], other[name]) for name in OTHERS)
    assert not any(torch.equal(one[name], other[name]) for name in BATCH_NORM)  # control


def frozen_of(what: str) -> set[str]:
    """The parameters that FixBN's frozen rounds leave alone."""
    method = methods.fixbn(freeze_after=0, freeze_what=what)
    model = convert(mixed(), method)
    asked = server_state(mixed(), method, rounds=2).instruction()
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with local_round(model, method, asked):
        optimizer = SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(data()[1].x), data()[1].y).backward()
        optimizer.step()
    before.pop("1.bias")  # BatchNorm takes it away again, so that its gradient is a rounding error
    return {name for name in before if torch.equal(dict(model.named_parameters())[name], before[name])}


def test_fixbn_freezes_the_affine_of_batch_norm_alone() -> None:
    assert frozen_of("affine") == BATCH_NORM
    assert frozen_of("both") == BATCH_NORM
    assert frozen_of("statistics") == set()  # control


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_the_description_of_layers_says_one_thing(method: str) -> None:
    made = METHODS[method]()
    with_both, without = ("; ".join(describe_layers(net, convert(net, made), made)) for net in (mixed(), bare()))
    assert "5 tensors of role affine of other norms: shared" in with_both
    assert f"2 tensors of role affine: {'stays at its client' if method == 'fedbn' else 'shared'}" in with_both
    assert "stays at its client" not in without  # beside "plain federated averaging"
    assert no_batch_norm(bare(), made) == SENTENCE.format(method)
    assert no_batch_norm(mixed(), made) == ""  # control


class Net(nn.Sequential):
    """With a BatchNorm that is none by type."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), InPlace(8), nn.Linear(8, 2))


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_batch_norm_that_is_none_by_type_is_named_with_the_way_to_register_it(method: str, log: pytest.LogCaptureFixture) -> None:
    server_state(Net(), METHODS[method](), rounds=1)
    assert f"1 (InPlace): looks like BatchNorm, but its class is not known as BatchNorm, so method {method} shares its tensors" in log.text
    assert "fl_bn.register_batch_norm(InPlace, convert=...)" in log.text
    log.clear()
    server_state(mixed(), METHODS[method](), rounds=1)
    assert "register" not in log.text  # control
    with pytest.raises(ValueError, match=r"no BatchNorm layer.*If InPlace is BatchNorm, register it: fl_bn.register_batch_norm\(InPlace"):
        server_state(Net(), methods.fbn(), rounds=1)


def as_batch_norm(layer: nn.Module) -> nn.BatchNorm1d:
    assert isinstance(layer, InPlace)
    return nn.BatchNorm1d(len(layer.weight))


@pytest.mark.parametrize("method", ["fbn", "fedbn", "gn"])
def test_a_registered_kind_is_batch_norm(method: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kinds, "_BY_TYPE", {})
    register_batch_norm(InPlace, convert=as_batch_norm)
    server_state(Net(), METHODS[method](), rounds=1)
    assert "BatchNorm layer" not in log.text
    assert "register" not in log.text
    kinds._BY_TYPE.clear()
    assert no_batch_norm(Net(), METHODS[method]()) != ""  # control


def test_many_layers_of_a_kind_are_one_sentence() -> None:
    (said,) = looks_like_norm(nn.Sequential(*(InPlace(2) for _ in range(5))), methods.single())
    assert said.startswith("0, 1, 2 and 2 more (InPlace): ")
    assert "keeps its tensors" in said


def test_no_role_is_local_that_nobody_meant() -> None:
    """What FedBN keeps is BatchNorm's: five entries of a layer."""
    role = roles(mixed())
    kept = {name for name, r in role.items() if r in METHODS["fedbn"]().local}
    assert kept == {f"2.{key}" for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert {name for name, r in role.items() if r is Role.OTHER_AFFINE} == OTHERS  # control
