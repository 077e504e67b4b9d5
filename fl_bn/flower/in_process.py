"""Flower on one machine: a ``Grid`` that calls the ClientApp directly, and ``run_in_process``.

The same ServerApp and ClientApp as ``flwr run``, without sockets and without Ray: for tests, sweeps, notebooks and one GPU. Clients run
one after the other (FedTAN's take turns), or in several worker processes. On the CPU the numbers are those of a simulation on Ray, bit
for bit.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fl_bn.exchange.local import Turns, end_task
from fl_bn.federation.engines.rendezvous import VmapRendezvous
from fl_bn.federation.engines.vectorised import AT_ONCE, VECTORISED, CannotVectorise, Fallback
from fl_bn.federation.engines.workers import Workers
from fl_bn.flower.compat import address, identify
from fl_bn.flower.log import log
from fl_bn.support.user_code import OWN

OWNER = {"allow-modules": OWN}  # who runs all of it in one process may name modules of their own
CLIENT_APP_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
App = TypeVar("App")


@dataclass(frozen=True)
class Run:
    """What a grid tells of the run it serves."""

    run_id: int


class InProcessGrid(Grid):
    """Every node is a ``Context``; a message that is pushed is answered at once.

    ``app``: a ClientApp, or its import path. ``workers``: processes that answer messages; None: this process does. ``run_config``'s
    ``engine`` says whether a cohort's clients are one program.
    """

    def __init__(self, app: ClientApp | str, clients: int, run_config: Mapping[str, Any], workers: Workers | None = None) -> None:
        self._app = app
        self._workers = workers
        self._run = Run(1)
        identify(1)
        self._answers: dict[str, Message] = {}
        self._fallback = Fallback() if run_config.get("engine") == VECTORISED else None
        shared = dict(run_config)  # one for all: of thousands of clients, copies would take more memory than their data
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
        """Whether the clients of a cohort are one batched program."""
        return self._fallback is not None

    def set_run(self, run_id: Any) -> None:
        """Serve the run with this number, or, in later versions, this run of Flower's."""
        self._run = Run(int(getattr(run_id, "run_id", run_id)))

    @property
    def run(self) -> Any:
        return self._run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = self._addressed(messages)
        ids = [message.metadata.message_id for message in messages]
        self._answers.update(zip(ids, self._answered(messages), strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(identity) for identity in list(message_ids) if identity in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """The replies, in the order of ``messages``; a client is computed when its reply is asked for, and none before.

        So a reply that was used and let go of is out of memory before the next is there. Clients that are one program or exchange with each
        other reply together; ``workers`` go on while a reply is used.
        """
        messages = list(messages)
        exchanging = any(_exchange_token(message) for message in messages)
        if self._workers is not None and not exchanging:
            yield from self._answered_by(self._workers, self._addressed(messages))
            return
        size = len(messages) if exchanging else 1 if self._fallback is None else AT_ONCE
        for begin in range(0, len(messages), size or 1):
            yield from self.pull_messages(self.push_messages(messages[begin : begin + size]))

    def _addressed(self, messages: Iterable[Message]) -> list[Message]:
        messages = list(messages)
        for message in messages:
            address(message, self._run.run_id, uuid.uuid4().hex)
        return messages

    def _answered(self, messages: list[Message]) -> Iterable[Message]:
        """The answers in order."""
        if any(_exchange_token(message) for message in messages):
            if self._fallback is not None:
                self._fallback.say(CannotVectorise("in a run, statistics are exchanged within a step through the server"))
            return Turns(len(messages)).run([partial(self._answer_in_turn, message) for message in messages])
        if self._fallback is not None:
            parts = [messages[begin : begin + AT_ONCE] for begin in range(0, len(messages), AT_ONCE)]
            tasks = [[partial(self._answer, message) for message in part] for part in parts]
            return [answer for part in tasks for answer in VmapRendezvous.run(part, self._fallback)]
        if self._workers is not None:
            return self._answered_by(self._workers, messages)
        return map(self._answer, messages)

    def _answer_in_turn(self, message: Message) -> Message:
        answer = self._answer(message)
        end_task(_exchange_token(message), answer.error.reason or "error" if answer.has_error() else "")
        return answer

    def _answer(self, message: Message) -> Message:
        return _answer_of(self._app, message, self._contexts[message.metadata.dst_node_id])

    def _answered_by(self, workers: Workers, messages: list[Message]) -> Iterator[Message]:
        """What a client keeps travels with its message, and comes back with the reply. Workers compute the next ones meanwhile."""
        contexts = [self._contexts[message.metadata.dst_node_id] for message in messages]
        tasks = [(self._app, *task) for task in zip(messages, contexts, strict=True)]
        for done, message, context in zip(workers.run(_in_worker, tasks), messages, contexts, strict=True):
            if done.error is not None:
                log(logging.ERROR, "client %s: %s", context.node_config["partition-id"], done.error)
                yield Message(Error(CLIENT_APP_RAISED, f"{type(done.error).__name__}: {done.error}"), reply_to=message)
            else:
                answer, context.state = done.value
                yield answer

    def close(self) -> None:
        """End the workers, if any."""
        if self._workers is not None:
            self._workers.close()


def run_in_process(
    config: Mapping[str, Any],
    *,
    server_app: ServerApp | str = "fl_bn.apps.server:app",
    client_app: ClientApp | str = "fl_bn.apps.client:app",
    workers: Workers | None = None,
) -> Path | None:
    """Run the ServerApp and ClientApp in this process and return the run directory the ServerApp names, if any.

    ``config`` is the run config (the keys of ``[tool.flwr.app.config]``); ``clients`` of it is the number of nodes, ``workers`` that of the
    processes that compute clients. The apps are objects, or import paths as in pyproject. ``workers``: such processes that were
    started before; they end with the run. What the ServerApp raises is raised here. torch's
    number of threads is left as it was.
    """
    server = _loaded(server_app, ServerApp)
    _loaded(client_app, ClientApp)
    count = int(config.get("workers", 1))
    grid = InProcessGrid(client_app, int(config["clients"]), config, workers or (None if count == 1 else Workers(count)))
    context = Context(run_id=1, node_id=0, node_config=dict(OWNER), state=RecordDict(), run_config=dict(config))
    threads = torch.get_num_threads()
    try:
        server(grid, context)
    finally:
        grid.close()
        torch.set_num_threads(threads)
    result = context.state.config_records.get("result")
    return None if result is None else Path(str(result["directory"]))


def _answer_of(app: ClientApp | str, message: Message, context: Context) -> Message:
    try:
        return _loaded(app, ClientApp)(message=message, context=context)
    except Exception as error:  # whatever the user's code raises is an error reply, as in Flower's own runtimes
        log(logging.ERROR, "client %s raised:\n%s", context.node_config["partition-id"], traceback.format_exc())
        return Message(Error(CLIENT_APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def _in_worker(app: ClientApp | str, message: Message, context: Context) -> tuple[Message, RecordDict]:
    return _answer_of(app, message, context), context.state


def _exchange_token(message: Message) -> str:
    """The token of a client of the local exchange, empty for any other message."""
    config = message.content.config_records.get("config")
    return str(config.get("exchange-token", "")) if config is not None and config.get("exchange") == "local" else ""


def _loaded(app: App | str, kind: type[App]) -> App:
    """``app``, or what the import path ``module:name`` leads to; as in ``flwr run``, modules may lie in the working directory."""
    if not isinstance(app, str):
        return app
    module, _, name = app.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        loaded = attrgetter(name)(importlib.import_module(module))
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ValueError(f"expected a {kind.__name__} at {app!r} (module:name), but {error}") from error
    if not isinstance(loaded, kind):
        raise TypeError(f"{app} must be a {kind.__name__}, but is a {type(loaded).__name__}")
    return loaded
