"""Train a cohort with a layer-wise exchange, over each way of carrying the exchanges, without Flower."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.exchange import local
from fl_bn.exchange.call import Answer, Exchange, Join, Key, Layer, Local
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.replay import ReplayExchange, Unanswered
from fl_bn.exchange.session import Session
from fl_bn.federation.aggregation import average
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Method, Phase
from fl_bn.moments import Average, weighted_mean
from fl_bn.roles import batch_norms
from tests.local import train
from tests.methods.centralised import ONE_STEP, RATE

Alter = Callable[[Key, float, float, Answer], Answer]
"""A function of ``(key, p_i, s_i, answer)``. p_i is the client's share of the samples, s_i its share of the values per channel."""
Train = Callable[[int, Exchange], None]
CPU = torch.device("cpu")


def as_it_came(key: Key, p: float, s: float, answer: Answer) -> Answer:
    return answer


@dataclass
class Cohort:
    """Hold the result of a round: every client's model, and the session."""

    models: list[nn.Module]
    session: Session

    def mean(self, weights: Sequence[float]) -> dict[str, Tensor]:
        return average([model.state_dict() for model in self.models], weights)


def step(
    model: nn.Module,
    method: Method,
    clients: Sequence[Samples],
    carrier: str = "local",
    *,
    settings: LocalTraining = ONE_STEP,
    batches: Sequence[Sequence[np.ndarray]] | None = None,
    announced: Sequence[int] | None = None,
    mean: Average = weighted_mean,
    alter: Alter = as_it_came,
    seed: int = 0,
) -> Cohort:
    """Run one round of all ``clients`` from ``model``; by default, each client makes one step on all its samples.

    Args:
        model: The network before conversion.
        method: The method.
        clients: The samples of each client.
        carrier: How exchanges are carried: ``local``, ``grpc`` or ``replay``.
        settings: The settings of local training.
        batches: Client -> step -> indices of samples; None: all samples.
        announced: The batch sizes that clients report; None: the true ones. False ones serve as a control.
        mean: The average that the session computes. Another one serves as a control.
        alter: Changes the answers of the session, as a control.
        seed: The seed of dropout.
    """
    drawn = [[np.arange(len(client))] for client in clients] if batches is None else batches
    source = convert(model, method)
    like = next(source.parameters()).dtype
    layers = {name: Layer(layer.num_features, like) for name, layer in batch_norms(source).items()}
    session = Session(range(len(clients)), layers, average=mean)
    models = [source] * len(clients)

    def train_one(client: int, exchange: Exchange) -> None:
        models[client] = copy.deepcopy(source)
        altered = Altered(exchange, alter)
        with torch_seed(seed + client, CPU):
            train(models[client], clients[client], drawn[client], settings, RATE, method, Phase.EXCHANGE, exchange=altered)

    CARRIERS[carrier](session, announced or [len(own[0]) for own in drawn], train_one)
    assert not session.failure
    return Cohort(models, session)


class Altered:
    """Pass calls on to another exchange, and change its answers by ``alter``."""

    def __init__(self, inner: Exchange, alter: Alter) -> None:
        self.inner, self.alter, self.batch, self.seconds = inner, alter, inner.batch, 0.0

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        answer = self.inner(key, local, count)
        return self.alter(key, self.batch / answer.batch, count / answer.count, answer)

    def close(self, error: str = "") -> None:
        self.inner.close(error)


class Alternating(Altered):
    """Let another thread train while this one waits for an answer.

    Afterwards the state of torch's generator is restored, so that dropout draws the same numbers as without other threads.
    """

    def __init__(self, inner: Exchange, turn: threading.Lock) -> None:
        super().__init__(inner, as_it_came)
        self.turn = turn

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        state = torch.get_rng_state()
        self.turn.release()
        try:
            return self.inner(key, local, count)
        finally:
            self.turn.acquire()
            torch.set_rng_state(state)


def _local(session: Session, batches: Sequence[int], train_one: Train) -> None:
    tokens = local.admit(session)

    def task(client: int) -> Callable[[], None]:
        return lambda: train_one(client, local.LocalExchange(tokens[client], batches[client]))

    try:
        local.Turns(len(batches)).run([task(client) for client in range(len(batches))])
    finally:
        local.dismiss(tokens)


def _grpc(session: Session, batches: Sequence[int], train_one: Train) -> None:
    largest = max(2 * layer.channels * layer.dtype.itemsize for layer in session.layers.values())
    service, turn = ExchangeService("127.0.0.1", 0, largest).start(), threading.Lock()
    tokens = service.open(session)

    def task(client: int) -> None:
        exchange = GrpcExchange(f"127.0.0.1:{service.port}", tokens[client], batches[client])
        with turn:
            train_one(client, Alternating(exchange, turn))

    try:
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(len(batches)) as pool:
            list(pool.map(task, range(len(batches))))
        service.close(session)
    finally:
        service.stop()


def _replay(session: Session, batches: Sequence[int], train_one: Train) -> None:
    transcript: list[tuple[Key, Answer]] = []
    for client, batch in enumerate(batches):
        session.submit(client, Join(batch), lambda answer: None)
    while True:
        requests: dict[int, Local] = {}
        for client, batch in enumerate(batches):
            try:
                train_one(client, ReplayExchange(transcript, batch))
            except Unanswered as pending:
                requests[client] = pending.request
        if not requests:
            return
        answers: list[Answer] = []
        for client, request in requests.items():
            session.submit(client, request, answers.append)
        transcript.append((requests[0].key, answers[0]))


CARRIERS = {"local": _local, "grpc": _grpc, "replay": _replay}
