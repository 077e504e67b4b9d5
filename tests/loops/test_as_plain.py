"""Loops that compute what a plain loop computes: whatever else they run, a batch is reported once, and is one step."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import methods, unrecorded
from fl_bn.methods import Method, freeze
from tests.doors.doors import LOOPS as DOORS
from tests.doors.doors import RATE, Rounds, apart
from tests.loops.loops import Step, clients, each, net, plain, step
from tests.networks import Wired

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of torch.compile, about its own
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.jit, and of Lightning's use of torch's trees
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # of torch's BatchNorm, too
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of trainers, about machines, loggers and workers
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


def a_swa_model(round: Any, x: Tensor, y: Tensor) -> None:
    average = torch.optim.swa_utils.AveragedModel(round.model)
    average(OTHER)
    pickle.loads(pickle.dumps(round.model))(OTHER)  # nor does a copy in a file
    plain(round, x, y)
    average.update_parameters(round.model)


def a_skipped_step(round: Any, x: Tensor, y: Tensor) -> None:
    """As where a GradScaler finds an overflow: the batch never led to a step."""
    with unrecorded(round.model):
        F.cross_entropy(round.model(OTHER), torch.zeros(len(OTHER), dtype=torch.int64)).backward()
    round.model.zero_grad()
    plain(round, x, y)


def a_look_midway(round: Any, x: Tensor, y: Tensor) -> None:
    def looked(x: Tensor) -> Tensor:
        scores = round.model(x)
        with torch.no_grad(), unrecorded(round.model):
            round.model(OTHER)
        return scores  # type: ignore[no-any-return]

    step(looked, round.model, x, y)


def checkpointed(round: Any, x: Tensor, y: Tensor) -> None:
    step(lambda x: round.model[3:](checkpoint(round.model[:3], x, use_reentrant=False)), round.model, x, y)


def reentrant(round: Any, x: Tensor, y: Tensor) -> None:
    step(lambda x: round.model[3:](checkpoint(round.model[:3], x.clone().requires_grad_(), use_reentrant=True)), round.model, x, y)


def data_parallel(round: Any, x: Tensor, y: Tensor) -> None:
    step(DataParallel(round.model), round.model, x, y)


def compiled(round: Any, x: Tensor, y: Tensor) -> None:
    step(torch.compile(round.model, backend="eager"), round.model, x, y)


def compiled_as_one_graph(round: Any, x: Tensor, y: Tensor) -> None:
    torch._dynamo.reset()  # else what other tests compiled counts
    step(torch.compile(round.model, backend="eager", fullgraph=True), round.model, x, y)


def moved_to_a_device(round: Any, x: Tensor, y: Tensor) -> None:
    """``model.to(device)`` puts new tensors in the place of buffers."""
    round.model._apply(torch.clone)
    plain(round, x, y)


def by_hand(round: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(round.model(x), y).backward()
    with torch.no_grad():
        for parameter in round.model.parameters():
            parameter -= RATE * parameter.grad
    round.step_done()


def two_optimizers(round: Any, x: Tensor, y: Tensor) -> None:
    """Of the backbone and of the head; the second one's step is no further step of the weights."""
    optimizers = [SGD(part.parameters(), RATE) for part in (round.model[:3], round.model[3:])]
    F.cross_entropy(round.model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()


class Around(torch.optim.Optimizer):
    """An optimiser that wraps another and calls its ``step``, as implementations of SAM and Lookahead do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.base = SGD(self.param_groups, RATE)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base.step()


def an_optimizer_around_another(round: Any, x: Tensor, y: Tensor) -> None:
    optimizer = Around(round.model.parameters())
    F.cross_entropy(round.model(x), y).backward()
    optimizer.step()


def lightning(round: Any, x: Tensor, y: Tensor) -> None:
    """With a validation after the epoch and one before it, as the Trainer does by default."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SGD(self.parameters(), RATE)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(Module(round.model), loader(x, y), loader(x + 3, y))


def loader(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=len(x))


def accelerate(round: Any, x: Tensor, y: Tensor) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(round.model, SGD(round.model.parameters(), RATE), loader(x, y))
    model.train()
    for inputs, targets in batches:
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(x + 3)


def distributed(round: Any, x: Tensor, y: Tensor) -> None:
    """DistributedDataParallel, as ``torchrun`` starts it, with one process."""
    from torch import distributed as dist

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}-store", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(round.model)
            step(model, model, x, y)
        finally:
            dist.destroy_process_group()


def train(round: Any, x: Tensor, y: Tensor) -> None:
    round.model.train()
    plain(round, x, y)


def by_attribute(round: Any, x: Tensor, y: Tensor) -> None:
    for module in round.model.modules():
        module.training = True
    plain(round, x, y)


USUAL: dict[str, Method] = {
    "fedavg": methods.fedavg(),
    "fbn": methods.fbn(),
    "fbn, all batches": methods.fbn(report="all"),
    "hbn": methods.hbn(),
    "fixbn": methods.fixbn(freeze_after=0),
    "fedtan": methods.fedtan(),
}
FROZEN: dict[str, Method] = {  # from round 2 on
    "fixbn, frozen": methods.fixbn(freeze_after=1),
    "fixbn, both frozen": methods.fixbn(freeze_after=1, freeze_what="both"),
    "fedtan2, frozen": methods.fedtan2(freeze_after=1),
    **{f"{name}, frozen": freeze(USUAL[name], 1) for name in ("fedavg", "fbn", "hbn")},
}
METHODS = {**USUAL, **FROZEN}
PASSES: list[Step] = [validation, training_accuracy, a_swa_model, a_skipped_step, a_look_midway]
RUNS: list[Step] = [checkpointed, reentrant, data_parallel, compiled, compiled_as_one_graph, moved_to_a_device]
STEPS: list[Step] = [by_hand, two_optimizers, an_optimizer_around_another]
TRAINERS: list[Step] = [lightning, accelerate, distributed]
MODES: list[Step] = [train, by_attribute]
MOVES_STATISTICS = (training_accuracy, a_look_midway, checkpointed, reentrant)
"""Loops in which torch's own layers move their running statistics once more, as in plain torch."""


def cells() -> list[Any]:
    """Return every case. In the Flower app, all loops but two are slow tests, and so are those of trainers."""
    loops = {**dict.fromkeys(USUAL, [*PASSES, *RUNS, *STEPS, *TRAINERS]), **dict.fromkeys(FROZEN, [*MODES, compiled])}
    return [
        pytest.param(method, loop, door, id=f"{method}-{loop.__name__}-{door}", marks=[pytest.mark.slow] if slow else [])
        for method, chosen in loops.items()
        for loop in chosen
        for door in DOORS
        for slow in [loop in TRAINERS or (door == "flower" and loop not in (validation, train))]
    ]


def run(method: str, loop: Step, door: str) -> Rounds:
    """Train a federation whose clients have two batches each."""
    halves = [[*zip(x.chunk(2), y.chunk(2), strict=True)] for x, y in clients()]
    return DOORS[door](net(), METHODS[method], halves, 3 if method in FROZEN else 2, loop=each(loop))


@cache
def plainly(method: str, door: str) -> Rounds:
    return run(method, plain, door)


def refusal(method: Method, loop: Step) -> str:
    """Return a part of the error where the contract promises nothing; in a Flower app, the client's error ends the run."""
    if loop is compiled_as_one_graph and (method.exchanges or method.name == "fbn"):
        return "fullgraph|usable|failed"
    return "use_reentrant|usable|failed" if method.exchanges and loop is reentrant else ""


@pytest.mark.sample(
    "[fbn-v", "[fbn-c", "[fedtan-checkpointed-own", "[fbn-a", "[fedavg-", "n-train-own", "n-train-flower", "[hbn, frozen-train"
)
@pytest.mark.parametrize(("method", "loop", "door"), cells())
def test_it_computes_what_a_plain_loop_computes(method: str, loop: Step, door: str) -> None:
    made = METHODS[method]
    if loop in MOVES_STATISTICS and (made.layer is None or (made.exchanges and loop is training_accuracy)):
        return
    if loop is distributed and made.exchanges:
        return  # its clients take turns in this process, which has one process group
    if said := refusal(made, loop):
        with pytest.raises(Exception, match=said):
            run(method, loop, door)
        return
    ours, right = run(method, loop, door), plainly(method, door)
    if made.exchanges and loop in MOVES_STATISTICS:  # as torch's, after the first step: they count in evaluations alone
        ours, right = ([{k: v for k, v in one.items() if "running" not in k} for one in rounds] for rounds in (ours, right))
    assert apart(ours, right) <= (0 if loop in MODES else 1e-12)


def formed(form: str) -> Wired:
    """A network that takes its inputs in a form, and normalises all of them at once."""
    return Wired(lambda parts, batch: FORMS[form][1](parts.body, batch), body=net())


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[nn.Module, Any], Any]]] = {
    "dict": (lambda x: {"mask": torch.ones(3), "image": x}, lambda body, batch: body(batch["image"])),
    "list": (list, lambda body, batch: body(torch.stack(batch))),
    "over time": (lambda x: torch.stack([x, x + 1], 1), lambda body, batch: body(batch.flatten(0, 1)).view(len(batch), 2, -1).mean(1)),
}


def saying(round: Any, x: Any, y: Tensor) -> None:
    round.batch(len(y))
    plain(round, x, y)


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("form", "loop"), [("dict", plain), ("list", plain), ("over time", saying)])
def test_fedtan_s_step_is_the_union_s_in_any_form_of_inputs(form: str, loop: Step, door: str) -> None:
    make = FORMS[form][0]
    data, union = [[(make(x), y)] for x, y in clients()], formed(form).train()
    x, y = (torch.cat(parts) for parts in zip(*clients(), strict=True))
    step(union, union, make(x), y)
    want = {name: tensor for name, tensor in union.state_dict().items() if tensor.is_floating_point()}
    for method, is_union in ((methods.fedtan(), True), (methods.fedavg(), False)):  # control: FedAvg's is not that step
        (found,) = DOORS[door](formed(form), method, data, 1, loop=each(loop if is_union else plain))
        assert (apart([{name: found[name] for name in want}], [want]) < 1e-12) == is_union
