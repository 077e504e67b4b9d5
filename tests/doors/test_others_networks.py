"""Networks, targets and losses as others write them, in ``Federation``: the numbers of plain PyTorch, or one sentence."""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from fl_bn import Classification, Federation, SeededBatches, convert, methods
from fl_bn.composed import Unconvertible
from fl_bn.federation.centring import centred_weights
from fl_bn.federation.clipping import bounded
from fl_bn.federation.per_client import rate_of
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.unit_scale import producers
from fl_bn.methods import Method
from fl_bn.run.config import RunConfig
from fl_bn.task import batch_size

RATE = 0.1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batch(samples: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=made) + seed, torch.randint(0, 2, (samples,), generator=made)


def federation(model: nn.Module | None = None, method: Any = None, clients: Any = None, **options: Any) -> Federation:
    own = clients or [[batch(4)], [batch(64, 1)]]
    made: dict[str, Any] = {"optimizer": partial(SGD, lr=RATE), "progress": False} | options
    return Federation(model or net(), method or methods.fedavg(), own, **made)


def refused(match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        federation(**options)


# targets

Pair = namedtuple("Pair", "first second")
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda y: (y, y), lambda y: y[0]),
    "list": (lambda y: [y, y], lambda y: y[1]),
    "tuple of one": (lambda y: (y,), lambda y: y[0]),
    "dict": (lambda y: {"a": y, "b": y}, lambda y: y["b"]),
    "named tuple": (lambda y: Pair(y, y), lambda y: y.second),
    "list of samples": (lambda y: list(y), lambda y: torch.stack(y)),
    "none": (lambda y: None, lambda y: y),
    "of the whole batch": (lambda y: torch.tensor(0.0), lambda y: y),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", [methods.fedavg(), methods.fedtan()], ids=lambda method: method.name)
def test_a_client_weighs_its_samples_whatever_form_the_targets_have(method: Method, form: str) -> None:
    make, read = FORMS[form]
    blind = form in ("none", "of the whole batch")

    def loss(output: Tensor, targets: Any) -> Tensor:
        return output.square().mean() if blind else F.cross_entropy(output, read(targets))

    plain = (lambda output, targets: output.square().mean()) if blind else F.cross_entropy
    formed = federation(method=method, clients=[[(x, make(y))] for x, y in (batch(4), batch(64, 1))], loss=loss)
    usual = federation(method=method, loss=plain)
    mine, theirs = next(iter(formed.run(1))), next(iter(usual.run(1)))
    assert [client.samples for client in mine.clients] == [4, 64]
    assert mine.loss == theirs.loss
    assert all(torch.equal(formed.model.state_dict()[name], tensor) for name, tensor in usual.model.state_dict().items())


class InTuples(Classification):
    def loss(self, output: Tensor, targets: Any) -> Tensor:
        return F.cross_entropy(output, targets[0])

    def sums(self, output: Tensor, targets: Any) -> dict[str, Tensor | float]:
        return super().sums(output, targets[0])


def test_the_loss_of_an_evaluation_weighs_samples_too() -> None:
    (x, y), model = batch(12), convert(net(), methods.fedavg()).eval()
    state = InTuples().state()
    with torch.no_grad():
        for part in (slice(8), slice(8, None)):
            state.update(model(x[part]), (y[part], y[part]))
        assert state["loss"] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-6)


X, Y = torch.zeros(5, 4), torch.zeros(5)
IMAGES, BOXES = [torch.zeros(3, 8, 8)] * 5, [{"boxes": torch.zeros(i, 4)} for i in range(5)]


@pytest.mark.parametrize(("inputs", "targets"), [
    (X, Y), (X, Y.numpy()), (X, (Y, Y)), (X, [Y, Y]), (X, {"a": Y}), (X, None), (X, list(Y)), (X, ["a"] * 5), (X, (Y, torch.zeros(7))),
    (IMAGES, BOXES), (IMAGES, list(Y)), ((IMAGES, BOXES), BOXES), ([X, X], Y), ([X, X], [Y, Y]), ({"a": X}, [Y, Y, Y]), ((X, X), (Y,)),
])  # fmt: skip
def test_the_size_of_a_batch(inputs: Any, targets: Any) -> None:
    assert batch_size(inputs, targets) == 5


def test_the_size_of_a_batch_that_nothing_shows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the number of samples of a batch is unclear: its inputs are a str, its targets a NoneType"):
        batch_size("a text", None)


@pytest.mark.parametrize(("targets", "words"), [
    (torch.rand(8, 2), r"the targets are \(8, 2\) float32"),
    (torch.rand(8), r"the targets are \(8,\) float32"),
    (torch.ones(8, 3, dtype=torch.int64), r"the targets are \(8, 3\) int64"),
])  # fmt: skip
def test_targets_that_classification_cannot_evaluate_are_said(targets: Tensor, words: str) -> None:
    one = federation(clients=[[(batch()[0], targets)]], loss=lambda output, y: output.square().mean(), test=[(batch()[0], targets)])
    with pytest.raises(ValueError, match=words + r".*task=MultiLabel\(\)"):
        list(one.run(1))


def test_labels_below_0_are_left_out_of_the_accuracy() -> None:
    x, y = batch(8)
    ignored = y.clone()
    ignored[:4] = -100
    whole = federation(test=[(x[4:], y[4:])])
    part = federation(test=[(x, ignored)])
    assert [record.evaluation["accuracy"] for record in part.run(1)] == [record.evaluation["accuracy"] for record in whole.run(1)]


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.head = nn.GRU(4, 8, batch_first=True), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.head(self.norm(self.cell(x)[1][0]))  # type: ignore[no-any-return]


def test_packed_sequences_are_inputs() -> None:
    x = pack_padded_sequence(torch.randn(8, 3, 4), torch.tensor([3, 3, 2, 2, 2, 1, 1, 1]), batch_first=True)
    (record,) = federation(Sequence(), clients=[[(x, batch()[1])]]).run(1)
    assert record.clients[0].samples == 8


# networks

class Listed(nn.Module):
    """Calls its layers through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.steps = [self.first, self.norm, nn.ReLU(), self.last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("name", ["gn", "hbn", "fbn", "fedtan", "static-bn"])
def test_layers_in_a_list_of_the_network_are_replaced_too(name: str) -> None:
    model = convert(Listed(), methods.METHODS[name]())
    assert model.steps[1] is model.norm
    assert type(model.norm) is not nn.BatchNorm1d


def test_fedtan_in_a_network_that_calls_a_list_is_the_union_s_step() -> None:
    one = federation(Listed(), methods.fedtan(), clients=[[batch(4)], [batch(12, 1)]])
    model = Listed()
    model.load_state_dict(one.model.state_dict())
    x, y = (torch.cat(parts) for parts in zip(batch(4), batch(12, 1), strict=True))
    optimizer = SGD(model.train().parameters(), RATE)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    list(one.run(1))
    ended = one.model.state_dict()
    assert max(float((ended[name] - p.detach()).abs().max()) for name, p in model.named_parameters()) < 1e-6


def stored(model: Any) -> None:
    model.call = model.norm.forward


def patched(model: Any) -> None:
    model.norm.forward = types.MethodType(lambda layer, x: F.gelu(nn.BatchNorm1d.forward(layer, x)), model.norm)


@pytest.mark.parametrize("name", ["gn", "hbn", "fbn", "fedtan", "static-bn"])
@pytest.mark.parametrize(("change", "words"), [
    (stored, "stores the method forward of layer 'norm'"), (patched, "overrides BatchNorm's forward"),
])  # fmt: skip
def test_what_would_not_follow_the_new_layer_is_refused(change: Any, words: str, name: str) -> None:
    model = Listed()
    change(model)
    with pytest.raises(Unconvertible, match=words):
        convert(model, methods.METHODS[name]())


@pytest.mark.parametrize("name", ["frozen", "then", "observation", "spatial", "refills"])
@pytest.mark.parametrize("method", [methods.hbn(), methods.fixbn(freeze_after=0)], ids=lambda method: method.name)
def test_an_attribute_with_a_name_of_ours_is_refused_or_left_alone(method: Method, name: str) -> None:
    class Named(nn.BatchNorm1d):
        pass

    model = net()
    model[1].__class__ = Named
    setattr(model[1], name, "theirs")
    if method.layer is None and name in ("then", "spatial"):
        assert [record.aggregated for record in federation(model, method).run(1)] == [True]
        return
    with pytest.raises(Unconvertible, match=rf"has an attribute '{name}', a name that fl-bn uses in such a layer: rename the attribute"):
        convert(model, method)


@pytest.mark.parametrize("method", [methods.gn(groups=2), methods.ln()], ids=lambda method: method.name)
def test_a_replaced_layer_keeps_its_hooks(method: Method) -> None:
    model = net()
    model[1].register_forward_hook(lambda layer, x, y: y * 0)
    assert not convert(model, method)[1](torch.randn(8, 8)).any()


class First(nn.Module):
    """Its first parameter has another dtype than the others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.ones((), dtype=dtype)), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.float()) * self.scale.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("method", [methods.fbn(), methods.hbn(), methods.static_bn()], ids=lambda method: method.name)
def test_moments_have_the_dtype_of_their_layer(method: Method, dtype: torch.dtype) -> None:
    mixed, plain = federation(First(dtype), method), federation(First(torch.float32), method)
    ended = [[record.loss for record in one.run(2)] for one in (mixed, plain)]
    assert ended[0] == pytest.approx(ended[1], rel=2e-3)
    assert mixed.model.net[1].running_mean.abs().max() > 0


# before round 1

class Tied(nn.Module):
    """Its decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.encoder(x)).relu(), self.encoder.weight.t())


class Forked(nn.Module):
    """In evaluation mode, another layer uses the output of the layer before BatchNorm, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.last(self.norm(h))
        return y if self.training else y + h[:, :2]


def hooked() -> nn.Module:
    model = net()
    model[0].register_forward_hook(lambda layer, x, y: y + 1.0)
    return model


def with_forward() -> nn.Module:
    model = net()
    model[0].forward = types.MethodType(lambda layer, x: F.linear(x, layer.weight, layer.bias) + x.sum(1, keepdim=True), model[0])  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("make", [Tied, Forked, hooked, with_forward])
def test_weights_are_not_rescaled_where_that_would_change_the_function(make: Callable[[], nn.Module]) -> None:
    assert producers(make()) == {}
    assert producers(net()) == {"1": "0"}  # control
    modes = Forked().train()
    modes.norm.eval()
    producers(modes)
    assert [layer.training for layer in (modes, modes.first, modes.norm)] == [True, True, False]


# optimisers, schedules, losses, arguments

@pytest.mark.parametrize("make", [
    partial(OneCycleLR, max_lr=0.1, total_steps=4), partial(CyclicLR, base_lr=0.01, max_lr=0.1, cycle_momentum=False),
], ids=["one cycle", "cyclic"])  # fmt: skip
def test_a_scheduler_with_rates_of_its_own_is_refused_where_the_rate_changes_between_rounds(make: Any) -> None:
    words = r"The changes of that rate by the argument schedule=\.\.\., and in rounds with frozen statistics, would be lost"
    refused(words, method=methods.fixbn(freeze_after=1), scheduler=make)
    refused(words, schedule=lambda round, rounds: 0.5, scheduler=make)
    assert [record.aggregated for record in federation(scheduler=make).run(1)] == [True]  # control
    half = partial(LambdaLR, lr_lambda=lambda step: 0.5)
    assert [record.aggregated for record in federation(method=methods.fixbn(freeze_after=1), scheduler=half).run(2)] == [True, True]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), None, "1"])
@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn()], ids=lambda method: method.name)
def test_a_schedule_returns_a_number_above_0(method: Method, factor: Any) -> None:
    with pytest.raises(ValueError, match=r"schedule must return a finite number above 0 .*, but for round 1 returned"):
        list(federation(method=method, schedule=lambda round, rounds: factor).run(1))


def test_the_largest_rate_of_all_parameters_decides_about_clipping() -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[3].parameters()}]
    assert rate_of(SGD(groups, lr=0.1)) == 0.1
    assert rate_of(SGD(model.parameters(), lr=torch.tensor(10.0))) == 10.0


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        *((getattr(methods, name)(), {"method": name}) for name in ("fedavg", "fixbn", "fedbn", "hbn", "fbn", "fedtan", "fedtan2")),
        (methods.fixbn(freeze_after=0), {"method": "fixbn", "freeze-after": 0}),
        (methods.fbn(momentum=0.1), {"method": "fbn", "fbn-momentum": 0.1}),
    ],
    ids=lambda one: one.name if isinstance(one, Method) else ",".join(map(str, one.values())),
)
def test_a_federation_clips_where_a_run_config_clips(method: Method, keys: dict[str, Any]) -> None:
    """FixBN that is frozen from the start was clipped in a run config, but not here."""
    wanted = RunConfig.from_mapping(keys).local_training()
    optimizers = {0: SGD(net().parameters(), lr=0.1, momentum=0.9)}
    found = bounded(method, "auto", optimizers, LocalTraining(batch_size=2, epochs=1))[1][0]
    assert (found.clip, found.clip_limit, found.step_clip) == (wanted.clip, wanted.clip_limit, wanted.step_clip)
    assert (found.clip == "round") == (method.name in ("fbn", "hbn") or keys.get("freeze-after") == 0)


def test_a_loss_that_uses_the_network_itself_is_refused() -> None:
    model = net()
    first = model[0].weight
    for loss in (
        lambda output, y: F.cross_entropy(output, y) + sum(p.square().sum() for p in model.parameters()),
        lambda output, y: F.cross_entropy(output, y) + first.square().sum(),
    ):
        refused(r"loss uses '(model|first)', which is the network that was given or a part of it", model=model, loss=loss)


HEAD, LOSSES = nn.Linear(8, 2), types.SimpleNamespace(HEAD=F.cross_entropy)


def test_an_attribute_that_is_called_as_the_network_is_not_the_network() -> None:
    """Before, a loss that calls ``losses.head`` was refused where a global variable ``head`` is the network's last layer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), HEAD)
    federation(model, loss=lambda output, y: LOSSES.HEAD(output, y))
    refused("loss uses 'HEAD', which is the network", model=model, loss=lambda output, y: F.cross_entropy(output, y) + HEAD.weight.sum())


def test_gradient_hooks_are_refused_where_they_would_be_lost() -> None:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    refused(r"parameter 0\.weight has a gradient hook", model=model)
    assert convert(model, methods.fedavg())[0].weight._backward_hooks is None


@pytest.mark.parametrize(("argument", "value"), [
    ("method", "fbn"), ("method", methods.fbn), ("objective", "fedprox"), ("server_optimizer", "fedadam"), ("defence", "krum"),
    ("model", print),
])  # fmt: skip
def test_an_argument_of_another_type_is_said(argument: str, value: Any) -> None:
    refused(rf"{argument} must be an object such as ", **{argument: value})


def test_a_callback_is_an_object() -> None:
    refused(r"callbacks must be objects of subclasses of Callback, but got", callbacks=[print])


@pytest.mark.parametrize(("x", "y", "size", "words"), [
    (torch.zeros(8, 4), torch.zeros(5), 4, r"a target for each input, but got inputs \(8, 4\) and targets \(5,\)"),
    (torch.zeros(8, 4).numpy(), torch.zeros(8), 4, r"takes tensors, but got ndarray and Tensor"),
    (torch.zeros(8, 4), torch.zeros(8), 4.0, r"batch_size must be a whole number of at least 1, but got 4\.0"),
    (torch.zeros(8, 4), torch.zeros(8), 0, r"batch_size must be a whole number of at least 1, but got 0"),
])  # fmt: skip
def test_batches_need_a_target_for_each_input(x: Any, y: Any, size: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SeededBatches(x, y, size)


@pytest.mark.parametrize("loss", [lambda output, y: 0.5, lambda output, y: None, lambda output, y: output.sum(1)])
def test_a_loss_is_one_number(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"the loss of a batch must be one number, .* but it is (0\.5|None|a tensor \(4,\))"):
        list(federation(loss=loss).run(1))


@pytest.mark.parametrize("rounds", [1.5, "2", True, None])
def test_rounds_are_a_whole_number(rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"rounds must be a whole number >= 0, but got run\("):
        list(federation().run(rounds))


def test_workers_are_a_whole_number() -> None:
    refused(r"workers must be 0\.\.", workers=1.5)


def test_a_lazy_layer_is_named() -> None:
    refused(r"0 \(LazyLinear\): a lazy layer has no shape yet: run one batch through the model", model=nn.Sequential(nn.LazyLinear(2)))


class HeadOnly(nn.Module):
    """Offers only the parameters of its head to an optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def parameters(self, recurse: bool = True) -> Any:
        return self.net[3].parameters()


def test_weights_are_centred_whatever_parameters_returns() -> None:
    assert centred_weights(HeadOnly()) == centred_weights(nn.ModuleDict({"net": net()}))
