"""Run the apps of a site: one process that has imported torch, and forks a process for each message.

Usage: ``python -P -m fl_bn_site.apps SOCKET``. The gate (``gate.py``) connects to the socket for each message. It has
checked the message and unpacked the app before. This program needs no key and no connection to Flower, so it may run as a
user of its own, who may read the site's data.

* The *base process* imports torch. It imports neither fl-bn, since each run brings its own version, nor Flower, to be small.
* A *warm process* is forked from the base process for a package. It imports the app once, since that takes a second. It ends
  when other packages come, or a message after a change of the site's policy.
* Each message has a process of its own, forked from a warm process, so no message affects the next one by accident.
* A *watcher* waits for the process of a message. It tells the gate how that process ended, and kills it if the gate ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from fl_bn_site.endings import ending, in_words, out_of_memory_kills

PROGRAM = "flwr-clientapp"  # the program of Flower whose work a process of a message does
INSTALLED = "fl_bn.app.client:app"  # the app that runs where the policy allows only installed code
ED25519 = "cryptography.hazmat.primitives.asymmetric.ed25519"  # for layer-wise exchanges
PRELOADED = ("numpy", "scipy.linalg", "torch", "torch._dynamo", "PIL.Image", "safetensors.torch", "threadpoolctl", "joblib", ED25519)
# scipy.linalg starts BLAS's threads at its import. They must not start in a warm process, which may have only one thread.
REFUSALS = ("NotAllowed", "Refused")  # errors by which an app refuses a message
MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")  # parts of torch's and NumPy's error messages
WARM = 2  # warm processes at a time, so two runs that take turns do not import their apps anew
PACKET = 1 << 16  # the largest request, in bytes
READY = b"1"
HANG = 10.0  # seconds in which a connection must send its request
LAST = 1.0  # seconds that the process of a message has to end when the gate needs it no more
Call = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """Describe the app that a message needs.

    Attributes:
        code: The SHA-256 of the app's package.
        folder: The folder with the app; empty: the app of the fl-bn that is installed here.
        policy: A text that changes with the site's policy.
        memory: The bytes that the process may use for data; None: no limit.
    """

    code: str
    folder: str
    policy: str
    memory: int | None = None


class CannotLoad(Exception):
    """Signal that the folder of a package holds no ClientApp."""


def load(folder: str) -> Call:
    """Import the ClientApp of an unpacked package. ``folder`` is as in ``Job``.

    Raises:
        CannotLoad: The package names no ClientApp.
    """
    named = INSTALLED
    if folder:
        try:
            told = tomllib.loads(Path(folder, "pyproject.toml").read_text(encoding="utf-8"))
            named = told["tool"]["flwr"]["app"]["components"]["clientapp"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CannotLoad(f"the package of the run names no clientapp in its pyproject.toml ({error!r})") from error
        sys.path.insert(0, folder)
    module, _, name = str(named).partition(":")
    found: Call = getattr(importlib.import_module(module), name)
    return found


def limit_memory(most: int | None) -> None:
    """Limit the memory for data of this process, and of each process that it forks, to ``most`` bytes; None: no limit."""
    if most is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most if hard == resource.RLIM_INFINITY else min(most, hard)))


def fork(work: Callable[[], None]) -> int:
    """Fork this process. The child calls ``work`` and ends.

    Returns:
        The process id of the child. Only the parent returns.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# The base and the warm processes


def serve(listener: socket.socket) -> None:
    """Answer the gate's connections, for ever. This is the work of the base process."""
    warm: dict[Job, WarmProcess] = {}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes children that have ended
    while True:
        control, _ = listener.accept()
        with control:
            control.settimeout(HANG)
            try:
                request, (data,), _, _ = socket.recv_fds(control, PACKET, 1)
                job = Job(**json.loads(request))
            except (OSError, ValueError, TypeError):  # a health check, say
                continue
            control.settimeout(None)
            former = [one for one in warm if one.policy != job.policy]
            oldest = list(warm)[:1] if job not in warm and len(warm) == WARM else []
            for other in former or oldest:
                warm.pop(other).close(signal.SIGKILL if other in former else 0)
            sockets = [listener, *(one.requests for one in warm.values())]  # which forked processes must not hold open
            if job not in warm:
                warm[job] = WarmProcess(job, sockets, control, data)
            if not warm[job].take(request, control.fileno(), data):
                warm.pop(job).close()
                fork(partial(watch, control, data, job, None, sockets))
            os.close(data)


class WarmProcess:
    """Fork a process that imports an app once, and forks a process for each message.

    Args:
        job: The app.
        others: Sockets of the base process, which are closed in the warm process.
        control: The connection of the first message, which is closed there, too. The gate ends it at the message's deadline.
        data: The descriptor of that message's socket, which is closed there, too.
    """

    def __init__(self, job: Job, others: list[socket.socket], control: socket.socket, data: int) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def stay() -> None:
            theirs.recv(len(READY))
            for other in (*others, control, self.requests):
                other.close()
            os.close(data)
            limit_memory(job.memory)
            sys.argv = [PROGRAM]  # an app may read this at its import, to find out whether it is deployed
            app = load(job.folder)
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError("the app starts threads at its import, which survive no fork: every message imports it anew")
            gc.freeze()  # the pages of what is imported stay shared with the processes of messages
            theirs.send(READY)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                request, descriptors, _, _ = socket.recv_fds(theirs, PACKET, 2)
                if not request:
                    return
                of_gate, of_message = descriptors
                with socket.socket(fileno=of_gate) as connection:
                    fork(partial(watch, connection, of_message, job, app, [theirs]))
                os.close(of_message)

        self._process = os.pidfd_open(fork(stay))
        self.requests.send(READY)  # now it may end
        theirs.close()
        ends = select.poll()
        ends.register(self.requests, select.POLLIN)
        ends.register(control, select.POLLHUP)
        ready = dict(ends.poll())
        # Else it has ended, or the gate waits no more.
        self._usable = self.requests.fileno() in ready and self.requests.recv(len(READY)) == READY

    def take(self, request: bytes, *descriptors: int) -> bool:
        """Pass a request and its two sockets to the process. Return False if the process has ended."""
        try:
            if self._usable:
                socket.send_fds(self.requests, [request], list(descriptors), socket.MSG_DONTWAIT)  # an app may not read
        except OSError:
            self._usable = False
        return self._usable

    def close(self, how: int = signal.SIGKILL) -> None:
        """End the process by a signal, or by 0 after the requests that it has. Processes that it has forked for messages keep running."""
        self.requests.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, how)
        os.close(self._process)


# One message


def watch(control: socket.socket, data: int, job: Job, app: Call | None, others: list[socket.socket]) -> None:
    """Answer a message in a process of its own. Tell the gate if that process dies, and kill it if the gate ends.

    Args:
        control: The connection on which the gate hears how the process ended.
        data: The descriptor of the socket for the message and its answer.
        job: The app.
        app: The loaded ClientApp; None: the process loads it.
        others: Sockets of the process that forked this one, which are closed here.
    """
    for other in others:
        other.close()
    kills = out_of_memory_kills()

    def work() -> None:
        control.close()
        with socket.socket(fileno=data) as connection:
            answer(connection, job, app)

    child = fork(work)
    os.close(data)
    process, ends = os.pidfd_open(child), select.poll()
    ends.register(process, select.POLLIN)
    ends.register(control, select.POLLHUP)
    ends.poll()
    ends.unregister(control)
    if not ends.poll(LAST * 1000):  # the gate has ended, or has its answer
        os.kill(child, signal.SIGKILL)
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if why := ending(status, out_of_memory_kills() > kills):
        print(f"the process that worked on a message {why}; the server gets this reason as an error", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # the gate has its answer
        control.send(f"its process {why or 'ended without an answer'}".encode())


def answer(connection: socket.socket, job: Job, app: Call | None) -> None:
    """Answer one message in this process."""
    from fl_bn_site import wire  # here, since it imports Flower

    sys.argv = [PROGRAM]
    random.seed()  # else all forks would draw the same numbers
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy").random.seed()
    message, context = wire.receive_message(connection)
    one_at_a_time = Lock()

    def leaving(section: str, nbytes: int, samples: int) -> None:
        """Ask the gate to log a vector of a layer-wise exchange, before the vector leaves."""
        with one_at_a_time:
            wire.send(connection, {"exchange": [section, nbytes, samples]})
            wire.receive(connection)

    try:
        if app is None:
            limit_memory(job.memory)
            app = _loaded(job.folder)
        with contextlib.suppress(ImportError):  # imported here, since an app may import fl-bn's exchange only when it trains
            importlib.import_module("fl_bn.support.departures").listen(leaving)
        reply = app(message=message, context=context)
        blobs: list[bytes] = []
        state = wire.describe(context.state, blobs)
        if reply.has_error():
            told: Mapping[str, Any] = {"code": reply.error.code, "reason": reply.error.reason}
        else:
            told = {"reply": wire.describe(reply.content, blobs)}
        with one_at_a_time:
            wire.send(connection, {**told, "state": state}, blobs)
    except Exception as error:
        print(in_words(error), file=sys.stderr, flush=True)
        with one_at_a_time:
            wire.send(connection, _described(error))


def _loaded(folder: str) -> Call:
    """Load an app, and raise each error of that as CannotLoad."""
    try:
        return load(folder)
    except CannotLoad:
        raise
    except Exception as error:  # the code of an app may raise anything
        raise CannotLoad(f"the app of the run cannot be imported: {type(error).__name__}: {error}") from error


def _described(error: Exception) -> dict[str, Any]:
    """Describe an error for the gate."""
    words = str(error).lower()
    return {
        "error": f"{type(error)}:<'{error}'>".encode(errors="replace").decode(),
        "refused": any(kind.__name__ in REFUSALS for kind in type(error).__mro__),
        "unloadable": isinstance(error, CannotLoad),
        "memory": isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(word in words for word in MEMORY),
    }


def listen(path: Path) -> socket.socket:
    """Listen on a socket at ``path``, which may be longer than the system allows for sockets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.chdir(path.parent):
        listener.bind(path.name)
    path.chmod(0o666)  # its folder says who may connect
    listener.listen(16)
    return listener


def main() -> None:
    """Run this program until it is stopped."""
    sys.dont_write_bytecode = True  # the folders of apps have the files of the packages and nothing else
    listener = listen(Path(sys.argv[1]).absolute())
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # some belong to extras that are not installed
            importlib.import_module(name)
    gc.freeze()
    serve(listener)


if __name__ == "__main__":
    main()
