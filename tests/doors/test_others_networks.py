"""Networks, layers, targets and objectives as others write them, in ``Federation``: the numbers of plain PyTorch, or one sentence."""

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
from torch.nn.parallel import DataParallel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD

from fl_bn import Classification, Federation, convert, methods, set_buffer_roles
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import Moon
from fl_bn.task import batch_size
from tests.conformance.cases import every_method
from tests.doors.doors import apart
from tests.doors.inner import RunConfig, Unconvertible
from tests.listed import listed
from tests.refusals import naming

RATE = 0.1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batch(samples: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=made) + seed, torch.randint(0, 2, (samples,), generator=made)


def federation(model: nn.Module | None = None, method: Any = None, clients: Any = None, **options: Any) -> Federation:
    own = clients or [[batch(4)], [batch(64, 1)]]
    made: dict[str, Any] = {"optimizer": partial(SGD, lr=RATE), "workers": 1} | options
    return Federation(model or net(), method or methods.fedavg(), own, **made)


def losses(made: Federation, rounds: int = 2) -> list[float]:
    return [record.loss for record in made.run(rounds)]


# Targets

Pair = namedtuple("Pair", "first second")
FORMS: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda y: (y,), lambda y: y[0]),
    (lambda y: {"a": y, "b": y}, lambda y: y["b"]),
    (lambda y: Pair(y, y), lambda y: y.second),
    (list, torch.stack),
]


@listed(("make", "read"), FORMS, ids=["tuple", "dict", "named tuple", "list of samples"])
def test_a_client_weighs_its_samples_whatever_form_the_targets_have(make: Any, read: Any) -> None:
    clients = [[(x, make(y))] for x, y in (batch(4), batch(64, 1))]
    formed = federation(clients=clients, loss=lambda output, y: F.cross_entropy(output, read(y)))
    usual = federation(loss=F.cross_entropy)
    (mine,), (theirs,) = formed.run(1), usual.run(1)
    assert [client.samples for client in mine.clients] == [4, 64]
    assert mine.loss == theirs.loss
    assert apart([formed.model.state_dict()], [usual.model.state_dict()]) == 0


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


@listed("targets", [torch.rand(8, 2), torch.rand(8), torch.ones(8, 3, dtype=torch.int64)])
def test_targets_that_classification_cannot_evaluate_are_said(targets: Tensor) -> None:
    given = [(batch()[0], targets)]
    with naming(str(tuple(targets.shape))):
        list(federation(clients=[given], loss=lambda output, y: output.square().mean(), test=given).run(1))


def test_labels_below_0_are_left_out_of_the_accuracy() -> None:
    x, y = batch(8)
    (whole,), (part,) = (federation(test=[test]).run(1) for test in ((x[4:], y[4:]), (x, y.clone().index_fill_(0, torch.arange(4), -100))))
    assert part.evaluation["accuracy"] == whole.evaluation["accuracy"]


# Layers that a method replaces


class Listed(nn.Module):
    """Calls its layers through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.steps = [self.first, self.norm, nn.ReLU(), self.last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def patched(model: Any) -> None:
    model.norm.forward = types.MethodType(lambda layer, x: F.gelu(nn.BatchNorm1d.forward(layer, x)), model.norm)


def named(model: Any, name: str = "then") -> None:
    model.norm.__class__ = type("Named", (nn.BatchNorm1d,), {})
    setattr(model.norm, name, "theirs")


@listed("change", [patched, *(partial(named, name=name) for name in ("then", "frozen", "observation"))])
@listed("name", [name for name, make in METHODS.items() if make().layer and make().has_statistics and not make().local_in])
def test_what_would_not_follow_the_new_layer_is_refused(change: Any, name: str) -> None:
    model = Listed()
    change(model)
    with naming("norm", Unconvertible):
        convert(model, METHODS[name]())
    assert convert(Listed(), METHODS[name]()).norm.training  # control
    if change is patched:
        convert(model, methods.fedavg())  # control: no layer is replaced


def test_a_replaced_layer_keeps_its_hooks() -> None:
    model = net()
    model[1].register_forward_hook(lambda layer, x, y: y * 0)
    assert not convert(model, methods.gn(groups=2))[1](torch.randn(8, 8)).any()


# The unit scale


class Forked(Listed):
    """In evaluation mode, another layer uses the output of the layer before BatchNorm, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(self.norm(h))
        return y if self.training else y + h[:, :2]


def hooked() -> nn.Module:
    model = net()
    model[0].register_forward_hook(lambda layer, x, y: y + 1.0)
    return model


@listed("make", [net, Forked, hooked])
def test_weights_are_not_rescaled_where_that_would_change_the_function(make: Callable[[], nn.Module]) -> None:
    """The control is a plain network, which is rescaled."""
    still = federation(make(), methods.fbn(), unit_scale=True, optimizer=partial(SGD, lr=1e-9))
    list(still.run(1))
    before = dict(make().named_parameters())
    same = [torch.allclose(p, before[name], atol=1e-6) for name, p in still.model.named_parameters()]
    assert all(same) is (make is not net)


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "compiled": lambda network: torch.compile(network, backend="eager"),  # type: ignore[dict-item,return-value]
    "a compiled part": lambda network: nn.Sequential(torch.compile(network[:2], backend="eager"), network[2:]),  # type: ignore[arg-type]
    "DataParallel": DataParallel,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_changes_no_number(wrapper: str) -> None:
    """The network is brought to unit scale, which counts here (control)."""

    def trained(network: nn.Module, **options: Any) -> list[float]:
        return losses(federation(network.double(), methods.fbn(), [[(batch(16)[0].double() * 3 + 5, batch(16)[1])]] * 2, **options), 3)

    assert trained(WRAPPERS[wrapper](net())) == pytest.approx(trained(net()), rel=1e-12)
    assert trained(net(), unit_scale=False) != pytest.approx(trained(net()))


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
    made = federation(method=method, optimizer=partial(SGD, lr=RATE, momentum=0.9))
    found, wanted = made._transport.clients.own[0].settings, RunConfig.from_mapping(keys).local_training()
    assert (found.clip, found.clip_limit, found.step_clip) == (wanted.clip, wanted.clip_limit, wanted.step_clip)


# Layers that change while they run


class Grows(nn.Module):
    """Makes its layer when it first sees the number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], 8)
        out: Tensor = self.layer(x)
        return out


class Masked(nn.Module):
    """Has buffers whose entries share memory, as masks and anchors often do."""

    def __init__(self, dtype: torch.dtype, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(8).to(dtype).expand(2, 8), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("rows")[0]


class Bank(nn.Module):
    """Remembers all features that it has seen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bank = torch.cat([self.get_buffer("bank"), x.detach().to(self.get_buffer("bank").dtype)])
        return x


def around(layer: nn.Module, **role: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), layer, nn.Linear(8, 2))
    return set_buffer_roles(model, {f"2.{name}": value for name, value in role.items()})


@every_method
def test_a_layer_that_the_first_forward_pass_makes_is_refused_by_name(method_name: str) -> None:
    if method_name not in ("in", "fedwon"):  # which take no network of linear layers
        with naming("2.layer", (ValueError, KeyError)):  # type: ignore[arg-type]
            list(federation(around(Grows()), METHODS[method_name](), test=[batch(4)]).run(2))


@listed("persistent", [True, False])
@listed("dtype", [torch.float32, torch.int64, torch.bool])
def test_buffers_whose_entries_share_memory(dtype: torch.dtype, persistent: bool) -> None:
    model = around(Masked(dtype, persistent))
    fed = federation(model, methods.fbn(), test=[batch(4)])
    list(fed.run(2))
    assert torch.equal(fed.model[2].rows, model[2].get_buffer("rows"))
    assert model[2].get_buffer("rows").stride(0) == 0  # the user's own stays as it is


@listed(("method", "dtype", "role"), [("fedavg", torch.float32, "shared"), ("fedbn", torch.float32, "kept"), ("fedbn", torch.int64, "")])
def test_buffers_that_grow_are_named_at_the_client(method: str, dtype: torch.dtype, role: str) -> None:
    with naming("2.bank"):
        list(federation(around(Bank(dtype), **({"bank": role} if role else {})), METHODS[method]()).run(2))


# Objectives


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, age: Tensor) -> Tensor:
        return self.net(x + age)  # type: ignore[no-any-return]


class Third(Classification):
    """Calls the network in a way of its own, and names the argument of ``forward`` otherwise."""

    def read(self, batch: Any) -> tuple[Any, Any]:
        return batch[:2], batch[2]

    def forward(self, model: nn.Module, given: Any) -> Any:
        return model(given[0], age=given[1])


def test_moon_calls_networks_of_several_inputs_as_the_task_does() -> None:
    """In round 2, too, when a client first has a model of its own."""
    (x, y), age = batch(8), torch.linspace(-1, 1, 8)[:, None]
    forms: list[Any] = [({"x": x, "age": age, "label": y}, {}), (((x, age), y), {}), ((x, age, y), {"task": Third()})]
    found = [losses(federation(TwoInputs(), clients=[[form] * 2, [form]], objective=Moon(), **task), 3) for form, task in forms]
    plain = federation(TwoInputs(), clients=[[forms[0][0]] * 2, [forms[0][0]]])
    assert found[0] == found[1] == found[2] != losses(plain, 3)
