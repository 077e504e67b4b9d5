"""Training on the union of the clients' data, as the upper end of every comparison."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from fl_bn.data.augment import augmenter
from fl_bn.data.batches import draw_batches
from fl_bn.derived import copied
from fl_bn.federation.callbacks import Callbacks
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.federation.settings import seeded
from fl_bn.federation.training import IndexBatches, alone, train
from fl_bn.methods import METHODS, Phase
from fl_bn.roles import inputs_like
from fl_bn.run.assembly import dataset, source_model, task
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.device import device
from fl_bn.run.run_directory import RunDirectory
from fl_bn.run.testing import test_metrics


def run_centralised(config: RunConfig) -> RunDirectory:
    """Plain training of the unconverted network, with the budget of the federated run: as many steps per round and rounds, each step on
    a batch of the size of the cohort's batches together, the same learning rate and calendar. The optimiser's momentum lives on.

    Raises:
        ConfigError: the run sends gradients with momentum in EMA form, which torch's SGD does not have.
    """
    if config.update == "gradients" and config.momentum > 0:
        raise ConfigError(
            "centralised training steps with torch's SGD, whose momentum is not that of update='gradients': give it update='weights' and a "
            f"momentum of its own, say centralised:update='weights';momentum=0.0, but got momentum={config.momentum:g}"
        )
    data, target = dataset(config), device(config)
    samples, of = Samples(data.x_train, data.y_train), task(config, data.y_train)
    cohort = max(1, int(config.fraction * config.clients + 0.5))
    model = copied(source_model(config)).to(target)
    settings = replace(config.local_training(), update="weights")  # one gradient, one step: the same
    steps = config.local_steps or config.local_epochs * max(1, len(samples) // (cohort * config.batch_size))
    optimizer = settings.make_optimizer([p for p in model.parameters() if p.requires_grad], config.learning_rate)
    rate, method = config.schedule(), METHODS["fedavg"]()
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with RunDirectory.create(config) as directory:
            callbacks = Callbacks([directory])
            for round in range(1, config.rounds + 1):
                begin = time.perf_counter()
                rng, size = seeded(config.seed, 0, round, 0), cohort * config.batch_size
                drawn = list(draw_batches(len(samples), size, rng, steps=steps, drop_last=config.drop_last))
                augment = augmenter(settings.augment, seeded(config.seed, 0, round, 2))
                batches = IndexBatches(samples, drawn, inputs_like(model), augment)
                local = alone(model, method, settings, rate(round, config.rounds))
                for group in optimizer.param_groups:
                    group["lr"] = local.instruction.learning_rate
                with torch_seed(int(seeded(config.seed, 0, round, 1).integers(2**62)), target), local.open():
                    trained = train(local, batches, of, optimizer)
                record = RoundRecord(round, Phase.TRAIN.value, local.instruction.learning_rate, aggregated=True)
                record.clients.append(ClientRecord(0, int(batches.seen.sum()), local.steps, trained.loss))
                if round % config.evaluate_every == 0 or round == config.rounds:
                    record.evaluation = test_metrics(config, model, target)
                record.seconds = time.perf_counter() - begin
                callbacks.on_round(record, config.rounds)
    finally:
        torch.set_num_threads(threads)
    return directory
