"""Find what depends on Flower's version: names that are private or have moved, and what deployments need.

``from fl_bn.flower.compat import Stage`` looks for ``Stage`` where different
versions of Flower keep it. This module imports the standard library alone, so that
``superlink.py`` can load it by its path.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARY = ">=1.25,<2"  # versions for everything but deployments; .ci/run runs the Flower tests on the oldest and on the newest of them
DEPLOYED = "1.25"  # the version for deployments, whose programs fl-bn starts and repairs
ADVICE = f"in this environment, pip install 'flwr=={DEPLOYED}.*'"
NEWEST = "1.42"  # the newest version on which the tests ran
# module of Flower -> its names that fl-bn needs; two modules with one name: it has moved
PLACES = {
    # the library, seen on 1.25 to 1.42: messages of SecAgg+, its masks, and the simulation's actors
    "flwr.common.recorddict_compat": "fitres_to_recorddict",
    "flwr.compat.common.recorddict_compat": "fitres_to_recorddict",
    "flwr.common.secure_aggregation.secaggplus_constants": "Key Stage RECORD_KEY_STATE",
    "flwr.supercore.task_identity": "TaskIdentity",  # 1.42 alone
    "flwr.simulation.ray_transport.ray_actor": "BasicActorPool",  # 1.25 alone
    # deployments: a SuperLink that is repaired, on 1.25 alone, and a site's gate, on 1.25 and 1.42
    "flwr.server.superlink.linkstate": "SqliteLinkState",
    "flwr.supercore.object_store.sqlite_object_store": "SqliteObjectStore",
    "flwr.supernode.runtime.run_clientapp": "run_clientapp",
    "flwr.supernode.cli.flwr_clientapp": "flwr_clientapp",
}
SIMULATION = "flwr.simulation.ray_transport.ray_actor"
CLOSED_HERE = "Channel closed!"  # gRPC's details of a call that this process itself cancelled
SECAGG_CLIENT = "flwr.client.mod.secure_aggregation.secaggplus_mod"
SECAGG_SERVER = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"


def __getattr__(name: str) -> Any:
    if not any(name in names.split() for names in PLACES.values()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(name)


def find(name: str) -> Any:
    """Return Flower's object ``name`` from its first module in ``PLACES``, or raise ``ImportError``."""
    modules = [module for module, names in PLACES.items() if name in names.split()]
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # Flower misses a package of its own
        except AttributeError:
            continue
    raise ImportError(f"expected {name} in {' or '.join(modules)}, but Flower {version('flwr')} does not have it: {ADVICE}")


def deployed() -> bool:
    """Return whether this process is ``flwr-clientapp``, which runs a ClientApp for one message."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


def simulated() -> bool:
    """Return whether this process runs Flower's simulation on Ray."""
    return SIMULATION in sys.modules


def identify(run_id: int) -> None:
    """Set the run and node of this process's messages to ``run_id``, unless they are set.

    Flower 1.42 needs this, 1.34 does not.
    """
    try:
        identity = find("TaskIdentity")
    except ImportError:
        return
    try:
        identity.run_id  # noqa: B018
    except RuntimeError:  # not set
        identity.task_id, identity.run_id, identity.node_id = run_id, run_id, run_id


def simulates(grid: Any) -> bool:
    """Return whether ``grid`` is that of Flower's simulation on Ray."""
    return type(grid).__name__ == "InMemoryGrid"


def has_ended(grid: Any) -> bool:
    """Return whether the simulation behind ``grid`` has ended before its ServerApp.

    Flower then sets the stop event that it gave to the ServerApp's thread, this one.
    """
    given = getattr(threading.current_thread(), "_args", ()) if simulates(grid) else ()
    return any(isinstance(value, threading.Event) and value.is_set() for value in given)


def repeat_cancelled(invoker: Any) -> None:
    """Change Flower's retry invoker: a call that a stopping server cancels is repeated.

    A server that stops cancels the replies that it is sending (gRPC's code
    CANCELLED), but Flower repeats a call for the code UNAVAILABLE alone. Newer
    versions of Flower call servers over HTTP and need no change.
    """
    import grpc  # not above: loading this module by its path stays cheap

    give_up = invoker.should_giveup

    def should_give_up(error: Any) -> bool:
        code = error.code() if isinstance(error, grpc.RpcError) else None
        cancelled = code is grpc.StatusCode.CANCELLED and error.details() != CLOSED_HERE
        return not cancelled and bool(give_up(error))

    invoker.should_giveup = should_give_up


def copy_of(name: str) -> ModuleType:
    """Load Flower's module ``name`` once more, so that its other users see no changes."""
    original = importlib.util.find_spec(name)
    spec = original and importlib.util.spec_from_file_location(f"{name}_of_fl_bn", original.origin)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a module {name}, but Flower {version('flwr')} has none: {ADVICE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def deploys_by_grpc() -> bool:
    """Return whether deployments use Flower 1.25's programs (else 1.42's), or raise ``ValueError``."""
    installed = version("flwr")
    if not pinned() and not f"{installed}.".startswith(f"{NEWEST}."):
        raise ValueError(f"deployments need Flower {DEPLOYED} or {NEWEST}, but flwr {installed} is installed: {ADVICE}")
    return pinned()


def federation_config(options: Mapping[str, object]) -> str:
    """Return the argument of ``flwr run`` that sets options of the simulation, which have no prefix ``options.``.

    If one is given, Flower 1.25 drops all options of pyproject.toml. It then needs
    the number of SuperNodes, and the CPUs of a client whose GPUs are given.
    """
    if pinned():
        options = {"num-supernodes": "...", **options}
    names = {name: f"options.{name}" if pinned() else name.removeprefix("backend.").replace(".", "-") for name in options}
    return f'--federation-config "{" ".join(f"{names[name]}={value}" for name, value in options.items())}"'


def pinned() -> bool:
    """Return whether the installed Flower is a version ``DEPLOYED`` (1.25.*)."""
    return f"{version('flwr')}.".startswith(f"{DEPLOYED}.")


def prints(handler: logging.Handler) -> bool:
    """Return whether ``handler`` is the one by which Flower prints its log."""
    return isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("flwr.")


LOGGER = logging.getLogger("flwr")
log = LOGGER.log
DETAIL = "detail"  # the attribute of a log record that `fl-bn run` prints with --verbose alone; run.log has it always
