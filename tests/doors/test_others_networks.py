"""Networks, layers and targets as others write them, in ``Federation``: the numbers of plain PyTorch, or one sentence."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD
from torchvision.models import detection

from fl_bn import Federation, Task, convert, methods
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import Scaffold
from fl_bn.task import batch_size
from tests.doors.inner import RunConfig, Unconvertible
from tests.doors.test_federation import made, net
from tests.listed import listed
from tests.networks import Wired
from tests.refusals import naming

RATE = 0.1


def federation(model: nn.Module | None = None, method: Any = None, clients: Any = None, **options: Any) -> Federation:
    own = clients or [[made(0, 4)], [made(1, 64)]]
    return Federation(model or net(), method or methods.fedavg(), own, **({"optimizer": partial(SGD, lr=RATE), "workers": 1} | options))


def test_a_client_weighs_its_samples_whatever_form_the_targets_have() -> None:
    clients = [[(x, {"a": y, "b": (y,)})] for x, y in (made(0, 4), made(1, 64))]
    formed = federation(clients=clients, loss=lambda output, y: F.cross_entropy(output, y["b"][0]))
    (mine,), (theirs,) = formed.run(1), federation().run(1)
    assert [client.samples for client in mine.clients] == [4, 64]
    assert mine.loss == theirs.loss


X, Y = torch.zeros(5, 4), torch.zeros(5)
IMAGES, BOXES = [torch.zeros(3, 8, 8)] * 5, [{"boxes": torch.zeros(i, 4)} for i in range(5)]
PACKED = pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([3, 3, 2, 2, 1]), batch_first=True)
SIZES = [
    (X, Y), (X, Y.numpy()), (X, (Y, Y)), (X, {"a": Y}), (X, None), (X, list(Y)), (X, ["a"] * 5), (X, (Y, torch.zeros(7))), (PACKED, Y),
    (IMAGES, BOXES), (IMAGES, list(Y)), ((IMAGES, BOXES), BOXES), ([X, X], Y), ([X, X], [Y, Y]), ({"a": X}, [Y, Y, Y]), ((X, X), (Y,)),
]  # fmt: skip


def test_the_size_of_a_batch() -> None:
    assert [batch_size(inputs, targets) for inputs, targets in SIZES] == [5] * len(SIZES)
    with naming("str"):
        batch_size("a text", None)


@listed("targets", [torch.rand(8, 3), torch.rand(8), torch.ones(8, 2, dtype=torch.int64)])
def test_targets_that_classification_cannot_evaluate_are_said(targets: Tensor) -> None:
    given = [(made(0, 8)[0], targets)]
    with naming(str(tuple(targets.shape))):
        list(federation(clients=[given], loss=lambda output, y: output.square().mean(), test=given).run(1))


# Layers that a method replaces


def patched() -> nn.Module:
    """A network whose layer somebody gave another ``forward``."""
    model: Any = net()
    model[1].forward = types.MethodType(lambda layer, x: F.gelu(nn.BatchNorm1d.forward(layer, x)), model[1])
    return model  # type: ignore[no-any-return]


def test_what_would_not_follow_the_new_layer_is_refused_and_hooks_do() -> None:
    for name, make in METHODS.items():
        if make().layer and make().has_statistics and not make().local_in:
            with naming("1 (BatchNorm1d)", Unconvertible):
                convert(patched(), METHODS[name]())
    convert(patched(), methods.fedavg())  # control: no layer is replaced
    model = net()
    model[1].register_forward_hook(lambda layer, x, y: y * 0)
    assert not convert(model, methods.gn(groups=2))[1](torch.randn(8, 16)).any()


def hooked() -> nn.Module:
    model = net()
    model[0].register_forward_hook(lambda layer, x, y: y + 1.0)
    return model


class Forked(nn.Sequential):
    """In evaluation mode, another layer uses the output of the layer before BatchNorm, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        y: Tensor = self[3](self[1](h))
        return y if self.training else y + h[:, :3]


@listed("make", [net, lambda: Forked(*net()), hooked], ids=["plain", "forked", "hooked"])
def test_weights_are_not_rescaled_where_that_would_change_the_function(make: Callable[[], nn.Module]) -> None:
    """The control is a plain network, which is rescaled."""
    still = federation(make(), methods.fbn(), unit_scale=True, optimizer=partial(SGD, lr=1e-9))
    list(still.run(1))
    before = dict(make().named_parameters())
    same = [torch.allclose(p, before[name], atol=1e-6) for name, p in still.model.named_parameters()]
    assert all(same) is (make is not net)


@listed(
    ("method", "keys"),
    [
        *((make(), {"method": name}) for name, make in METHODS.items() if name != "fedwon"),  # which takes no network of linear layers
        (methods.fixbn(freeze_after=0), {"method": "fixbn", "freeze-after": 0}),
        (methods.fbn(momentum=0.1), {"method": "fbn", "fbn-momentum": 0.1}),
    ],
    ids=lambda one: one.name if isinstance(one, Method) else ",".join(map(str, one.values())),
)
def test_a_federation_clips_where_a_run_config_clips(method: Method, keys: dict[str, Any]) -> None:
    fed = federation(method=method, optimizer=partial(SGD, lr=RATE, momentum=0.9))
    found, wanted = fed._transport.clients.own[0].settings, RunConfig.from_mapping(keys).local_training()
    assert (found.clip, found.clip_limit, found.step_clip) == (wanted.clip, wanted.clip_limit, wanted.step_clip)


def test_a_clip_by_the_round_counts_the_batches_of_all_epochs() -> None:
    batches = [made(number, 8) for number in range(4)]
    options = {"method": methods.fbn(), "calibrate": 0, "optimizer": partial(SGD, lr=9.0)}
    feds = [federation(clients=[of], local_epochs=n, **options) for of, n in ((batches * 5, 1), (batches, 5), (batches, 4))]
    once, five, control = ([p.tolist() for _ in fed.run(1) for p in fed.model.parameters()] for fed in feds)
    assert once == five != control


def test_a_round_without_a_client_s_reply_leaves_scaffold_s_mean_right() -> None:
    class Loader(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(()) if next(looks) == 3 else super().__iter__()

    looks = count(1)
    fed = federation(clients=[[made(0, 16)], Loader([made(1, 16)])], objective=Scaffold())
    for record in fed.run(4):
        assert len(record.accepted) == 2 - (record.round == 3)
        shared, own = fed.server.shared.auxiliary["control"], [kept.get("objective") for kept in fed._transport.kept]
        assert all(torch.allclose(shared[name], sum(one[name] for one in own) / 2, atol=1e-6) for name in shared)


# Layers that change while they run


class Masked(nn.Module):
    """Has buffers whose entries share memory, as masks and anchors often do."""

    def __init__(self, dtype: torch.dtype, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(8).to(dtype).expand(2, 8), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("rows")[0]


def around(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), layer, nn.Linear(8, 3))


def test_a_layer_that_the_first_forward_pass_makes_is_refused_by_name() -> None:
    def late(parts: Any, x: Tensor) -> Tensor:
        parts.late = getattr(parts, "late", None) or nn.Linear(x.shape[1], 8)
        return parts.late(x)  # type: ignore[no-any-return]

    for method in (methods.fedavg(), methods.fbn(), methods.hbn(), methods.fedtan()):
        with naming("2.late", (ValueError, KeyError)):  # type: ignore[arg-type]
            list(federation(around(Wired(late)), method, test=[made(0, 4)]).run(2))


@listed("persistent", [True, False])
@listed("dtype", [torch.float32, torch.int64])
def test_buffers_whose_entries_share_memory(dtype: torch.dtype, persistent: bool) -> None:
    model = around(Masked(dtype, persistent))
    fed = federation(model, methods.fbn(), test=[made(0, 4)])
    list(fed.run(2))
    assert torch.equal(fed.model[2].rows, model[2].get_buffer("rows"))
    assert model[2].get_buffer("rows").stride(0) == 0  # the user's own stays as it is


# A loss inside the network


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

    def sums(self, output: Any, targets: Any) -> dict[str, float]:
        return {"boxes": sum(len(one["boxes"]) for one in output), "images": len(targets)}

    def metrics(self, sums: Any) -> dict[str, float]:
        return {"boxes": float(sums["boxes"] / sums["images"])}


@pytest.mark.slow
def test_a_detector_of_torchvision_trains() -> None:
    few = {"min_size": 64, "max_size": 64, "rpn_post_nms_top_n_train": 20, "box_detections_per_img": 5}
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3, **few)
    boxes, labels = torch.tensor([[4.0, 4, 30, 40], [20, 10, 60, 50]]), torch.tensor([1, 2])
    clients = [[([torch.rand(3, 64, 64) for _ in range(n)], [{"boxes": boxes, "labels": labels}] * n)] for n in (4, 3)]
    for method in (methods.fedavg(), methods.fbn(), methods.hbn(), methods.fedtan()):
        fed = federation(model, method, clients, task=Detection(), test=clients[0], optimizer=partial(SGD, lr=0.001))
        (record,) = fed.run(1)
        assert record.aggregated
        assert 0 <= record.evaluation["boxes"] <= 5
        assert fed.model.backbone.body["0"][1].running_mean.any()  # type: ignore[union-attr,index]
