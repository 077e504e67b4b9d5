"""Send a client's message again if the Ray actor that answers it dies, in Flower's simulation.

Flower 1.25 returns even dead actors to its pool, where they fail every message at
once. Here, a dead actor leaves the pool, and another one computes the same answer,
bit for bit: it depends only on the message and on the client's state, which the
main process holds.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, WorkerCrashedError

from fl_bn.flower.compat import find, log

ATTEMPTS = 3  # how many actors one message may kill before it fails
PATIENCE = 60.0  # seconds to wait for an actor when there is none, before a message fails
LOST = (RayActorError, ObjectLostError, WorkerCrashedError)

_free = threading.Condition()  # notified when an actor is returned to the pool; a simulation has one pool


class NoProcess(Exception):
    """Signal that all Ray actors for clients are gone."""


def repair(pool: Any = None) -> None:
    """Change Flower's ``BasicActorPool`` (another ``pool`` in tests) to discard dead actors."""
    kind = find("BasicActorPool") if pool is None else pool
    kind.submit, kind.add_actor_back_to_pool, kind.fetch_result_and_return_actor_to_pool = submit, give_back, fetch


def submit(self: Any, ask: Any, job: tuple[Any, Any, str, Any]) -> Any:
    """Send a ``job`` (app, message, client, context) to a free actor, by Flower's function ``ask``.

    A pool's method. Return Ray's future of the answer, or raise ``NoProcess`` if no
    actor was started for ``PATIENCE`` seconds.
    """
    with _free:
        while not _free.wait_for(lambda: bool(self.pool), PATIENCE):
            if not self.num_actors:
                raise NoProcess(f"all processes for clients were lost, and none came for {PATIENCE:.0f} s: start nodes, and resume")
        actor = self.pool.pop()
    future = ask(actor, *job)
    self._future_to_actor[future] = (actor, ask, job)
    return future


def give_back(self: Any, future: Any) -> None:
    """Return the actor of ``future`` to the pool, unless that is done. A pool's method."""
    with _free:
        if (held := self._future_to_actor.pop(future, None)) is not None:
            self.pool.append(held[0])
            _free.notify()


def fetch(self: Any, future: Any) -> tuple[Any, Any]:
    """Return the reply and the client's new context. If the actor dies, ask another. A pool's method.

    After ``ATTEMPTS`` dead actors, Ray's error is raised.
    """
    attempt = 1
    while True:
        try:
            _, reply, context = ray.get(future)
        except LOST as error:
            ask, job = _lose(self, future, error)
            if attempt == ATTEMPTS:
                raise
            attempt, future = attempt + 1, submit(self, ask, job)
        except Exception:
            give_back(self, future)
            raise
        else:
            give_back(self, future)
            return reply, context


def _lose(self: Any, future: Any, error: Exception) -> tuple[Any, Any]:
    """Log the loss of a client's process, replace its actor, and return the job."""
    with _free:
        actor, ask, job = self._future_to_actor.pop(future)
        self.num_actors -= 1
        remaining = self.num_actors
    (_, message, client, _), line = job, "client %s was lost in round %s with its process (%s): it is asked again; processes left: %d"
    log(logging.WARNING, line, client, message.metadata.group_id, type(error).__name__, remaining)
    ray.kill(actor)  # it may still be running, if only the connection to it was lost
    _replace(self)
    return ask, job


def _replace(self: Any) -> None:
    actor = self.create_actor_fn()

    def enter() -> None:
        try:
            ray.get(actor.__ray_ready__.remote())  # as soon as a node has room for it
        except RayError:  # the new actor died, or the run has ended
            return
        with _free:
            self.pool.append(actor)
            self.num_actors += 1
            _free.notify()
        log(logging.INFO, "a new process for clients has started; processes: %d", self.num_actors)

    threading.Thread(target=enter, daemon=True).start()
