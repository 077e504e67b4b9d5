"""A whole federation in this process, in plain torch: no Flower, no config, no files unless asked for."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.data.batches import draw_batches
from fl_bn.exchange import local as turns
from fl_bn.exchange.local import LocalExchange, Turns
from fl_bn.exchange.session import Session, exchanged_layers
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.client import LocalRound, check_optimizer
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.local import Samples, evaluate, torch_seed
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.passes import Exchanged, Passes
from fl_bn.federation.payload import Named
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.rounds import AS_METHOD, Rounds, constant_rate
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.training import BATCHES, DROPOUT, IndexBatches, train
from fl_bn.federation.values import NOTHING, Instruction, Reply
from fl_bn.methods import Method, Phase, Refresh, Report
from fl_bn.objectives import PLAIN, Objective
from fl_bn.task import CLASSIFICATION, Task

Loader = Iterable[Any]
"""Batches that can be gone through again and again: a DataLoader, a list; in a form that the task reads."""

SGD_05 = partial(SGD, lr=0.05, momentum=0.9)


class Diverged(RuntimeError):
    """Three rounds in a row no client's reply could be used."""


class Federation:
    """Clients and a server in this process. ``model``: unconverted, not changed; ``clients``: each one's training batches.

    >>> from fl_bn import Federation, methods
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> clients = [[(torch.randn(16, 4), torch.randint(0, 2, (16,)))] for client in range(3)]
    >>> federation = Federation(net, methods.fixbn(), clients, test=clients[0], progress=False)
    >>> [record.round for record in federation.run(rounds=2)]
    [1, 2]

    ``history`` has every round's record, ``model`` the network as evaluated last. Every argument: docs/guide.md, "As a library".
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        clients: Sequence[Loader],
        *,
        task: Task = CLASSIFICATION,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = SGD_05,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        schedule: Callable[[int, int], float] = lambda round, rounds: 1.0,
        objective: Objective = PLAIN,
        local_epochs: int = 1,
        test: Loader | None = None,
        evaluate_every: int = 1,
        fraction: float = 1.0,
        server_optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        calibrate: int = AS_METHOD,
        unit_scale: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
        progress: bool = True,
    ) -> None:
        if not clients or local_epochs < 1 or evaluate_every < 1:
            raise ValueError(
                f"a federation needs clients, and local_epochs and evaluate_every >= 1, but got {len(clients)} clients, {local_epochs} and "
                f"{evaluate_every}"
            )
        self.task, self.clients, self.optimizer, self.scheduler, self.schedule = task, clients, optimizer, scheduler, schedule
        self.local_epochs, self.test, self.seed, self.progress = local_epochs, test, seed, progress
        self._settings = LocalTraining(batch_size=2, epochs=local_epochs, objective=objective)
        check_composition(method, self._settings, robust=defence.active)
        example = optimizer(model.parameters())
        check_optimizer(objective, example)
        self._rate = _rate_of(example)
        policy = Rounds(
            len(clients),
            fraction,
            seed=seed,
            evaluate_every=evaluate_every,
            calibrate=calibrate,
            unit_scale=unit_scale,
            rate=constant_rate if self._rate is None else lambda round, rounds: (self._rate or 1.0) * schedule(round, rounds),
            auxiliary=auxiliary(self._settings),
        )
        self.server = Server(model, method, policy, optimizer=server_optimizer, defence=defence)
        self.history: list[RoundRecord] = []
        self._device = torch.device(device) if device is not None else next(model.parameters()).device
        self._pristine = copy.deepcopy(self.server.model).to(self._device)  # each client starts from its own copy
        self._kept = [NOTHING for _ in clients]
        self._passes = Passes(self.server, self._measured)
        self._evaluated: Named = self.server.shared.tensors()

    @property
    def method(self) -> Method:
        return self.server.method

    @property
    def model(self) -> nn.Module:
        """A copy of the shared network as it was evaluated last, in evaluation mode; of methods that keep BatchNorm it is BatchNorm."""
        model = copy.deepcopy(self.server.model)
        model.load_state_dict(dict(self._evaluated), strict=False)
        return model.eval()

    def client_model(self, client: int) -> nn.Module:
        """The network of one client: the shared tensors as evaluated last, and those of its own."""
        model = self.model
        model.load_state_dict(self._kept[client].get("local"), strict=False)
        return model

    def save(self, path: str | Path) -> None:
        """The shared tensors as evaluated last, as safetensors, by the names of the unconverted network's state_dict."""
        save_file({name: tensor.contiguous() for name, tensor in self._evaluated.items()}, str(path))

    def run(self, rounds: int) -> Iterator[RoundRecord]:
        """Train for ``rounds`` rounds, and yield each one's record: loss, evaluation, how far the statistics moved.

        A generator: a round runs when its record is asked for. Called once more, it trains on from the model as it is.

        Raises:
            Diverged: three rounds in a row no reply could be used.
        """
        server, failed = self.server, 0
        server.rounds = rounds
        tensors = server.shared.tensors()
        if server.shared.statistics():
            tensors = dict(self._passes.calibrated(tensors, rounds))
        with _progress(self.progress) as show:
            for number in range(1, rounds + 1):
                begin = time.perf_counter()
                server.shared.load(tensors)
                asked, cohort = server.begin(number), self._cohort(number)
                session = self._session(cohort) if asked.phase is Phase.EXCHANGE else None
                came = server.checked(self._train(asked, cohort, session))
                came.exchange, came.carrier = session, "local"
                failed = 0 if server.conclude(came) else failed + 1
                record, tensors = server.record, server.shared.tensors()
                counted = {client.client for client in record.accepted if record.aggregated}
                for client in cohort:
                    self._kept[client] = replace(self._kept[client], counted=client in counted)
                self._evaluated = tensors
                if number % server.policy.evaluate_every == 0 or number == rounds:
                    if self.method.refresh is not Refresh.NOTHING and asked.phase is not Phase.FROZEN:
                        self._evaluated = dict(self._passes.refreshed(number, tensors))
                        server.record = record
                    record.evaluation = self.evaluate()
                record.seconds = time.perf_counter() - begin
                self.history.append(record)
                show(record, rounds)
                yield record
                if failed == server.policy.max_failed:
                    why = next((client.refused for client in record.clients if client.refused), "")
                    raise Diverged(
                        f"{failed} rounds in a row too few replies could be used (values that are not finite mean that training diverged: "
                        f"lower the learning rate). The first reason: {why}"
                    )

    def evaluate(self, batches: Loader | None = None) -> dict[str, float]:
        """Loss and the task's metrics of the shared model, or the mean over the clients' own, on ``batches`` (default: ``test``)."""
        batches = self.test if batches is None else batches
        if batches is None:
            return {}
        if not self.method.personal:
            return evaluate(self.model.to(self._device), batches, task=self.task).result()
        everyone = range(len(self.clients))
        found = [evaluate(self.client_model(client).to(self._device), batches, task=self.task).result() for client in everyone]
        return {name: float(np.mean([metrics[name] for metrics in found])) for name in found[0]}

    def _cohort(self, number: int) -> list[int]:
        size = max(1, int(self.server.policy.fraction * len(self.clients) + 0.5))
        return sorted(Random(f"{self.seed}/{number}").sample(range(len(self.clients)), size))

    def _train(self, asked: Instruction, cohort: Sequence[int], session: Session | None) -> list[Reply]:
        if session is None:
            return [self._client(asked, client) for client in cohort]
        tokens = turns.admit(session)

        def one(client: int) -> Reply:
            try:
                reply = self._client(asked, client, partial(LocalExchange, tokens[client]))
            except BaseException as error:
                turns.ended(tokens[client], repr(error))
                raise
            turns.ended(tokens[client], "")
            return reply

        try:
            return Turns(len(cohort)).run([partial(one, client) for client in cohort])
        finally:
            turns.dismiss(tokens)

    def _client(self, asked: Instruction, client: int, connect: Callable[[int], LocalExchange] | None = None) -> Reply:
        """One client's round of training."""
        round = LocalRound(copy.deepcopy(self._pristine), self.method, asked, self._kept[client], self._settings, connect)
        loader = self.clients[client]
        if self.method.reports(asked.phase) is Report.PASS:
            round.measure(loader, self.task)
        optimizer = self.optimizer(round.parameters.values())
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.schedule(asked.round, self.server.rounds)
        optimizer.register_step_post_hook(lambda optimizer, args, named: round.took(optimizer))
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        batches = loader.epochs(self.seed, client, asked.round, self.local_epochs) if isinstance(loader, SeededBatches) else loader
        passes = 1 if isinstance(loader, SeededBatches) else self.local_epochs
        dropout = int(seeded(self.seed, client, asked.round, DROPOUT).integers(2**62))
        with torch_seed(dropout, self._device), round.open():
            trained = [train(round, batches, self.task, optimizer, scheduler) for _ in range(passes)]
        count = sum(part.samples for part in trained)
        samples = _length(loader) or count // max(self.local_epochs, 1)
        loss = sum(part.loss * part.samples for part in trained) / max(count, 1)
        reply, self._kept[client] = round.reply(samples, loss, client=client)
        return reply

    def _measured(self, asked: Instruction) -> Exchanged:
        everyone, parts = range(len(self.clients)), list[Reply]()
        for client in everyone:
            round = LocalRound(copy.deepcopy(self._pristine), self.method, asked, self._kept[client])
            round.measure(self.clients[client], self.task)
            parts.append(round.reply(round.measured_samples, client=client)[0])
        came = self.server.checked(parts, asked.phase)
        used, overflowing = self.server.measured(came.parts, len(came.wrong))
        return Exchanged(everyone, used, came.refused | overflowing, len(used))

    def _session(self, cohort: Sequence[int]) -> Session:
        defence = self.server.defence
        return Session(cohort, exchanged_layers(self.server.model), average=defence.average, believing=not defence.active)


class SeededBatches:
    """A client's samples in batches whose order depends on the seed, the client and the round alone: runs repeat bit for bit.

    ``x`` (N, ...): float inputs as the network takes them, or uint8 images (N, C, H, W), which become -1..1. ``y``: the task's targets.
    A batch is never a single sample, which has no variance.

    >>> from fl_bn import SeededBatches
    >>> batches = SeededBatches(torch.randn(20, 4), torch.zeros(20, dtype=torch.int64), batch_size=8)
    >>> [len(y) for x, y in batches.epochs(seed=0, client=0, round=1, epochs=1)]
    [8, 8, 4]
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch_size: int) -> None:
        self.samples, self.batch_size = Samples(x, y), batch_size

    def __len__(self) -> int:
        """The number of batches of one pass."""
        return max(1, -(-len(self.samples) // self.batch_size))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """In order, for measurements and evaluation."""
        like = torch.zeros(0, dtype=self.samples.x.dtype if self.samples.x.is_floating_point() else torch.get_default_dtype())
        for index in np.array_split(np.arange(len(self.samples)), len(self)):
            yield self.samples.batch(index, like)

    def epochs(self, seed: int, client: int, round: int, epochs: int) -> IndexBatches:
        """The batches of ``epochs`` passes in ``round``."""
        drawn = draw_batches(len(self.samples), self.batch_size, seeded(seed, client, round, BATCHES), epochs=epochs)
        like = torch.zeros(0, dtype=self.samples.x.dtype if self.samples.x.is_floating_point() else torch.get_default_dtype())
        return IndexBatches(self.samples, list(drawn), like)


def _length(loader: Loader) -> int:
    """The samples of a loader, where it knows them."""
    data: Any = loader.samples if isinstance(loader, SeededBatches) else getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else 0


def _rate_of(optimizer: Optimizer) -> float | None:
    rate = optimizer.param_groups[0].get("lr")
    return float(rate) if isinstance(rate, float | int) and rate > 0 else None


class _progress:
    """A bar on a terminal, and nothing elsewhere."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()

    def __enter__(self) -> Callable[[RoundRecord, int], None]:
        if not self._wanted:
            return lambda record, rounds: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.start()
        task = self._bar.add_task("")

        def show(record: RoundRecord, rounds: int) -> None:
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in list(record.evaluation.items())[:2])
            self._bar.update(task, total=rounds, completed=record.round, description=f"loss {record.loss:.4g}  {metrics}")

        return show

    def __exit__(self, *error: object) -> None:
        if self._wanted:
            self._bar.stop()
