"""``convert``: every method on every network, and the layers it refuses, each by its name and with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.kinds import Unconvertible
from fl_bn.bn.layers import FederatedBatchNorm, HybridBatchNorm
from fl_bn.bn.roles import OF_BATCH_NORM, UnknownTensor, roles
from fl_bn.federation.schema import Locality
from fl_bn.methods import METHODS
from fl_bn.methods.fedtan import CohortBatchNorm
from fl_bn.methods.normalisers import StaticBatchNorm
from fl_bn.methods.unnormalised import ScaleShift
from tests.listed import listed
from tests.networks import seeded_network
from tests.refusals import naming

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
COHORT = dict.fromkeys(("fedtan", "fedtan2", "fedavg-alg2"), CohortBatchNorm)
SHARED = {"hbn": HybridBatchNorm, "fbn": FederatedBatchNorm, "static-bn": StaticBatchNorm, **COHORT}  # normalise with shared statistics
KINDS = {**dict.fromkeys(("gn", "ln", "in", "gn-ws"), nn.GroupNorm), **dict.fromkeys(("fixup", "fedfn", "fedwon"), ScaleShift), **SHARED}
every_method = listed("name", METHODS)


def test_a_method_may_keep_any_layer_at_home() -> None:
    model = seeded_network("cnn")
    last = replace(METHODS["fbn"](), local_in=lambda layers: {layers[-1]: OF_BATCH_NORM})
    *_, home = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert Locality.of(convert(model, last), last).home_statistics == (home,)
    with naming("conv9"):
        convert(model, replace(last, local_in=lambda layers: {"conv9": OF_BATCH_NORM}))


def around(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm)


@listed("name", SHARED)
def test_evaluation_computes_the_same(name: str) -> None:
    model = seeded_network("resnet").eval()
    converted = convert(model, METHODS[name]())
    assert not any(module.training for module in converted.modules())
    assert torch.equal(converted(X), model(X))


@every_method
def test_a_layer_keeps_its_options_and_what_it_lacks(name: str) -> None:
    model = around(nn.BatchNorm2d(4, eps=1e-2, momentum=0.3)).double()
    model[1].bias.requires_grad_(False)
    new = convert(model, METHODS[name]())[1]
    assert (new.weight.requires_grad, new.bias.requires_grad) == (True, False)
    assert new.weight.dtype is torch.float64
    assert (new.eps, getattr(new, "momentum", 0.3)) == (1e-2, 0.3)
    half = around(nn.BatchNorm2d(4))
    half[1].bias = None  # as BatchNorm2d(bias=False) of newer torch
    converted = convert(half, METHODS[name]())
    assert converted[1].weight is not None
    assert "1.bias" not in roles(converted)
    assert converted(X).isfinite().all()


@every_method
def test_a_layer_used_twice_and_an_affine_that_two_layers_share_stay_one(name: str) -> None:
    """A step moves it by both layers' gradients; two copies would each move by their own."""
    method, norm, other = METHODS[name](), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    other.weight, other.bias = norm.weight, norm.bias
    head = (nn.Flatten(), nn.Linear(256, 2))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU(), nn.Conv2d(4, 4, 1), other, nn.Sequential(norm), *head)
    new = convert(model, method)
    assert new[1] is new[5][0]
    assert isinstance(new[1], KINDS.get(name, nn.BatchNorm2d))
    if name != "fixup":  # which has scalars of its own
        assert new[1].weight is new[4].weight is not norm.weight
        assert new[1].bias is new[4].bias
        assert len(list(new.parameters())) == len(list(model.parameters())) + (2 if name == "hbn" else 0)  # mixing logits


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Renamed(nn.BatchNorm2d):
    """Adds nothing to the forward pass."""


class Extended(nn.BatchNorm2d):
    """Has a buffer of its own, that other code reads."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("extra", torch.zeros(channels))


ALL, NONE = set(METHODS), set[str]()
STATISTICS = {name for name, make in METHODS.items() if make().needs_running} | {*SHARED}
REPLACING = {name for name, make in METHODS.items() if make().layer is not None and make().local_in is None}
LAYERS: dict[str, tuple[Callable[[], nn.Module], set[str], str]] = {  # a layer, the methods that refuse it, and words of the reason
    "a subclass": (lambda: Renamed(4), NONE, ""),
    "without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), STATISTICS, "no running statistics"),
    "a cumulative average": (lambda: nn.BatchNorm2d(4, momentum=None), set(SHARED), "momentum=None"),
    "another forward pass": (lambda: Activated(4), REPLACING, "it overrides BatchNorm's forward"),
    "a buffer more": (lambda: Extended(4), ALL, "extra"),
    "instance": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), ALL, "running statistics of InstanceNorm"),
    "lazy": (lambda: nn.LazyBatchNorm2d(), ALL, "a lazy layer has no shape yet"),
    "of fbn": (lambda: FederatedBatchNorm(4), ALL, "converted before"),
    "of hbn": (lambda: HybridBatchNorm(4), ALL, "converted before"),
    "parametrised": (lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(4)), ALL, "parametriz"),
    "TorchScript": (lambda: torch.jit.script(nn.BatchNorm2d(4)), ALL, "a TorchScript module"),
}


@listed("case", LAYERS)
@every_method
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_layer_is_converted_or_refused_by_name_and_reason(name: str, case: str) -> None:
    make, refusing, reason = LAYERS[case]
    if name in refusing:
        with naming(reason, (Unconvertible, UnknownTensor)) as caught:  # type: ignore[arg-type]
            convert(around(make()), METHODS[name]())
        assert str(caught.value).startswith("1")
        return
    with torch.random.fork_rng():
        converted = convert(around(make()), METHODS[name]()).eval()
    assert converted(X).isfinite().all()
    assert case != "another forward pass" or (converted(X) >= 0).all()  # torch's own layer stays, with what it adds
