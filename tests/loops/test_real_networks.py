"""Other people's networks, one round of each method through ``Federation``: timm, torchvision, segmentation-models-pytorch and MONAI.

What a method is to compute is computed once more by plain PyTorch in float64: on the union of the clients' data, or client by client. Each
comparison has a control that fails it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

from fl_bn import Classification, Federation, Segmentation, Task, convert, methods
from fl_bn.methods import Method, Refresh
from tests.refusals import naming

pytestmark = pytest.mark.slow
RATE, EXACT = 0.01, 1e-8
Tensors = dict[str, Tensor]
METHODS: dict[str, Method] = {
    "fedavg": methods.fedavg(),
    "fedbn": methods.fedbn(),
    "silobn": methods.silobn(),
    "fixbn, frozen": replace(methods.fixbn(freeze_after=0), centre=False),
    "fixbn": methods.fixbn(freeze_after=1),
    "hbn": methods.hbn(lam=1.0, lower_layers="shared"),
    "hbn, not refreshed": replace(methods.hbn(lam=1.0, lower_layers="shared"), refresh=Refresh.NOTHING),
    "fbn": methods.fbn(momentum=1.0),
    "fedtan": methods.fedtan(),
    "fedtan2": methods.fedtan2(freeze_after=1),
    "static-bn": methods.static_bn(),
    "gn": methods.gn(),
}


class Detection(Task):
    """As torchvision's detectors have it: the loss is computed inside ``forward``, which takes the targets, a list of dicts, too."""

    name, metric = "detection", "boxes"

    def read(self, batch: Any) -> tuple[Any, Any]:
        images, targets = batch
        return (images, targets), targets

    def output(self, raw: Any) -> Any:
        return raw

    def loss(self, output: Any, targets: Any) -> Tensor:
        return torch.stack([*output.values()]).sum() if isinstance(output, dict) else torch.zeros(())

    def sums(self, output: Any, targets: Any) -> Mapping[str, float]:
        return {"boxes": sum(len(one["boxes"]) for one in output), "images": len(targets)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"boxes": float(sums["boxes"] / sums["images"])}


@dataclass(frozen=True)
class Network:
    """How the network is built, the shape of one input, and what it is trained for. ``steps``: whether a step is the same every time."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    task: Task = Classification()
    steps: bool = True

    def batch(self, n: int, seed: int) -> tuple[Any, Any]:
        rng = torch.Generator().manual_seed(seed)
        if isinstance(self.task, Detection):
            boxes = torch.tensor([[4.0, 4, 30, 40], [20, 10, 60, 50]], dtype=torch.float64)
            images = [torch.rand(self.shape, generator=rng, dtype=torch.float64) * (0.5 + seed / 2) for _ in range(n)]
            return images, [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in images]
        x = torch.randn(n, *self.shape, generator=rng, dtype=torch.float64) * (1 + seed) + seed
        return x, (x[:, 0] > seed).long() if isinstance(self.task, Segmentation) else torch.randint(0, 4, (n,), generator=rng)

    def clients(self) -> list[tuple[Any, Any]]:
        """Two clients of one batch each, of different sizes and distributions."""
        return [self.batch(4, 0), self.batch(3, 1)]


def of_timm(name: str, **options: Any) -> Network:
    return Network(partial(timm.create_model, name, pretrained=False, num_classes=4, **options))


def detector() -> nn.Module:
    """Build Faster R-CNN on MobileNet, with a narrow head."""
    few = {"min_size": 64, "max_size": 64, "rpn_post_nms_top_n_train": 20}
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3, **few)
    model.roi_heads.box_head = TwoMLPHead(256 * 7 * 7, 8)
    model.roi_heads.box_predictor = FastRCNNPredictor(8, 3)
    return model


def unet_3d() -> nn.Module:
    from monai.networks.nets import UNet  # takes seconds to import

    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm="BATCH")


def densenet_of_monai() -> nn.Module:
    from monai.networks.nets import DenseNet121

    return DenseNet121(spatial_dims=2, in_channels=1, out_channels=4, init_features=8, growth_rate=4)


def maxvit() -> nn.Module:
    return torchvision.models.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 8, stochastic_depth_prob=0.0, num_classes=4)


def unet(encoder: str) -> Network:
    """Of the encoder's layers, the last ones do not run."""
    return Network(
        partial(smp.Unet, encoder, encoder_weights=None, classes=2, encoder_depth=3, decoder_channels=(16, 8, 8)), task=Segmentation()
    )


NETWORKS = {
    "timm efficientnet_b0": of_timm("efficientnet_b0"),
    "timm mobilenetv3_small_050": of_timm("mobilenetv3_small_050"),
    "timm regnetx_002": of_timm("regnetx_002"),
    "timm resnetv2_18d": of_timm("resnetv2_18d", channels=(16, 16, 32, 32)),
    "timm densenet121": of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "timm ghostnet_050": of_timm("ghostnet_050", drop_rate=0.0),
    "torchvision detector": Network(detector, (3, 64, 64), Detection(), steps=False),
    "torchvision MaxVit": Network(maxvit),
    "smp Unet, resnet18": unet("resnet18"),
    "smp Unet, of timm": unet("tu-mobilenetv3_small_050"),
    "MONAI UNet, 3d": Network(unet_3d, (1, 8, 8, 8), Segmentation()),
    "MONAI DenseNet121": Network(densenet_of_monai, (1, 32, 32)),
}


# Plain PyTorch


@lru_cache(maxsize=1)  # the tests go network by network
def built(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name].build().double()


def fresh(name: str) -> nn.Module:
    return copy.deepcopy(built(name)).train()


def layers(net: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in net.named_modules() if isinstance(module, _BatchNorm)}


def together(batches: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The union of the clients' data."""
    xs, ys = zip(*batches, strict=True)
    return (sum(xs, []), sum(ys, [])) if isinstance(xs[0], list) else (torch.cat(xs), torch.cat(ys))


def answer(net: nn.Module, batch: tuple[Any, Any]) -> Any:
    return net(*batch) if isinstance(batch[0], list) else net(batch[0])


def stepped(net: nn.Module, batch: tuple[Any, Any]) -> Tensors:
    """All floating-point tensors of ``net`` after a step of SGD on ``batch``, in the modes that its parts are in."""
    out = answer(net, batch)
    loss = sum(out.values()) if isinstance(out, dict) else nn.functional.cross_entropy(out, batch[1])
    net.zero_grad()
    loss.backward()  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items() if tensor.is_floating_point()}


@torch.no_grad()
def exact(net: nn.Module, batch: tuple[Any, Any]) -> nn.Module:
    """Give every BatchNorm layer that runs the statistics of its input on ``batch``, the layers before it first.

    The network is then in training mode, but for these layers.
    """

    def measure(layer: _BatchNorm, args: tuple[Tensor, ...]) -> None:
        x = args[0].transpose(0, 1).flatten(1)
        layer.running_mean, layer.running_var = x.mean(1), x.var(1)

    handles = [layer.register_forward_pre_hook(measure) for layer in layers(net).values()]
    answer(net.eval(), batch)
    for handle in handles:
        handle.remove()
    net.train()
    for layer in layers(net).values():
        layer.eval()
    return net


def average(states: Sequence[Tensors], clients: Sequence[tuple[Any, Any]]) -> Tensors:
    """Weighted by samples."""
    n = [len(y) for _, y in clients]
    return {name: sum(state[name] * k for state, k in zip(states, n, strict=True)) / sum(n) for name in states[0]}  # type: ignore[misc]


@lru_cache(maxsize=1)
def of_each_client(name: str) -> list[Tensors]:
    """Return every client's step with batch statistics."""
    return [stepped(fresh(name), batch) for batch in NETWORKS[name].clients()]


@lru_cache(maxsize=5)
def plainly(name: str, rule: str) -> Tensors:
    """Return what plain PyTorch computes by a rule: one step on the union, or an average of each client's own."""
    clients = NETWORKS[name].clients()
    union = together(clients)
    if rule == "averaged":
        return average(of_each_client(name), clients)
    if rule == "centralised":
        return stepped(fresh(name), union)
    if rule == "the union's statistics as constants":
        return stepped(exact(fresh(name), union), union)
    if rule == "each client's statistics as constants":
        return average([stepped(exact(fresh(name), batch), batch) for batch in clients], clients)
    return stepped(convert(built(name), METHODS["gn"]).train(), union)


# Federated


def federated(name: str, method: Method) -> Federation:
    """After one round, without a scale of its own."""
    network = NETWORKS[name]
    federation = Federation(
        fresh(name),
        method,
        [[batch] for batch in network.clients()],
        task=network.task,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        test=[network.batch(2, 2)],
        unit_scale=False,
        clip="none",
    )
    (record,) = federation.run(1)
    assert record.aggregated
    assert record.evaluation["loss"] == record.evaluation["loss"], "not a number"
    return federation


def apart(found: Mapping[str, Tensor], want: Mapping[str, Tensor], names: Sequence[str]) -> float:
    """The largest deviation of a tensor, in units of its largest number."""
    assert names
    return max(float((found[n] - want[n]).abs().max() / want[n].abs().max().clamp_min(1e-2)) for n in names)


def statistics(net: nn.Module) -> list[str]:
    return [f"{name}.{key}" for name in layers(net) for key in ("running_mean", "running_var")]


def of_norms(net: nn.Module) -> set[str]:
    norms = [name for name, module in net.named_modules() if "Norm" in type(module).__name__]
    return {f"{name}.{key}" for name in norms for key in ("weight", "bias")}


CASES = [(name, method) for name in NETWORKS for method in METHODS]


CONSTANTS = ("the union's statistics as constants", "each client's statistics as constants")
RULES: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("fedavg", "fixbn"), ("averaged", "centralised", "all")),
    **dict.fromkeys(("fedtan", "fedtan2"), ("centralised", "averaged", "all")),
    **dict.fromkeys(("fixbn, frozen", "fbn"), (*CONSTANTS, "all")),
    "hbn, not refreshed": (*CONSTANTS, "statistics"),
    "gn": ("group norm", "centralised", "parameters"),
    **dict.fromkeys(("static-bn", "silobn"), ("averaged", "centralised", "parameters")),
    "fedbn": ("averaged", "centralised", "parameters of other layers"),
}
"""Method -> what it is to compute, what would be wrong, and the tensors that are compared; HBN's statistics alone, for the evaluation."""


@pytest.mark.sample
@pytest.mark.parametrize(("name", "method"), CASES, ids=[" - ".join(case) for case in CASES])
def test_a_round_is_what_plain_pytorch_computes(name: str, method: str) -> None:
    federation, net = federated(name, METHODS[method]), built(name)
    moved, own = statistics(net), of_norms(net)
    learnt = [key for key, _ in net.named_parameters()] if NETWORKS[name].steps else []
    if method in RULES:
        right, wrong, what = RULES[method]
        others = [key for key in learnt if key not in own]
        names = {"all": [*learnt, *moved], "statistics": moved, "parameters": learnt, "parameters of other layers": others}[what]
        found = federation.server.shared.tensors()
        assert not names or apart(found, plainly(name, right), names) < EXACT
        assert not names or not apart(found, plainly(name, wrong), names) < EXACT * 1e3
    evaluated = federation.model.state_dict()
    if method in ("hbn", "static-bn"):  # measured anew for the evaluation, under the weights that are evaluated
        plain, data = fresh(name), NETWORKS[name].clients()
        plain.load_state_dict({key: evaluated[key] for key in plain.state_dict()})
        assert apart(evaluated, exact(copy.deepcopy(plain), together(data)).state_dict(), moved) < EXACT
        assert not apart(evaluated, average([exact(copy.deepcopy(plain), one).state_dict() for one in data], data), moved) < EXACT * 1e3
    for client in range(2) if method in ("fedbn", "silobn") else ():
        kept = federation.client_model(client).state_dict()
        assert apart(kept, of_each_client(name)[client], moved) < EXACT
        assert not apart(kept, of_each_client(name)[1 - client], moved) < EXACT * 1e3


def test_groups_that_do_not_divide_are_refused_by_layer() -> None:
    with naming("bn1"):
        convert(built("timm efficientnet_b0"), methods.gn(groups=5))
