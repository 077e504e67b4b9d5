"""Run Flower on one machine: a ``Grid`` that calls the ClientApp directly, and ``run_in_process``.

Apps are the same as under ``flwr run``, but without sockets and Ray. Clients run
one after the other (in FedTAN, they take turns), or in worker processes. On the
CPU, the results are those of a simulation on Ray, bit for bit.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fl_bn.exchange.local import Turns, end_task
from fl_bn.federation.engines.vectorised import AT_ONCE, VECTORISED, CannotVectorise, Fallback, TogetherTurns
from fl_bn.federation.engines.workers import Workers, WorkerTiming, cores
from fl_bn.flower.compat import identify, log
from fl_bn.flower.wire.codec import config_of
from fl_bn.support.durable import FULL
from fl_bn.support.names import escaped
from fl_bn.support.user_code import OWN

OWNER = {"allow-modules": OWN}  # the user owns this process, so the run config may name modules
CLIENT_APP_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
App = TypeVar("App")
_traced = set[str]()  # the tracebacks that the log has: each once in a run


class InProcessGrid(Grid):
    """Serve nodes that live in this process. ``push_messages`` computes the replies before it returns.

    Attributes:
        result: what the ServerApp leaves for the caller of ``run_in_process``.

    Args:
        app: the ClientApp, or its import path ``module:name``.
        clients: the number of nodes, 1 or more.
        run_config: its ``engine`` says whether a cohort's clients are computed
            together (vmap).
        workers: the processes that answer messages. None: this one, until
            ``timing`` starts others.
        timing: decides before each round whether workers would save time in the
            rest of the run.
    """

    def __init__(
        self,
        app: ClientApp | str,
        clients: int,
        run_config: Mapping[str, Any],
        workers: Workers | None = None,
        timing: WorkerTiming | None = None,
    ) -> None:
        if clients < 1:
            raise ValueError(f"clients must be 1 or more, but got {clients}")
        self._app = app
        self._workers, self._timing = workers, timing
        self._run = SimpleNamespace(run_id=1)
        self.result: Any = None
        identify(1)
        _traced.clear()
        self._answers: dict[str, Message] = {}
        self._fallback = Fallback() if run_config.get("engine") == VECTORISED else None
        shared = dict(run_config)  # one for all clients: thousands of copies would take more memory than the clients' data
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": clients, **OWNER},
                state=RecordDict(),
                run_config=shared,
            )
            for node in range(1, clients + 1)
        }

    @property
    def one_program(self) -> bool:
        """Return whether a cohort's clients are computed together, as one vectorised (vmap) program."""
        return self._fallback is not None

    def set_run(self, run_id: Any) -> None:
        """Store the run to serve: its id or, in newer versions of Flower, the run itself."""
        self._run = SimpleNamespace(run_id=int(getattr(run_id, "run_id", run_id)))

    @property
    def run(self) -> Any:
        """Return the run that this grid serves, with its ``run_id``."""
        return self._run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        """Make a message of the given type for one node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Compute the answers to ``messages``, keep them, and return the messages' ids."""
        messages = self._addressed(messages)
        ids = [message.metadata.message_id for message in messages]
        self._answers.update(zip(ids, self._answered(messages), strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to the messages with these ids, each once."""
        return [self._answers.pop(identity) for identity in list(message_ids) if identity in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield the replies in the order of ``messages``, each computed when the caller asks for it.

        So the caller can free a reply before the next one. Clients that are
        computed together, or exchange vectors, reply together. ``timeout`` has no
        effect.
        """
        messages = list(messages)
        exchanging = any(_exchange_token(message) for message in messages)
        if not exchanging:
            self._start_workers(messages)
        if self._workers is not None and not exchanging:
            yield from self._answered_by(self._workers, self._addressed(messages))
            return
        size = len(messages) if exchanging else 1 if self._fallback is None else AT_ONCE
        for begin in range(0, len(messages), size or 1):
            yield from self.pull_messages(self.push_messages(messages[begin : begin + size]))

    def _start_workers(self, messages: list[Message]) -> None:
        if self._workers is None and self._timing is not None:
            rounds = [_round(message) for message in messages if message.metadata.message_type == MessageType.TRAIN]
            if rounds and self._timing.worth_it(rounds[0]):
                self._workers = Workers(self._timing.workers)

    def _addressed(self, messages: Iterable[Message]) -> list[Message]:
        """Write id, run and sender into the messages, as Flower's own grids do."""
        messages, run = list(messages), self._run.run_id
        for message in messages:
            message.metadata.__dict__.update(_run_id=run, _src_node_id=run, _message_id=uuid.uuid4().hex)
        return messages

    def _answered(self, messages: list[Message]) -> Iterable[Message]:
        if any(_exchange_token(message) for message in messages):
            if self._fallback is not None:
                self._fallback.say(CannotVectorise("they exchange statistics through the server within a local step"))
            return Turns(len(messages)).run([partial(self._answer_in_turn, message) for message in messages])
        if self._fallback is not None:
            parts = [messages[begin : begin + AT_ONCE] for begin in range(0, len(messages), AT_ONCE)]
            tasks = [[partial(self._answer, message) for message in part] for part in parts]
            return [answer for part in tasks for answer in TogetherTurns(len(part), self._fallback).run(part)]
        self._start_workers(messages)
        if self._workers is not None:
            return self._answered_by(self._workers, messages)
        return map(self._answer, messages)

    def _answer_in_turn(self, message: Message) -> Message:
        answer = self._answer(message)
        end_task(_exchange_token(message), answer.error.reason or "error" if answer.has_error() else "")
        return answer

    def _answer(self, message: Message) -> Message:
        begin = time.perf_counter()
        answer = _answer_of(self._app, message, self._contexts[message.metadata.dst_node_id])
        if self._timing is not None and message.metadata.message_type == MessageType.TRAIN and not _exchange_token(message):
            self._timing.note(_round(message), time.perf_counter() - begin)
        return answer

    def _answered_by(self, workers: Workers, messages: list[Message]) -> Iterator[Message]:
        """Yield the answers of ``workers``, which compute ahead. A client's state travels along."""
        contexts = [self._contexts[message.metadata.dst_node_id] for message in messages]
        tasks = [(self._app, *task) for task in zip(messages, contexts, strict=True)]
        for result, message, context in zip(workers.run(_in_worker, tasks), messages, contexts, strict=True):
            if result.error is not None:
                log(logging.ERROR, "client %s: %s", context.node_config["partition-id"], result.error)
                yield Message(Error(CLIENT_APP_RAISED, f"{type(result.error).__name__}: {result.error}"), reply_to=message)
            else:
                answer, context.state = result.value
                yield answer

    def close(self) -> None:
        """End the workers, if any."""
        if self._workers is not None:
            self._workers.close()


def run_in_process(
    config: Mapping[str, Any],
    *,
    server_app: ServerApp | str = "fl_bn.app.server:app",
    client_app: ClientApp | str = "fl_bn.app.client:app",
    workers: Workers | None = None,
) -> Any:
    """Run the ServerApp and ClientApp in this process, and restore torch's number of threads.

    Args:
        config: the run config (``[tool.flwr.app.config]``). Its ``clients`` is the
            number of nodes. Its ``workers`` is the number of processes that compute
            clients. 1, the default: only this process. 0: one per core (per
            ``threads`` cores, if set), started once this saves time in the
            remaining rounds, but none for a GPU, with ``engine='vectorised'``, or
            if ``client_app`` is no import path.
        server_app: the ServerApp, or its import path ``module:name``.
        client_app: the ClientApp, or its import path ``module:name``.
        workers: worker processes that were started before. They end with the run.

    Returns:
        The run directory, a ``Path``, if the ServerApp names it in the record
        ``result`` of its context. For an app of Flower's older API
        (``legacy_server_app``): its ``History``, with the final arrays as
        ``parameters``. Else None.

    Raises:
        Exception: whatever the ServerApp raises.
        ValueError: ``clients`` is less than 1.
        ImportError: there is no module at an import path.
    """
    server: ServerApp = _loaded(server_app)
    _loaded(client_app)  # an error at once
    count = int(config.get("workers", 1))
    decides = count == 0 and config.get("engine") != VECTORISED and isinstance(client_app, str)
    device = str(config.get("device", "auto"))
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    decides = decides and not on_gpu  # on a GPU, worker processes would only take turns
    timing = WorkerTiming(cores() // int(config.get("threads", 1)), int(config.get("rounds", 0))) if decides else None
    grid = InProcessGrid(client_app, int(config["clients"]), config, workers or (Workers(count) if count > 1 else None), timing)
    context = Context(run_id=1, node_id=0, node_config=dict(OWNER), state=RecordDict(), run_config=dict(config))
    threads = torch.get_num_threads()
    try:
        server(grid, context)
    finally:
        grid.close()
        torch.set_num_threads(threads)
    result = context.state.config_records.get("result")
    return grid.result if result is None else Path(str(result["directory"]))


def _answer_of(app: ClientApp | str, message: Message, context: Context) -> Message:
    """Return the client's reply, or an error reply with the state as the client left it.

    A SuperNode keeps this state, too; Flower's simulation on Ray loses it.
    """
    shared = context.run_config
    context.run_config = dict(shared)  # a client that changes it changes its own
    try:
        return _loaded(app)(message=message, context=context)
    except Exception as error:  # whatever the user's code raises
        where = "".join(traceback.format_tb(error.__traceback__))
        short = where in _traced or getattr(error, "errno", None) in FULL
        text = f"{type(error).__name__}: {error}" if short else f"\n{traceback.format_exc()}"
        _traced.add(where)
        log(logging.ERROR, "client %s raised: %s", context.node_config["partition-id"], escaped(text))
        return Message(Error(CLIENT_APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
    finally:
        if context.run_config == shared:
            context.run_config = shared


def _in_worker(app: ClientApp | str, message: Message, context: Context) -> tuple[Message, RecordDict]:
    return _answer_of(app, message, context), context.state


def _round(message: Message) -> int:
    return int(message.metadata.group_id or 0)


def _exchange_token(message: Message) -> str:
    """Return the token of the message's local layer-wise exchange, if any."""
    config = config_of(message.content)
    return str(config.get("exchange-token", "")) if config.get("exchange") == "local" else ""


def _loaded(app: App | str) -> App:
    """Return ``app``, or the object at its import path."""
    if not isinstance(app, str):
        return app
    module, _, name = app.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    loaded: App = attrgetter(name)(importlib.import_module(module))
    return loaded
