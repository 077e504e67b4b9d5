"""Send a client's message again if its process dies in Flower's simulation on Ray.

Flower 1.25 returns an actor to its pool after any error, even if the actor's process or its node is gone. A
dead actor fails every message faster than the others answer, so one lost node ends the run. Here a dead actor
leaves the pool, and another actor gets its message.

The answer has the same bits: it depends on the message and on the client's state, which the driver holds. Ray
starts a replacement on a node with room, also on one that joins later.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, WorkerCrashedError

from fl_bn.flower.compat import find
from fl_bn.flower.log import log

ATTEMPTS = 3  # processes that one message may cost: one that kills every process it is given to must not end them all
PATIENCE = 60.0  # seconds without a single process, after which a message fails
LOST = (RayActorError, ObjectLostError, WorkerCrashedError)

_free = threading.Condition()  # an actor was returned to the pool, of which a simulation has one
_named: set[str] = set()  # nodes that are lost, as was said in the log


class NoProcess(Exception):
    """Report that all processes for clients are gone; the message advises what to do."""


def repair(pool: Any = None) -> None:
    """Let Flower's ``BasicActorPool``, or ``pool`` in its place, discard actors that died."""
    kind = find("BasicActorPool") if pool is None else pool
    kind.submit, kind.add_actor_back_to_pool, kind.fetch_result_and_return_actor_to_pool = submit, give_back, fetch


def submit(self: Any, ask: Any, job: tuple[Any, Any, str, Any]) -> Any:
    """Send ``job`` (app, message, client, context) to a free actor, and return Ray's future. Wait while all are busy.

    Raises:
        NoProcess: no actor is left, and none was started for a minute.
    """
    with _free:
        while not _free.wait_for(lambda: bool(self.pool), PATIENCE):
            if not self.num_actors:
                raise NoProcess(
                    f"all processes for clients were lost with their nodes, and none came back for {PATIENCE:.0f} s: start nodes again "
                    "(ray start --address=...), and go on with resume, if the run has checkpoints"
                )
        actor = self.pool.pop()
    future = ask(actor, *job)
    self._future_to_actor[future] = (actor, ask, job)
    return future


def give_back(self: Any, future: Any) -> None:
    """Return the actor of ``future`` to the pool, unless it was returned or lost before."""
    with _free:
        if (held := self._future_to_actor.pop(future, None)) is not None:
            self.pool.append(held[0])
            _free.notify()


def fetch(self: Any, future: Any) -> tuple[Any, Any]:
    """Return the reply and the client's new context, from another actor if the first died.

    Raises:
        Exception: the ClientApp's own, whatever it raises.
        RayError: ``ATTEMPTS`` actors died of the message.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _, reply, context = ray.get(future)
        except LOST as error:
            ask, job = _lose(self, future, error)
            if attempt == ATTEMPTS:
                raise
            future = submit(self, ask, job)
        except Exception:
            give_back(self, future)
            raise
        else:
            give_back(self, future)
            return reply, context
    raise AssertionError("the last attempt returns or raises")


def _lose(self: Any, future: Any, error: Exception) -> tuple[Any, Any]:
    """Log which client was lost, end its actor, and ask Ray for another. Return the job to submit again."""
    with _free:
        actor, ask, job = self._future_to_actor.pop(future)
        self.num_actors -= 1
        remaining = self.num_actors
    _, message, client, _ = job
    log(
        logging.WARNING,
        "client %s was lost in round %s (%s) with the process that served it (%s): it is asked again; processes left: %d",
        client,
        message.metadata.group_id,
        message.metadata.message_type,
        type(error).__name__,
        remaining,
    )
    threading.Thread(target=_name_lost_nodes, daemon=True).start()
    ray.kill(actor)  # Ray may only have lost sight of it
    _replace(self)
    return ask, job


def _replace(self: Any) -> None:
    actor = self.create_actor_fn()

    def enter() -> None:
        try:
            ray.get(actor.__ray_ready__.remote())  # as soon as a node has room for it
        except RayError:  # it died, or the run is over
            return
        with _free:
            self.pool.append(actor)
            self.num_actors += 1
            _free.notify()
        log(logging.INFO, "a new process for clients has started; processes: %d", self.num_actors)

    threading.Thread(target=enter, daemon=True).start()


def _name_lost_nodes(patience: float = 30.0) -> None:
    """Log the lost nodes, each once. Ray notices them some seconds after their processes died."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            known = ray.nodes()
        except RayError:
            return  # the run has ended, and Ray with it
        nodes = {f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}": bool(node["Alive"]) for node in known}
        with _free:
            gone = sorted(name for name, alive in nodes.items() if not alive and name not in _named)
            _named.update(gone)
        if gone:
            remaining = sorted(name for name, alive in nodes.items() if alive)
            log(logging.WARNING, "nodes %s are lost; nodes left: %s", ", ".join(gone), ", ".join(remaining) or "none")
            return
        time.sleep(1.0)
