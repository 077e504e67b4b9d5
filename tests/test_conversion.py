"""``convert``: every method on every network, and the layers it refuses, each with its reason."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from fl_bn.bn.conversion import convert
from fl_bn.bn.kinds import Unconvertible
from fl_bn.bn.layers import FederatedBatchNorm, HybridBatchNorm
from fl_bn.bn.roles import UnknownTensor, batch_norms, roles
from fl_bn.methods import METHODS
from fl_bn.methods.fedtan import CohortBatchNorm
from fl_bn.methods.static_bn import StaticBatchNorm
from fl_bn.methods.unnormalised import ScaleShift
from tests.listed import listed
from tests.networks import seeded_network

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
COHORT = dict.fromkeys(("fedtan", "fedtan2", "fedavg-alg2"), CohortBatchNorm)
SHARED = {"hbn": HybridBatchNorm, "fbn": FederatedBatchNorm, "static-bn": StaticBatchNorm, **COHORT}  # normalise with shared statistics
KINDS = {**dict.fromkeys(("gn", "ln", "in", "gn-ws"), nn.GroupNorm), **dict.fromkeys(("fixup", "fedfn", "fedwon"), ScaleShift), **SHARED}


def around(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm)


@listed("name", METHODS)
def test_the_model_given_is_not_touched(name: str) -> None:
    model = seeded_network("resnet")
    before, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    converted = convert(model, METHODS[name]())
    with torch.no_grad():
        for tensor in converted.state_dict().values():
            tensor.add_(1)
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(before[k], model.state_dict()[k]) for k in before)


@pytest.mark.sample("-fedavg]", "-gn]", "-fixup]", "-hbn]", "-fbn]", "-fedtan]")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("network", ["resnet18", "mobilenet_v2", "vgg11_bn", "densenet121"])
def test_torchvision(network: str, name: str) -> None:
    with torch.device("meta"):
        model = models.get_model(network, weights=None)
    converted = convert(model, METHODS[name]())
    found = [module for module in converted.modules() if isinstance(module, KINDS.get(name, nn.BatchNorm2d))]
    assert len(found) == len(batch_norms(model))
    learnt = {key for key in model.state_dict() if key.endswith(("weight", "bias"))}
    if name == "fixup":  # has one multiplier per residual branch
        learnt -= {f"{layer}.weight" for layer in batch_norms(model)}
    assert set(roles(converted)) >= learnt
    if name in KINDS:
        assert not any(type(module) is nn.BatchNorm2d for module in converted.modules())


@pytest.mark.parametrize("name", SHARED)
def test_evaluation_computes_the_same(name: str) -> None:
    model = seeded_network("resnet").eval()
    converted = convert(model, METHODS[name]())
    assert not any(module.training for module in converted.modules())
    assert torch.equal(converted(X), model(X))


@listed("name", METHODS)
def test_track_running_stats_false(name: str) -> None:
    model = around(nn.BatchNorm2d(4, track_running_stats=False))
    if name in {"fixbn", "silobn", *SHARED}:
        with pytest.raises(Unconvertible, match=r"^1 \(BatchNorm2d\): it has no running statistics .*choose fedavg"):
            convert(model, METHODS[name]())
    else:
        assert convert(model, METHODS[name]())(X).isfinite().all()


@listed("name", METHODS)
def test_cumulative_average(name: str) -> None:
    model = around(nn.BatchNorm2d(4, momentum=None))
    if name in SHARED:
        with pytest.raises(Unconvertible, match="momentum=None"):
            convert(model, METHODS[name]())
    else:
        assert convert(model, METHODS[name]())(X).isfinite().all()


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Renamed(nn.BatchNorm2d):
    """Adds nothing to the forward pass."""


class Extended(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("extra", torch.zeros(channels))


@listed("name", METHODS)
def test_subclasses_of_batch_norm(name: str) -> None:
    method = METHODS[name]()
    convert(around(Renamed(4)), method)
    convert(around(nn.SyncBatchNorm(4)), method)
    if method.layer is None or method.local_in is not None:
        assert (convert(around(Activated(4)), method)(X) >= 0).all()  # torch's own layers stay, with what they add
        with pytest.raises(UnknownTensor, match=r"1\.extra"):
            convert(around(Extended(4)), method)
    else:
        with pytest.raises(Unconvertible, match=r"^1 \(Activated\): it overrides BatchNorm's forward"):
            convert(around(Activated(4)), method)


@listed("name", METHODS)
@listed(
    ("norm", "reason"),
    [
        (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "running statistics of InstanceNorm"),
        (lambda: nn.LazyBatchNorm2d(), "a lazy layer has no shape yet"),
        (lambda: nn.LazyConv2d(2, 1), "a lazy layer has no shape yet"),
        (lambda: FederatedBatchNorm(4), "converted before"),
        (lambda: HybridBatchNorm(4), "converted before"),
        (lambda: CohortBatchNorm(4), "converted before"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(4)), "parametriz"),
    ],
    ids=["instance", "lazy-norm", "lazy-convolution", "fbn-again", "hbn-again", "fedtan-again", "parametrized"],
)
def test_refused_by_name_and_reason(name: str, norm: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(Unconvertible, match=rf"^1 \(\w+\): .*{reason}"):
        convert(around(norm()), METHODS[name]())


def test_an_instance_norm_without_statistics_stays() -> None:
    model = convert(nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), METHODS["hbn"]())
    assert isinstance(model[0], nn.InstanceNorm2d)


@listed("name", METHODS)
def test_requires_grad_dtype_and_momentum_are_preserved(name: str) -> None:
    model = around(nn.BatchNorm2d(4, eps=1e-2, momentum=0.3)).double()
    model[1].bias.requires_grad_(False)
    new = convert(model, METHODS[name]())[1]
    assert new.weight.requires_grad
    assert not new.bias.requires_grad
    assert new.weight.dtype is torch.float64
    assert new.eps == 1e-2
    assert getattr(new, "momentum", 0.3) == 0.3


@listed("name", METHODS)
def test_without_affine_or_without_bias(name: str) -> None:
    plain = convert(around(nn.BatchNorm2d(4, affine=False)), METHODS[name]())
    assert plain[1].weight is None
    assert plain[1].bias is None
    half = around(nn.BatchNorm2d(4))
    half[1].bias = None  # as BatchNorm2d(bias=False) of newer torch
    new = convert(half, METHODS[name]())
    assert new[1].weight is not None
    assert new[1].bias is None
    assert "1.bias" not in roles(new)
    assert new(X).isfinite().all()


@listed("name", METHODS)
def test_a_model_that_is_a_norm_layer_and_a_layer_used_twice(name: str) -> None:
    method = METHODS[name]()
    needs = {"fedfn": "the head, torch's own last Linear or Conv2d", "fedwon": "BatchNorm and no convolution"}
    if name in needs:
        with pytest.raises(Unconvertible, match=needs[name]):
            convert(nn.BatchNorm2d(4), method)
        return
    assert isinstance(convert(nn.BatchNorm2d(4), method), KINDS.get(name, nn.BatchNorm2d))
    norm = nn.BatchNorm2d(4)
    model = convert(nn.Sequential(norm, nn.Sequential(nn.ReLU(), norm)), method)
    assert model[0] is model[1][1]
    assert isinstance(model[0], KINDS.get(name, nn.BatchNorm2d))


def test_instance_normalisation_after_a_linear_layer_is_refused_at_the_first_batch() -> None:
    model = convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), METHODS["in"]())
    with pytest.raises(ValueError, match="use method 'gn' or 'ln' for a model with BatchNorm after a linear layer"):
        model(torch.randn(5, 3))


class Gated(nn.BatchNorm2d):
    """BatchNorm's own forward, and a tensor of its own that other code reads."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gate = nn.Parameter(torch.ones(channels))


@listed("name", METHODS)
def test_a_batch_norm_with_a_parameter_of_its_own_is_refused_with_the_layers_name(name: str) -> None:
    """Of every method; those that replace the layer raised torch's RuntimeError of a state_dict, or lost it without a word."""
    with pytest.raises((Unconvertible, UnknownTensor), match="'gate'"):
        convert(around(Gated(4)), METHODS[name]())


def tied() -> nn.Sequential:
    first, second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    second.weight, second.bias = first.weight, first.bias
    return nn.Sequential(nn.Conv2d(3, 4, 1), first, nn.ReLU(), nn.Conv2d(4, 4, 1), second, nn.Flatten(), nn.Linear(256, 2))


@listed("name", [name for name in METHODS if name not in ("fixup", "fedfn", "fedwon")])
def test_an_affine_that_two_layers_share_stays_one(name: str) -> None:
    """A step moves it by both layers' gradients; two copies would each move by their own."""
    model = tied()
    converted = convert(model, METHODS[name]())
    assert converted[1].weight is converted[4].weight
    assert converted[1].bias is converted[4].bias
    assert converted[1].weight is not model[1].weight
    assert len(list(converted.parameters())) == len(list(model.parameters())) + (2 if name == "hbn" else 0)  # mixing logits


@listed("name", METHODS)
@listed("how", ["script", "trace", "a part"])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_refused(name: str, how: str) -> None:
    """Its BatchNorm is of no type that anyone could find: it was shared as if it were a weight."""
    model: nn.Module = around(nn.BatchNorm2d(4)).eval()
    model = torch.jit.trace(model, X) if how == "trace" else torch.jit.script(model)
    if how == "a part":
        model = nn.Sequential(nn.Identity(), model)
    with pytest.raises(Unconvertible, match=f"^{'1' if how == 'a part' else 'the model'} .*a TorchScript module .*before torch.jit.script"):
        convert(model, METHODS[name]())
