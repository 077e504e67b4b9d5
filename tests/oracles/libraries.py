"""Networks of timm, segmentation-models-pytorch and MONAI as they come: a round of one step a client, of each kind of method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tests.equivalence.row import Row, make_clients, union
from tests.oracles import centralised, fedavg, fedbn


def norms(net: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in net.modules() if isinstance(layer, _BatchNorm)]


@torch.no_grad()
def measured(net: nn.Module, x: Tensor) -> nn.Module:
    """Give every BatchNorm layer that runs the statistics of its input, the layers before it first."""

    def measure(layer: _BatchNorm, args: tuple[Tensor, ...]) -> None:
        values = args[0].transpose(0, 1).flatten(1)
        layer.running_mean, layer.running_var = values.mean(1), values.var(1)

    handles = [layer.register_forward_pre_hook(measure) for layer in norms(net)]
    net.eval()(x)
    for handle in handles:
        handle.remove()
    return net


def constant(row: Row) -> nn.Module:
    """Make the centralised step with the union's statistics as constants."""
    x, y = union(row.clients)
    net = measured(row.net(), x).train()
    for layer in norms(net):
        layer.eval()
    F.cross_entropy(net(x), y).backward()
    torch.optim.SGD(net.parameters(), row.rate).step()
    return net


class Pooled(nn.Sequential):
    """Take the scores of all pixels for a sample's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).mean(2)  # type: ignore[no-any-return]


def made(library: str, name: str, *arguments: Any, **options: Any) -> nn.Module:
    """Build a network of a library, whose import takes seconds."""
    return getattr(import_module(library), name)(*arguments, **options)  # type: ignore[no-any-return]


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(made, "timm", "create_model", name, pretrained=False, num_classes=4, **options)


def unet() -> nn.Module:
    """Build a U-Net, of whose encoder the last layers do not run."""
    options: dict[str, Any] = {"encoder_depth": 3, "decoder_channels": (16, 8, 8)}
    return Pooled(made("segmentation_models_pytorch", "Unet", "resnet18", encoder_weights=None, classes=4, **options))


def unet_3d() -> nn.Module:
    options: dict[str, Any] = {"channels": (4, 8, 8), "strides": (2, 2), "num_res_units": 1, "norm": "BATCH"}
    return Pooled(made("monai.networks.nets", "UNet", spatial_dims=3, in_channels=1, out_channels=4, **options))


PICTURES = make_clients(2, 4, 3, shape=(3, 32, 32))
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "timm's efficientnet_b0": (timm("efficientnet_b0"), PICTURES),
    "timm's mobilenetv3_small_050": (timm("mobilenetv3_small_050"), PICTURES),
    "timm's regnetx_002": (timm("regnetx_002"), PICTURES),
    "timm's resnetv2_18d": (timm("resnetv2_18d", channels=(16, 16, 32, 32)), PICTURES),
    "smp's Unet": (unet, PICTURES),
    "MONAI's UNet, 3d": (unet_3d, make_clients(2, 4, 3, shape=(1, 8, 8, 8))),
}
RULES: dict[str, tuple[Any, Any, Any]] = {
    "fedavg": (fedavg.of(), fedavg.EQUAL, {}),
    "silobn": (fedbn.silobn, {"statistics are shared": {"method": "fedavg"}}, {}),
    "fedtan": (centralised.training, centralised.FORWARD, {}),
    "fbn": (constant, {"by batch statistics": centralised.training}, {"options": {"momentum": 1.0}, "calibrate": -1}),
}
SETTING: dict[str, Any] = {"rounds": 1, "rate": 0.01, "doors": (), "slow": ("federation",), "tolerance": 1e-8}
ROWS = [
    Row(f"{method}: {name}", right, wrong, method, network=make, clients=clients, **options, **SETTING)
    for name, (make, clients) in NETWORKS.items()
    for method, (right, wrong, options) in RULES.items()
]
