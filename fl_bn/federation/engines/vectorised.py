"""Compute a cohort's clients in one vectorised program (``torch.func.vmap``).

Results are those of one client after the other, up to the order of sums. Batches of
one step are grouped by size, which is exact for every layer. A client without
further batches stays unchanged. A GPU gains most, a CPU little.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import observe, pooled
from fl_bn.bn.roles import inputs_like
from fl_bn.data.batches import to_input
from fl_bn.exchange.local import Turns
from fl_bn.federation import optimizers
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import Outcome, Result, concluded
from fl_bn.federation.engines.stack import Seen, Stack, groups
from fl_bn.federation.gradients import centring, clip_rows
from fl_bn.federation.local import Samples, measuring
from fl_bn.federation.training import TRAINER, IndexBatches, SampleLoop, Trained, loss_of
from fl_bn.methods import StatisticsReport
from fl_bn.models.head import head_of
from fl_bn.objectives import FedProx, Objective, Start, Step
from fl_bn.task import Task

LOGGER = logging.getLogger("flwr")
T = TypeVar("T")
ENGINES = SEQUENTIAL, VECTORISED = "sequential", "vectorised"
AT_ONCE = 64
"""The most clients that are computed together. More gain little."""
OBJECTIVES = (Objective, FedProx)
"""Objectives for stacked clients: row k of the gradient of all losses is client k's own."""
ELEMENTWISE = (SGD, Adam, optimizers.SGD, optimizers.Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop)
"""Optimisers whose step of a value depends only on it and its own gradients."""
PURE = {"torch", "torchvision", "fl_bn"}
"""The packages whose networks, hooks and losses may run once for all clients together.

They change no attributes of the network (but buffers), draw no random numbers
outside of torch, and compute the same for every size of the batch. Add your own
network's package: ``PURE.add("my_networks")``.
"""


class CannotVectorise(ValueError):
    """Report why clients cannot be computed together. Their rounds are unchanged."""


def client_rounds(rounds: Sequence[LocalRound], loops: Sequence[SampleLoop], device: torch.device | None = None) -> list[Result]:
    """Carry out several clients' rounds together: what ``client_round`` is for one."""
    return [concluded(round, one) for round, one in zip(rounds, outcomes(rounds, loops, device), strict=True)]


def outcomes(rounds: Sequence[LocalRound], loops: Sequence[SampleLoop], device: torch.device | None = None) -> list[Outcome]:
    """Train and measure several clients together: what a ``SampleLoop`` does for one.

    ``device`` is the stack's, by default the models'. Models on the CPU and a GPU's
    stack need the fewest copies.

    Raises:
        CannotVectorise: torch cannot batch the network or the task, for example.
    """
    if reason := _why_not(rounds, [loop.samples for loop in loops], loops[0].task):
        raise CannotVectorise(reason)
    if not rounds[0].trains:
        measure_together(rounds, loops, device)
        return [loop.weighed(round, (), ()) for round, loop in zip(rounds, loops, strict=True)]
    batches = [cast(IndexBatches, loop.batches(round)) for round, loop in zip(rounds, loops, strict=True)]
    if rounds[0].reports is StatisticsReport.PASS:
        measure_together(rounds, loops, device)
    trained = train_together(rounds, batches, loops[0], device)
    return [loop.weighed(round, own, [one]) for round, loop, own, one in zip(rounds, loops, batches, trained, strict=True)]


class Fallback:
    """Warn, once per reason, that ``engine='vectorised'`` computes one by one."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def say(self, reason: CannotVectorise) -> None:
        """Log ``reason`` once."""
        if str(reason) not in self._reasons:
            self._reasons.add(str(reason))
            LOGGER.warning("engine 'vectorised': these clients are computed one by one: %s", reason)


class TogetherTurns(Turns):
    """Run tasks which may each ask to train a client, and train these clients together.

    A task waits until every task waits or has ended. ``fallback`` reports
    obstacles.
    """

    def __init__(self, tasks: int, fallback: Fallback) -> None:
        super().__init__(tasks)
        self._fallback = fallback
        self._asked: dict[int, tuple[LocalRound, SampleLoop]] = {}
        self._results: dict[int, Outcome | Exception | None] = {}

    def all_wait(self) -> list[int]:
        """Train the clients whose tasks wait, and wake these tasks."""
        rounds, loops = zip(*self._asked.values(), strict=True) if self._asked else ((), ())
        results: list[Outcome | Exception | None]
        try:
            if any((one.seed, one.task) != (loops[0].seed, loops[0].task) for one in loops):
                raise CannotVectorise("all clients of a cohort need the same seed and task")
            results = [*outcomes(rounds, loops)] if rounds else []
        except CannotVectorise as reason:
            self._fallback.say(reason)
            results = [None] * len(loops)
        except Exception as error:  # every waiting task raises this error
            results = [error] * len(loops)
        self._results, self._asked = dict(zip(self._asked, results, strict=True)), {}
        return list(self._results)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all tasks, and train the clients for which they ask by ``TRAINER``."""
        return super().run([partial(self._task, index, task) for index, task in enumerate(tasks)])

    def _task(self, index: int, task: Callable[[], T]) -> T:
        TRAINER.set(partial(self._trained, index))  # for the task's own thread
        return task()

    def _trained(self, index: int, loop: SampleLoop, round: LocalRound) -> Outcome:
        """Wait until the client of task ``index`` is trained."""
        if round.trains and len(loop.samples) < round.settings.fewest(2):
            return loop(round)
        self._asked[index] = round, loop
        self.wait(index)
        result = self._results.pop(index)
        if isinstance(result, Exception):
            raise result
        return loop(round) if result is None else result


def _why_not(rounds: Sequence[LocalRound], samples: Sequence[Samples], task: Task) -> str:
    """Return why ``rounds`` cannot be computed together, if known before training."""
    first, settings = rounds[0], rounds[0].settings
    if len({(own.phase, own.network.signature, repr(own.settings)) for own in rounds}) > 1:
        return "all clients of a cohort need the same network, method, phase and settings, but theirs differ"
    kinds = {(own.x.shape[1:], own.x.dtype, own.y.shape[1:], own.y.dtype) for own in samples}
    if len(kinds) > 1:
        return f"the samples of all clients need the same shapes and dtypes, but have {len(kinds)} different combinations"
    modules = [module for _, module in first.model.named_modules(remove_duplicate=False)]
    if len(modules) > len(set(modules)):
        return "the network has a layer under two names"
    if not first.trains:
        return ""
    if (small := min(len(own) for own in samples)) < 2:
        return f"every client needs at least 2 samples, but one has {small}"
    if type(task).read is not Task.read:
        return f"task {task.name} has its own method read, but only Task.read can be batched"
    if type(settings.objective) not in OBJECTIVES:
        names = " or ".join(kind.name for kind in OBJECTIVES)
        return f"objective {settings.objective.name} corrects or repeats each client's own step: only {names} can be batched"
    if settings.maintain != "reset" or settings.update == "gradients":
        return f"maintain-momentum={settings.maintain!r} and update={settings.update!r} are not batched: only 'reset' and 'weights'"
    if settings.precision == "mixed":
        return "precision 'mixed' has no effect here: under torch.func.vmap, torch.autocast leaves operations in float32"
    if foreign := _foreign(first.model, task):
        return (
            f"code of the package {foreign} may do more than compute, and would do it once for all clients: if it only computes, add the "
            "package to fl_bn.federation.engines.vectorised.PURE (docs/how-to/engines.md)"
        )
    drops = [name for name, module in first.model.named_modules() if isinstance(module, _DropoutNd) and module.p > 0]
    return f"dropout ({', '.join(drops)}) would draw other random numbers than if clients were computed one by one" if drops else ""


def _foreign(model: nn.Module, task: Task) -> str:
    """Return the package of a part outside ``PURE``, if any."""
    code: list[Any] = [type(task), vars(task).get("loss")]
    for module in model.modules():
        code += [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
        code += [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), vars(module).get("forward")]
    found = [one.func if isinstance(one, partial) else one for one in code if one is not None]
    packages = (str(getattr(one, "__module__", "")).partition(".")[0] for one in found)
    return next((package for package in packages if package not in PURE), "")


def measure_together(rounds: Sequence[LocalRound], loops: Sequence[SampleLoop], device: torch.device | None = None) -> None:
    """Make the statistics passes of ``rounds``, and store their moments."""
    forward, by_client = loops[0].task.forward, [dict[str, list[Moments]]() for _ in rounds]

    def answer(model: nn.Module, x: Tensor) -> Tensor:
        forward(model, x)
        return x.new_zeros(())

    with ExitStack() as own_first:
        for round, loop in zip(rounds, loops, strict=True):
            own_first.enter_context(round.statistics_pass.own_first(partial(loop.pass_inputs, round), forward))
        iterators = {row: iter(loop.pass_inputs(round)) for row, (round, loop) in enumerate(zip(rounds, loops, strict=True))}
        template = _template(rounds[0], device)
        on = inputs_like(template).device
        with _refused(), torch.no_grad(), measuring(template, rounds[0].statistics_pass.how) as observed:
            stack = Stack([round.model for round in rounds], template)
            while batches := {row: (x,) for row, own in iterators.items() if (x := next(own, None)) is not None}:
                for rows, (x,) in groups(batches):
                    _, seen = stack.run(rows, answer, (x.to(on),), observed)
                    _add(by_client, rows, seen)
    for round, own in zip(rounds, by_client, strict=True):
        round.statistics_pass.moments = {layer: moments.to(inputs_like(round.model).device) for layer, moments in pooled(own).items()}


def train_together(
    rounds: Sequence[LocalRound], batches: Sequence[IndexBatches], loop: SampleLoop, device: torch.device | None = None
) -> list[Trained]:
    """Open and train all ``rounds`` on their ``batches``, as ``training.train`` does for one.

    ``loop`` makes one optimiser of all stacked parameters, for the round with most
    batches.
    """
    with ExitStack() as opened, _refused():
        for round in rounds:
            opened.enter_context(round.open())
        order = sorted(range(len(rounds)), key=lambda place: -len(batches[place]))  # clients that finish first are the last rows
        training = _Training([rounds[place] for place in order], [batches[place] for place in order], loop, device)
        if rounds[0].method.centres(rounds[0].phase):
            opened.enter_context(centring(training.trained, rounds[0].network.centred, stacked=True))
        for _ in range(len(batches[order[0]])):
            training.step()
        losses = training.total.tolist()
    training.write_back()
    counts = [sum(map(len, own.indices)) for own in batches]
    return [Trained(losses[order.index(place)] / max(count, 1), count) for place, count in enumerate(counts)]


class _Training:
    """Train ``rounds`` as a stack, whose first rows have more batches, so are active."""

    def __init__(
        self, rounds: Sequence[LocalRound], batches: Sequence[IndexBatches], loop: SampleLoop, device: torch.device | None
    ) -> None:
        first = self.first = rounds[0]
        self.rounds, self.task, self.settings, self.dtype = rounds, loop.task, first.settings, batches[0].like.dtype
        self.lengths, self.batches, self.number = [len(own) for own in batches], [own.rows() for own in batches], 0
        template = _template(first, device)
        first.set_modes(template)
        self.stack = Stack([round.model for round in rounds], template)
        self.trained = {name: self.stack.parameters[name] for name in first.parameters}
        rate, self.like = first.instruction.learning_rate, inputs_like(template)
        self.optimizer = loop.optimizer(first)
        stacked = {id(own): self.trained[name] for name, own in first.parameters.items()}
        for group in self.optimizer.param_groups:  # the optimiser was made for one client's parameters, so that groups by shape are right
            group["params"] = [stacked[id(own)] for own in group["params"]]
        if type(self.optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise CannotVectorise(
                f"optimizer {type(self.optimizer).__name__} may mix the numbers of several clients, since it is none of {names}"
            )
        self.scheduler = loop.scheduler(self.optimizer)
        self.objective = self.settings.objective.begin(Start(template, self.trained, first.shared))
        head = head_of(template)
        self.head = [p for name, p in self.trained.items() if head and name.rpartition(".")[0] == head[0]]
        self.clip, limit = self.settings.clip, self.settings.clip_limit
        limits = [limit] * len(rounds)
        if self.clip == "round":
            limits = [self.settings.norm_in_round(rate, steps) for steps in self.lengths]
        self.limits = torch.tensor(limits, dtype=self.like.dtype, device=self.like.device)
        self.total = torch.zeros(len(rounds), dtype=torch.float64, device=self.like.device)
        self.seen = [dict[str, list[Moments]]() for _ in rounds]
        self.done: list[tuple[list[int], dict[str, Tensor]]] = []

    def step(self) -> None:
        """Make one local step of every client that has a batch left."""
        now = {row: next(self.batches[row]) for row, length in enumerate(self.lengths) if self.number < length}
        if self.number == 0:
            self.first_batches = {row: len(y) for row, (_, y) in now.items()}
        self.optimizer.zero_grad()
        forward = partial(self._forward, now)
        self.objective.gradient(Step(torch.empty(0), forward, forward))
        if self.clip != "none":
            clip_rows(self.trained.values(), self.clip, self.limits, self.head)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.number += 1
        if finished := [row for row, length in enumerate(self.lengths) if length == self.number]:
            self._leave(finished)

    def _forward(self, now: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Return the sum of losses, whose gradient's row k is that of client k's loss."""
        losses = []
        for rows, (x, y) in groups(now):
            x, y = to_input(x.to(self.like.device), self.dtype), y.to(self.like.device)
            answer = partial(loss_of, task=self.task, settings=self.settings)
            with self._observing() as observed:
                loss_k, seen = self.stack.run(rows, lambda model, x, y, answer=answer: answer(model, x=x, y=y), (x, y), observed)
            _add(self.seen, rows, seen)
            self.total[rows] += loss_k.detach().double() * y.shape[1]
            losses.append(loss_k.sum())
        return torch.stack(losses).sum()

    @contextmanager
    def _observing(self) -> Iterator[dict[str, list[Moments]]]:
        """Record moments by layer in the block, if the method reports this step's."""
        reports = self.first.reports
        if reports in (StatisticsReport.BATCHES, StatisticsReport.MOVING) or (reports is StatisticsReport.FIRST and self.number == 0):
            with observe(self.stack.template, counts=lambda layer, x: layer.training) as observed:
                yield observed
        else:
            yield {}

    def _leave(self, rows: list[int]) -> None:
        """Store finished clients' tensors, before the next step changes them."""
        device, every = inputs_like(self.first.model).device, {**self.stack.parameters, **self.stack.buffers}
        tensors = {name: (stack if len(rows) == len(stack) else stack[rows]).detach().to(device) for name, stack in every.items()}
        self.done.append((rows, tensors))

    @torch.no_grad()
    def write_back(self) -> None:
        device = inputs_like(self.first.model).device
        for rows, tensors in self.done:
            for place, row in enumerate(rows):
                round = self.rounds[row]
                for name, own in (*round.model.named_parameters(), *round.model.named_buffers()):
                    own.copy_(tensors[name][place])
                seen = {layer: [moments.to(device) for moments in parts] for layer, parts in self.seen[row].items()}
                round.adopt(self.lengths[row], seen, self.first_batches[row])


def _template(round: LocalRound, device: torch.device | None) -> nn.Module:
    return copied(round.model).to(device or inputs_like(round.model).device)


def _add(by_client: Sequence[dict[str, list[Moments]]], rows: Sequence[int], seen: Seen) -> None:
    for layer, parts in seen.items():
        for row, moments in zip(rows, parts, strict=True):
            by_client[row].setdefault(layer, []).extend(moments)


@contextmanager
def _refused() -> Iterator[None]:
    """Raise CannotVectorise for any error: one by one, user code raises its own."""
    try:
        yield
    except CannotVectorise:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise CannotVectorise(f"torch cannot batch this network or task over clients ({type(error).__name__}: {line})") from error
