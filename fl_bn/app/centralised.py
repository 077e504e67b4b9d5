"""Train one network on the data of all clients together, the upper bound in comparisons."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.app.assembly import client_samples, dataset, laid_out, own_callbacks, partitions, task
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.device import device
from fl_bn.app.run_directory import RunDirectory
from fl_bn.app.testing import test_metrics
from fl_bn.bn.modules import copied
from fl_bn.bn.roles import inputs_like
from fl_bn.data.augment import augmenter
from fl_bn.data.batches import draw_batches
from fl_bn.federation.callbacks import Callbacks, Running
from fl_bn.federation.client import LocalRound
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.training import AUGMENT, BATCHES, DROPOUT, IndexBatches, SampleLoop, alone, train
from fl_bn.flower.population import round_half_up, sample_cohort
from fl_bn.methods import Method, Phase, Refresh


@dataclass(frozen=True)
class Merged:
    """Iterate over a single batch, which joins the first batch of every client."""

    clients: Sequence[IndexBatches]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = zip(*(next(iter(own)) for own in self.clients), strict=True)
        yield torch.cat(x), torch.cat(y)


def run_centralised(config: RunConfig) -> RunDirectory:
    """Train one network on the union of the clients' data, with the budget of the federated run.

    With ``update="weights"``, a round has as many steps as the round of a client.
    Each step's batch is drawn from all data, and is as large as the cohort's
    batches together. With ``update="gradients"``, it joins the clients' own batches
    (DSGD; FBN, remark 4.1). Other settings are those of the run config. The
    optimiser keeps its momentum through all rounds. The network has the
    normalisation layers of the method.

    Raises:
        DataNotFound: A file of the data is missing.
        ConfigError: A key or the method needs clients or a server.
    """
    check_centralised(config)
    target, of, method = device(config), task(config, dataset(config).y_train), config.build_method()
    model = copied(laid_out(config, target)).to(target)
    settings, schedule, policy = config.local_training(), config.schedule(), config.round_policy()
    optimizer = _optimizer(settings, [p for p in model.parameters() if p.requires_grad], config.learning_rate)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with RunDirectory.create(config) as directory, ExitStack() as stack:
            directory.centralised = True
            callbacks = Callbacks([directory, *own_callbacks(config, directory.path)])
            running = Running(of, lambda: {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()})
            stack.push(lambda kind, error, trace: callbacks.on_end(error))
            callbacks.on_start(running)
            for round in range(1, config.rounds + 1):
                begin, phase = time.perf_counter(), method.phase(round, config.rounds)
                rate = method.learning_rate(schedule, round, config.rounds)
                local = alone(model, method, replace(settings, update="weights"), rate, phase, number=round)  # each gradient is one step
                batches, samples = _batches(config, local)
                for group in optimizer.param_groups:
                    group["lr"], group["params"] = rate, list(local.parameters.values())
                with torch_seed(int(seeded(config.seed, 0, round, DROPOUT).integers(2**62)), target), local.open():
                    trained = train(local, batches, of, optimizer)
                one = ClientRecord(0, sum(int(own.seen.sum()) for own in samples), local.steps, trained.loss)
                evaluation = test_metrics(config, model, target) if policy.due(round, config.rounds) else {}
                seconds = time.perf_counter() - begin
                record = RoundRecord(round, phase.value, rate, [one], aggregated=True, evaluation=evaluation, seconds=seconds)
                callbacks.on_round(record, config.rounds)
                if running.reason:
                    break
    finally:
        torch.set_num_threads(threads)
    return directory


def check_centralised(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a key or the method needs clients or a server."""
    wrong = {
        f"method={config.method!r}": _federates(config.build_method(), config.rounds),
        "byzantine": config.changes.attackers > 0,
        f"objective={config.objective!r}": config.objective != "none",
        f"server-optimizer={config.server_optimizer!r}": config.server_optimizer != "fedavg",
        "statistics-rule, update-rule, declared-byzantine": config.defence().active,
    }
    if asked := [what for what, there in wrong.items() if there]:
        raise ConfigError(f"centralised training has no clients and no server: choose fedavg, fixbn or gn, and leave out {asked[0]}")


def _federates(method: Method, rounds: int) -> bool:
    keeps, exchanges = bool(method.local) or method.personal, method.phase(1, rounds) is Phase.EXCHANGE
    return keeps or method.pools or method.refresh is not Refresh.NOTHING or method.uses_shared(rounds) or exchanges


def _optimizer(settings: LocalTraining, parameters: list[nn.Parameter], rate: float) -> Optimizer:
    optimizer = settings.make_optimizer(parameters, rate)
    if settings.update == "gradients" and settings.momentum > 0:  # as the clients do: an exponential moving average from 0
        for group in optimizer.param_groups:
            group["dampening"] = settings.momentum
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _batches(config: RunConfig, local: LocalRound) -> tuple[Merged | IndexBatches, Sequence[IndexBatches]]:
    """Return the training batches of a round, and the clients' batches from which they are joined.

    With ``update="weights"``, the latter are a list of the former.
    """
    number, cohort = local.instruction.round, max(1, round_half_up(config.fraction * config.clients))
    if config.update == "gradients":
        chosen = sample_cohort(range(config.clients), cohort, random.Random(f"{config.seed}/{number}"))
        loops = [SampleLoop(client_samples(config, client)[0], config.seed, client) for client in chosen]
        own = [cast(IndexBatches, loop.batches(local)) for loop in loops]
        return Merged(own), own
    data = dataset(config)
    held, size = torch.cat(partitions(config)).unique().numpy(), cohort * config.batch_size  # partitions may leave samples out
    steps = config.local_steps or config.local_epochs * max(1, len(held) // size)
    indices = draw_batches(len(held), size, seeded(config.seed, 0, number, BATCHES), steps=steps, drop_last=local.settings.drop_last)
    augment = augmenter(config.augment, seeded(config.seed, 0, number, AUGMENT))
    batches = IndexBatches(Samples(data.x_train, data.y_train), [held[one] for one in indices], inputs_like(local.model), augment)
    return batches, [batches]
