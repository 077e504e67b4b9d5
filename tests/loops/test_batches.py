"""What a method reports of a training batch is reported once, whatever else the loop computes; and FedTAN weighs what was really drawn."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint

from fl_bn import convert, methods, unrecorded
from fl_bn.methods import Method
from tests.doors.doors import apart
from tests.loops.loops import DOORS, RATE, ContractBroken, cells, clients, door_2, net, opened, plain, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of torch.compile, about its own
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # of torch's BatchNorm, too
]
OTHER = torch.randn(7, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def validation(round: Any, x: Tensor, y: Tensor) -> None:
    round.model.eval()
    round.model(OTHER)
    round.model.train()
    plain(round, x, y)


def training_accuracy(round: Any, x: Tensor, y: Tensor) -> None:
    """In training mode, where torch's BatchNorm moves its running statistics, and without gradients."""
    with torch.no_grad():
        round.model(OTHER)
    plain(round, x, y)


def an_average_of_the_weights(round: Any, x: Tensor, y: Tensor) -> None:
    copied = copy.deepcopy(round.model)
    copied(OTHER).sum().backward()
    step(round.model, round.model, x, y)
    copied(OTHER)
    pickle.loads(pickle.dumps(round.model))(OTHER)


def a_swa_model(round: Any, x: Tensor, y: Tensor) -> None:
    average = torch.optim.swa_utils.AveragedModel(round.model)
    average(OTHER)
    plain(round, x, y)
    average.update_parameters(round.model)


def checkpointed(round: Any, x: Tensor, y: Tensor) -> None:
    step(lambda x: checkpoint(round.model, x, use_reentrant=False), round.model, x, y)


def reentrant(round: Any, x: Tensor, y: Tensor) -> None:
    step(lambda x: checkpoint(round.model, x.clone().requires_grad_(), use_reentrant=True), round.model, x, y)


def partly_checkpointed(round: Any, x: Tensor, y: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = round.model[3:](checkpoint(round.model[:3], x, use_reentrant=False))
        return out

    step(forward, round.model, x, y)


def closure(round: Any, x: Tensor, y: Tensor) -> None:
    """Of an optimiser that evaluates it twice: what the gradient is at first leads the step."""
    optimizer = torch.optim.SGD(round.model.parameters(), RATE)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(round.model(x), y)
        loss.backward()
        return loss

    evaluate()
    with unrecorded(round.model):
        optimizer.step(evaluate)


def a_skipped_step(round: Any, x: Tensor, y: Tensor) -> None:
    """As where a GradScaler finds an overflow: the batch never led to a step."""
    with unrecorded(round.model):
        F.cross_entropy(round.model(OTHER), torch.zeros(len(OTHER), dtype=torch.int64)).backward()
    round.model.zero_grad()
    plain(round, x, y)


def data_parallel(round: Any, x: Tensor, y: Tensor) -> None:
    step(DataParallel(round.model), round.model, x, y)


def compiled(round: Any, x: Tensor, y: Tensor) -> None:
    step(torch.compile(round.model, backend="eager"), round.model, x, y)


def part_by_part(round: Any, x: Tensor, y: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        for part in round.model:
            x = part(x)
        return x

    step(forward, round.model, x, y)


def by_hand(round: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(round.model(x), y).backward()
    with torch.no_grad():
        for parameter in round.model.parameters():
            parameter -= RATE * parameter.grad
    getattr(round, "local", round).step_done()


def two_optimizers(round: Any, x: Tensor, y: Tensor) -> None:
    """Of the backbone and of the head; the second one's step is no further step of the weights."""
    optimizers = [torch.optim.SGD(part.parameters(), RATE) for part in (round.model[:3], round.model[3:])]
    F.cross_entropy(round.model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()


def in_the_backward_pass(round: Any, x: Tensor, y: Tensor) -> None:
    """An optimiser of each parameter, which steps as soon as autograd has the gradient."""
    optimizers = {p: torch.optim.SGD([p], RATE) for p in round.model.parameters()}

    def step_now(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step_now) for p in optimizers]  # type: ignore[arg-type]
    F.cross_entropy(round.model(x), y).backward()
    for handle in handles:
        handle.remove()


def compiled_as_one_graph(round: Any, x: Tensor, y: Tensor) -> None:
    torch._dynamo.reset()  # else what other tests compiled counts
    step(torch.compile(round.model, backend="eager", fullgraph=True), round.model, x, y)


def traced(round: Any, x: Tensor, y: Tensor) -> None:
    """As TensorBoard's ``add_graph`` does, with another batch."""
    statistics = {name: buffer.clone() for name, buffer in round.model.named_buffers()}
    torch.jit.trace(round.model, OTHER, check_trace=False)
    for name, buffer in round.model.named_buffers():
        buffer.copy_(statistics[name])
    plain(round, x, y)


def a_step_before(round: Any, x: Tensor, y: Tensor) -> None:
    """As to quieten a scheduler's warning: without gradients it moves nothing."""
    torch.optim.SGD(round.model.parameters(), RATE, momentum=0.9, weight_decay=0.1).step()
    plain(round, x, y)


LOOPS: list[Callable[..., None]] = [
    validation, training_accuracy, an_average_of_the_weights, a_swa_model, checkpointed, reentrant, partly_checkpointed,
    closure, a_skipped_step, data_parallel, compiled, part_by_part, by_hand, two_optimizers, in_the_backward_pass, a_step_before,
    compiled_as_one_graph, traced,
]  # fmt: skip
METHODS: dict[str, Method] = {
    "fbn": methods.fbn(),
    "fbn, all batches": methods.fbn(report="all"),
    "hbn": methods.hbn(),
    "fixbn": methods.fixbn(freeze_after=0),
    "fedtan": methods.fedtan(),
}


@cache
def plainly(method: str, door: str) -> list[dict[str, Tensor]]:
    """The same federation around the plain loop."""
    return DOORS[door](net(), METHODS[method], clients(), plain)


@pytest.mark.sample("[fbn-v", "[fbn-c", "[fbn-a_sk", "[hbn-clo")
@pytest.mark.parametrize(("method", "loop", "door"), cells(METHODS, LOOPS, validation))
def test_what_is_reported_is_that_of_the_batch(method: str, loop: Any, door: str) -> None:
    made = METHODS[method]
    if made.exchanges and loop is training_accuracy:
        return  # its layers move their running statistics in such a pass, as torch's do
    said = "fullgraph" if loop is compiled_as_one_graph and (made.exchanges or made.name == "fbn") else ""
    said = "use_reentrant|one batch|layer-wise" if made.exchanges and loop in (reentrant, closure) else said
    if said:
        said += "|usable|failed"  # as a Flower app has it
        with pytest.raises(Exception, match=said):
            DOORS[door](net(), METHODS[method], clients(), loop)
        return
    assert apart(DOORS[door](net(), METHODS[method], clients(), loop), plainly(method, door)) < 1e-12


@pytest.mark.sample("[fixbn]")
@pytest.mark.parametrize("method", [methods.fedavg(), methods.fixbn(freeze_after=0), methods.fedbn()], ids=lambda method: method.name)
def test_a_round_of_many_steps_is_compiled_twice(method: Method) -> None:
    """For the first batch, and for the others."""
    (x, y), graphs = clients()[0], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with opened(method) as round:
        model = torch.compile(round.model, backend=backend, fullgraph=True)
        for _ in range(12):
            step(model, round.model, x, y)
    assert round.steps == 12
    assert 1 <= len(graphs) <= 2


@pytest.mark.parametrize(
    "method", [methods.fedavg(), methods.fixbn(freeze_after=0), methods.fbn(), methods.hbn()], ids=lambda method: method.name
)
def test_a_gradient_penalty_is_plain_pytorch_s(method: Method) -> None:
    """Of other methods, before centring."""
    (x, y), method = clients()[0], replace(method, centre=False)
    model = convert(net(), method)
    with opened(method, model) as round:
        if method.name == "hbn":
            round.measure([(x, y)])
        ours = gradients(model, x, y)
        torch.optim.SGD(model.parameters(), RATE).step()
    plain_net = net().train(method.name == "fedavg")
    want = gradients(plain_net, x, y)
    apart = max(float((ours[name] - want[name]).abs().max()) for name in want)
    assert apart < 1e-12 if method.name != "hbn" else apart > 1e-6  # control: HBN mixes


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    inputs = x.clone().requires_grad_()
    loss = F.cross_entropy(model(inputs), y)
    (loss + torch.autograd.grad(loss, inputs, create_graph=True)[0].square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_a_network_compiled_before_the_round() -> None:
    for method, count in ((methods.fbn(), 16), (methods.fedavg(), 0)):
        model = convert(net(), method)
        c = torch.compile(model, backend="eager")
        x, y = clients()[0]
        c(x)
        with opened(method, model) as round:
            step(c, model, x, y)
        reply, _ = round.reply(16)
        assert int(reply.sections.get("moments", {}).get("1.count", 0)) == count
        assert reply.steps == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("loop", [plain, *LOOPS], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn(), methods.fbn(report="all")], ids=["fedavg", "fbn", "fbn, all batches"])
def test_a_batch_is_one_step(method: Method, loop: Any) -> None:
    """Also where the loop goes on: the second batch of a round is its second step."""
    if loop is compiled_as_one_graph and method.name == "fbn":
        return
    x, y = clients()[0]
    with opened(method) as round:
        for done in (1, 2):
            round.model.zero_grad()
            loop(round, x, y)
            assert round.steps == done
    assert round.reply(16)[0].steps == 2


def test_optimizers_that_take_turns_make_a_step_each() -> None:
    """Control: a batch came in between."""
    x, y = clients()[0]
    method = methods.fbn(report="all")
    with opened(method) as round:
        for part in (round.model[:3], round.model[3:]):
            step(round.model, part, x, y)
    assert round.steps == 2


class Random(torch.optim.Optimizer):
    """Steps without gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter + self.param_groups[0]["lr"]


def test_a_step_without_gradients_is_said() -> None:
    with pytest.raises(ContractBroken, match="step_done") as caught, opened(methods.fedavg()) as round:
        Random(round.model.parameters()).step()
    assert (caught.value.rule, caught.value.name) == ("steps", "0.weight")
    with opened(methods.fedavg()) as round:
        Random(round.model.parameters()).step()
        round.step_done()
    assert round.steps == 1


class Named(nn.Module):
    """Takes its inputs in ``form``, and normalises all of them at once."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.body = form, net()

    def forward(self, batch: Any) -> Tensor:
        if self.form == "dict":
            batch = batch["image"]
        if self.form == "list":
            batch = torch.stack(batch)
        if self.form == "over time":
            return self.body(batch.flatten(0, 1)).view(len(batch), 2, -1).mean(1)  # type: ignore[no-any-return]
        out: Tensor = self.body(batch)
        return out


def formed(form: str, x: Tensor) -> Any:
    if form == "dict":
        return {"mask": torch.ones(3), "image": x}
    if form == "list":
        return list(x)
    return torch.stack([x, x + 1], 1) if form == "over time" else x


def centralised(form: str) -> dict[str, Tensor]:
    """One step of plain PyTorch on the union of the clients' batches."""
    model, data = Named(form).double().train(), clients()
    step(model, model, formed(form, torch.cat([x for x, _ in data])), torch.cat([y for _, y in data]))
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def saying(round: Any, x: Any, y: Tensor) -> None:
    getattr(round, "local", round).batch(len(y))
    plain(round, x, y)


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("form", "loop"), [("tensor", plain), ("dict", plain), ("list", plain), ("over time", saying), ("dict", saying)])
def test_fedtan_s_step_is_the_union_s_in_any_form_of_inputs(form: str, loop: Any, door: str) -> None:
    data = [(formed(form, x), y) for x, y in clients()]
    (found,) = DOORS[door](Named(form), methods.fedtan(), data, loop, 1)
    want = centralised(form)
    assert max(float((found[name] - want[name]).abs().max()) for name in want) < 1e-12
    (wrong,) = door_2(Named(form), methods.fedavg(), data, plain, 1)  # control: FedAvg is not that step
    assert not max(float((wrong[name] - want[name]).abs().max()) for name in want) < 1e-3
