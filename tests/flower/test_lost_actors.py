"""Actors that die leave the pool, and their clients are asked again: on a pool like Flower's, with a Ray that is played."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from fl_bn.flower import lost_actors


class Actor:
    """``dies``: whether it fails every message, as Flower's dead actors do."""

    def __init__(self, dies: bool = False) -> None:
        self.dies, self.served = dies, 0
        self.__ray_ready__ = SimpleNamespace(remote=lambda: self)


class Future:
    def __init__(self, actor: Actor, client: str) -> None:
        self.actor, self.client = actor, client


def ask(actor: Actor, app: Any, message: Any, client: str, context: Any) -> Future:
    return Future(actor, client)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the module asks of Ray. ``raises``: of every client's app; ``replaced``: what Ray starts for an actor that was lost."""
    played = SimpleNamespace(raises=None, killed=[], replacement=None)

    def get(what: Future | Actor) -> Any:
        if isinstance(what, Actor):
            if what.dies:
                raise RayActorError
            return True
        what.actor.served += 1
        if what.actor.dies:
            raise RayActorError
        if played.raises is not None:
            raise played.raises
        return what.client, f"reply of {what.client}", "context"

    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "NodeID": "0123456789", "Alive": True},
        {"NodeManagerAddress": "10.0.0.2", "NodeID": "fedcba9876", "Alive": False},
    ]
    monkeypatch.setattr(lost_actors, "ray", SimpleNamespace(get=get, kill=played.killed.append, nodes=lambda: nodes))
    return played


def pool(*actors: Actor, replacement: Callable[[], Actor] = lambda: Actor(dies=True)) -> Any:
    class Pool:
        def __init__(self) -> None:
            self.pool, self.num_actors, self.create_actor_fn = list(actors), len(actors), replacement
            self._future_to_actor: dict[Any, Any] = {}

    lost_actors.repair(Pool)
    return Pool()


def job(client: str) -> tuple[Any, Any, str, Any]:
    return None, SimpleNamespace(metadata=SimpleNamespace(group_id="7", message_type="train")), client, None


def answer(of: Any, client: str) -> Any:
    return of.fetch_result_and_return_actor_to_pool(of.submit(ask, job(client)))


def test_the_client_of_a_dead_actor_is_named_and_asked_again(ray: SimpleNamespace, log: pytest.LogCaptureFixture) -> None:
    good, dead = Actor(), Actor(dies=True)
    here = pool(good, dead)
    assert [answer(here, str(client)) for client in range(4)] == [(f"reply of {client}", "context") for client in range(4)]
    assert (good.served, dead.served, ray.killed, here.pool) == (4, 1, [dead], [good])
    assert "client 0 was lost in round 7" in log.text
    assert "processes left: 1" in log.text


def test_a_replacement_takes_the_place_of_a_lost_actor(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one there is no process."""
    new = Actor()
    here = pool(Actor(dies=True), replacement=lambda: new)
    assert answer(here, "3") == ("reply of 3", "context")
    assert (new.served, here.num_actors, here.pool) == (1, 1, [new])
    monkeypatch.setattr(lost_actors, "PATIENCE", 0.05)
    with pytest.raises(lost_actors.NoProcess):
        answer(pool(Actor(dies=True)), "0")


def test_a_message_that_kills_every_process_fails_alone(ray: SimpleNamespace) -> None:
    good = Actor()
    here = pool(good, *(Actor(dies=True) for _ in range(lost_actors.ATTEMPTS)))
    with pytest.raises(RayActorError):
        answer(here, "0")
    assert answer(here, "1") == ("reply of 1", "context")
    assert here.pool == [good]


def test_what_the_app_raises_is_raised_and_its_actor_serves_on(ray: SimpleNamespace) -> None:
    good = Actor()
    here, ray.raises = pool(good), ValueError("the data are gone")
    future = here.submit(ask, job("0"))
    with pytest.raises(ValueError, match="data"):
        here.fetch_result_and_return_actor_to_pool(future)
    here.add_actor_back_to_pool(future)  # Flower does so, too
    assert here.pool == [good]
