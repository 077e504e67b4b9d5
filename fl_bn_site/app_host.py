"""Run a SuperNode's ClientApp, in place of ``flower-superexec``: ``python -P app_host.py --appio-api-address HOST:PORT``.

Flower 1.25 starts a Python process for every message, which imports torch, unpacks the app and imports it. Here
these imports happen once:

* The *host* asks the SuperNode for work, every 0.1 s while there is some. No other process talks gRPC before it
has a message.
* The *cold process* is forked at the start. It has imported torch and Flower, but no fl-bn: the run brings
that.
* The *warm process* is forked from the cold one. It has imported the app of the last run, from the folder where
the run's first message unpacked it.
* Every message has a process of its own, as in Flower. It is forked from the warm process, or from the cold one
where there is no warm process yet. What a message changes in its process ends with the process, and the memory
is the system's again.

A site's policy (``policy.py``) is checked in the message's process before any code of the run is loaded. This
program, which is the site's own, checks it. It is run by its path, and loads ``compat`` and ``policy`` by
theirs: the package around them may be the run's.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "fl_bn"  # beside this one
PROGRAM = "flwr-clientapp"  # Flower's, whose place a message's process takes
INSTALLED = "fl_bn.apps.client"  # what runs where the policy allows only code that is installed
READY = b"1"
BUSY, IDLE, QUIET = 0.1, 0.5, 60.0  # seconds: between questions for work; the same after so many seconds without any
PRELOADED = ("numpy", "torch", "PIL.Image", "safetensors.torch", "threadpoolctl", "joblib")
MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")  # torch's and NumPy's words

find = runpy.run_path(str(PACKAGE / "flower" / "compat.py"))["find"]


@dataclass(frozen=True)
class Request:
    """Describe one message to answer.

    Attributes:
        token: The SuperNode's token for it.
        fab_id: The app that it is for: PUBLISHER/NAME.
        fab_version: The app's version.
        fab_hash: The app's SHA-256.
    """

    token: str
    fab_id: str
    fab_version: str
    fab_hash: str


@dataclass(frozen=True)
class Site:
    """Describe the site.

    Attributes:
        address: Where the SuperNode listens.
        home: Where apps are unpacked.
        policy: The site's policy file; None: there is none.
        cold_process: The process id of the cold process.
    """

    address: str
    home: Path
    policy: Path | None = None
    cold_process: int = 0

    def app_folder(self, request: Request) -> Path:
        """Return the folder in which the app is, or will be, unpacked. Flower gives it this name."""
        publisher, _, name = request.fab_id.partition("/")
        return self.home / "apps" / f"{publisher}.{name}.{request.fab_version}.{request.fab_hash[:8]}"


def policy_module() -> ModuleType:
    """Load ``policy.py`` under a name of its own, since a run may bring another."""
    name = "policy_of_this_site"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "policy.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# The host


def ask_for_work(site: Site, hand_over: Callable[[Request], None]) -> None:
    """Ask the SuperNode for messages, for ever, and hand over a request for each."""
    stub = _stub(site)
    worked = -QUIET
    while True:
        if runs := stub.ListAppsToLaunch(find("ListAppsToLaunchRequest")()).run_ids:
            if token := stub.RequestToken(find("RequestTokenRequest")(run_id=runs[0])).token:
                run = find("run_from_proto")(stub.GetRun(find("GetRunRequest")(run_id=runs[0])).run)
                hand_over(Request(token, run.fab_id, run.fab_version, run.fab_hash))
            worked = time.monotonic()
        time.sleep(BUSY if time.monotonic() - worked < QUIET else IDLE)


# The cold and the warm process


def serve(lines: Iterable[str], site: Site) -> None:
    """Be the cold process: answer each request in a process of its own.

    Args:
        lines: The requests as JSON, until the host ends.
        site: The site.
    """
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # of an extra
            importlib.import_module(name)
    find("pull_clientappinputs")  # imports Flower
    site, warm = replace(site, cold_process=os.getpid()), None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets them
    for line in lines:
        request = Request(**json.loads(line))
        key = _warm_key(site, request)
        if warm is not None and warm.key != key:
            warm.close()
            warm = None
        if warm is None and key is not None:
            warm = WarmProcess(site, request, key)
        if warm is None or not warm.answer(line):
            fork(lambda request=request: answer(site, request, None))  # type: ignore[misc]
    if warm is not None:
        warm.close()


class WarmProcess:
    """Fork a process that imports the app of ``request``. It is not usable where the app cannot be imported.

    Args:
        site: The site.
        request: The first request.
        key: See ``_warm_key``.
    """

    def __init__(self, site: Site, request: Request, key: tuple[str, int | None]) -> None:
        self.key = key
        out, self._lines = os.pipe()
        told, ready = os.pipe()

        def stay() -> None:
            os.close(self._lines)
            limit_memory(key[1])
            sys.argv = [PROGRAM]  # an app may ask, when it is imported, whether it is deployed
            app = load(site, request, key[0] == INSTALLED)
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError("the app starts threads when it is imported: every message imports it anew")
            os.write(ready, READY)
            os.close(ready)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            with os.fdopen(out) as lines:
                for line in lines:
                    one = Request(**json.loads(line))
                    fork(lambda one=one: answer(site, one, app))  # type: ignore[misc]

        fork(stay)
        os.close(out)
        os.close(ready)
        self._usable = os.read(told, len(READY)) == READY  # else it has ended
        os.close(told)

    def answer(self, line: str) -> bool:
        """Hand over a request. Return False where the process is not usable."""
        try:
            if self._usable:
                os.write(self._lines, line.encode())
        except BrokenPipeError:
            self._usable = False
        return self._usable

    def close(self) -> None:
        """Let the process end. What it has forked goes on."""
        os.close(self._lines)


def _warm_key(site: Site, request: Request) -> tuple[str, int | None] | None:
    """Return which app and memory limit a warm process for the request would have.

    None: it cannot have any, since the app is not unpacked yet, or the policy is wrong.
    """
    try:
        policy = policy_module().Policy.read(site.policy)
    except ValueError:
        return None  # the message's process says so
    if policy.allow_code == "installed":
        return INSTALLED, policy.memory()
    folder = site.app_folder(request)
    return (folder.name, policy.memory()) if folder.is_dir() else None


def fork(work: Callable[[], None]) -> int:
    """Fork this process. The child does ``work`` and ends. Return the child's process id."""
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


# One message


def answer(site: Site, request: Request, app: Any) -> None:
    """Answer one of Flower's messages in this process, under the site's policy.

    Args:
        site: The site.
        request: The message to fetch and answer.
        app: The loaded app that makes the reply; None: the message's app is unpacked and loaded first.
    """
    find("start_parent_process_monitor")(site.cold_process)
    sys.argv = [PROGRAM]
    random.seed()  # forks would draw the same
    with suppress(ImportError):
        importlib.import_module("numpy").random.seed()
    stub = _stub(site)
    beat = find("HeartbeatSender")(find("make_app_heartbeat_fn_grpc")(stub, request.token))
    beat.start()
    message, context, run, fab = find("pull_clientappinputs")(stub=stub, token=request.token)
    try:
        policy = policy_module().Policy.read(site.policy)
        policy.check_run(context.run_config)
        policy.check_code(fab.content, PACKAGE)
        limit_memory(policy.memory())
        if app is None:
            unpack(site, request, fab.content, policy.allow_code)
            app = load(site, request, policy.allow_code == "installed")
        given, context.node_config = context.node_config, policy.limits(context.node_config)
        try:
            reply = _within_memory(policy, lambda: app(message=message, context=context))
        finally:
            context.node_config = given
        policy.check_reply(*_summary_of(reply))
    except Exception as error:
        reply = _error(message, error)
    find("push_clientappoutputs")(stub=stub, token=request.token, message=reply, context=context)
    beat.stop()


def unpack(site: Site, request: Request, fab: bytes, code: str) -> None:
    """Unpack the app beside the others, completely or not at all."""
    folder = site.app_folder(request)
    if code == "installed" or folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as made:
        find("install_from_fab")(fab, flwr_dir=Path(made), skip_prompt=True)
        with suppress(OSError):  # another message was faster
            shutil.move(str(Path(made) / "apps" / folder.name), folder)


def load(site: Site, request: Request, installed: bool) -> Any:
    """Load the ClientApp of the request: the unpacked one, or that of fl-bn as ``installed`` here."""
    if installed:
        return importlib.import_module(INSTALLED).app
    load_app = find("get_load_client_app_fn")(default_app_ref="", app_path=None, multi_app=True, flwr_dir=str(site.home))
    return load_app(request.fab_id, request.fab_version, request.fab_hash)


def limit_memory(most: int | None) -> None:
    """Let this process, and those that it forks, each hold at most ``most`` bytes of data; None: no limit."""
    if most is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most if hard == resource.RLIM_INFINITY else min(most, hard)))


def _within_memory(policy: Any, work: Callable[[], Any]) -> Any:
    """Do ``work``. Where the policy limits memory, an allocation that fails is reported as its refusal."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        words = str(error).lower()
        if policy.max_memory is None or not (isinstance(error, MemoryError) or any(word in words for word in MEMORY)):
            raise
        raise policy_module().NotAllowed(f"this site's policy has max-memory = {policy.max_memory:g} GB, and the run needs more") from error


def _summary_of(reply: Any) -> tuple[int | None, dict[str, int]]:
    """Return how many samples a reply summarises, if it says so, and how many values each of its statistics does."""
    if reply.has_error():
        return None, {}
    samples = [record["samples"] for record in reply.content.metric_records.values() if "samples" in record]
    moments = reply.content.array_records.get("fl-bn/moments", {})
    counts = {name: int(array.numpy().max()) for name, array in moments.items() if name.endswith("count")}
    return (int(samples[0]) if samples else None), counts


def _error(message: Any, error: Exception) -> Any:
    """Return the reply that Flower makes where a ClientApp raises."""
    from flwr.app import Error, Message

    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    code = find("ErrorCode")
    kind = code.LOAD_CLIENT_APP_EXCEPTION if type(error).__name__ == "LoadClientAppError" else code.CLIENT_APP_RAISED_EXCEPTION
    return Message(Error(code=kind, reason=f"{type(error)}:<'{error}'>"), reply_to=message)


def _stub(site: Site) -> Any:
    stub = find("ClientAppIoStub")(find("create_channel")(server_address=site.address, insecure=True, root_certificates=None))
    find("_wrap_stub")(stub, find("_make_simple_grpc_retry_invoker")())
    return stub


def parser() -> argparse.ArgumentParser:
    """Return the parser of this program's command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--appio-api-address", required=True, help="where the SuperNode listens")
    made.add_argument("--policy", type=Path, help="the site's policy file")
    made.add_argument("--health-server-address", help="where to answer health checks")
    return made


def main() -> None:
    """Run the host until it is killed, or the cold process ends."""
    given = parser().parse_args()
    try:
        runpy.run_path(str(PACKAGE / "flower" / "compat.py"))["check_deployed"]("fl-bn's host of ClientApps")
        policy_module().Policy.read(given.policy)
    except ValueError as error:
        sys.exit(str(error))
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")).absolute()
    site = Site(given.appio_api_address, home, given.policy)

    requests, lines = os.pipe()

    def stay() -> None:  # before gRPC is here, which does not survive a fork
        os.close(lines)
        with os.fdopen(requests) as stream:
            serve(stream, site)

    fork(stay)
    os.close(requests)
    signal.signal(signal.SIGCHLD, lambda number, frame: sys.exit("the process that starts those of the messages has ended"))

    def hand_over(request: Request) -> None:
        os.write(lines, (json.dumps(asdict(request)) + "\n").encode())

    health = find("run_health_server_grpc_no_tls")(given.health_server_address) if given.health_server_address else None
    ask_for_work(site, hand_over)
    del health  # a gRPC server that nothing refers to stops


if __name__ == "__main__":
    main()
