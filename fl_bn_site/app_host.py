"""Answer the messages that a SuperNode receives, in place of ``flower-superexec``.

Usage: ``python -P app_host.py --appio-api-address HOST:PORT``.

Flower 1.25 starts a new Python process for every message. That process imports torch and the app. This program makes
these imports once, with the following processes:

* The *host* asks the SuperNode for work: every 0.1 s while there is work and for a minute afterwards, else every 0.5 s. No other process
opens a gRPC connection before it has a message to answer.
* The *cold process* is forked at the start. It imports torch and Flower. It does not import fl-bn, since each
run brings its own version.
* The *warm process* is forked from the cold one. It imports the app of the last run. The process of the first message
of that run hands on the package, after it has checked it.
* Every message has a process of its own, as in Flower. It is forked from the warm process, or from the cold one
where there is no warm process yet. It ends after its message, so no message can affect the next one.
* A *watcher* waits for the process of each message. That process may die: out of memory, by a signal or by an
exit. Then the watcher tells the SuperNode why, and the SuperNode tells the server (``supernode.py``).

No process imports code that another one has unpacked. Each process that imports an app unpacks the package into a new
folder, ``apps/RANDOM/SHA256``. The folder is deleted when this process and its messages have ended. The warm process
ends when the policy of the site changes.

The SuperNode refuses runs by ``allow-code`` before their packages are kept (``admission.py``). The process of a
message checks the policy of the site (``policy.py``) again before it loads any code of the run. It writes a line of the
audit log (``audit.py``) before its answer leaves. This program belongs to the site, not to the run. It is therefore run
by its path, and loads the site's other modules by their paths. An import of ``fl_bn`` could find the version that the
run brings.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import io
import json
import os
import random
import resource
import runpy
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "fl_bn"  # the package fl_bn that is installed beside this one
PROGRAM = "flwr-clientapp"  # the program of Flower that the process of a message replaces
OURS = "fl-bn/fl-bn"  # the id of fl-bn's own app
INSTALLED = "fl_bn.apps.client"  # the app that runs where the policy allows only installed code
READY = b"1"
BUSY, IDLE, QUIET = 0.1, 0.5, 60.0  # seconds between two questions for work: BUSY, or IDLE after QUIET seconds without work
ED25519 = "cryptography.hazmat.primitives.asymmetric.ed25519"  # for the signatures of runs
PRELOADED = ("numpy", "scipy.linalg", "torch", "PIL.Image", "safetensors.torch", "threadpoolctl", "joblib", ED25519)
# scipy.linalg starts BLAS's threads at its import. They must not start in the warm process, which may have only one thread.
REFUSALS = ("NotAllowed", "Refused")  # errors by which the site's policy, or the app's gate, refuses a message
MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")  # parts of torch's and NumPy's error messages

find = runpy.run_path(str(PACKAGE / "flower" / "compat.py"))["find"]
endings = runpy.run_path(str(HERE / "endings.py"))


@dataclass(frozen=True)
class Request:
    """Identify one message that waits for its answer.

    Attributes:
        token: The token with which the message is fetched from the SuperNode; empty: no message waits, but the policy of
            the site has changed.
        code: The SHA-256 of the app's package as the server says it. It serves for comparisons alone.
    """

    token: str = ""
    code: str = ""


@dataclass(frozen=True)
class App:
    """Hold an app that is loaded.

    Attributes:
        code: The SHA-256 of the package from which it was loaded, in hexadecimal digits; ``INSTALLED``: it is the app of the
            fl-bn that is installed here.
        id: Its id, PUBLISHER/NAME, as its package has it.
        call: The ClientApp.
    """

    code: str
    id: str
    call: Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """Describe the site on whose machine this program runs.

    Attributes:
        address: The address on which the SuperNode listens for this program, HOST:PORT.
        home: The folder of this program, with the folder ``apps`` in which apps are unpacked.
        policy: The policy file of the site; None: the site has no policy, and everything is allowed.
        audit: The folder of the site's audit log; None: no log is written.
        cold_process: The id of the *cold process*, which has imported torch and Flower but no app. It forks a process for each
            message, or a warm process that does so. 0: the id is not known yet.
    """

    address: str
    home: Path
    policy: Path | None = None
    audit: Path | None = None
    cold_process: int = 0

    def new_folder(self) -> Path:
        """Return the path of a folder that does not exist, in which one process unpacks its app."""
        return self.home / "apps" / secrets.token_hex(16)


def policy_module() -> ModuleType:
    """Load the ``policy.py`` of this site."""
    return site_module("policy")


def policy_of(site: Site) -> Any:
    """Return the policy of the site; None: the policy file is wrong. The process of the next message reports the error."""
    try:
        return policy_module().Policy.read(site.policy)
    except ValueError:
        return None


def site_module(file: str) -> ModuleType:
    """Load ``FILE.py`` of this site.

    The module gets a name of its own, so that it cannot be confused with the same module in the code of a run.
    """
    name = f"{file}_of_this_site"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# The host


def ask_for_work(site: Site, hand_over: Callable[[Request], None], is_ready: Callable[[], bool]) -> None:
    """Ask the SuperNode for messages, and hand each one over. This function is the work of the host, and never returns.

    Args:
        site: The site.
        hand_over: Called with a ``Request`` for each message, and with an empty one when the policy of the site has changed.
            It passes the request to the cold process, which forks a process that answers the message.
        is_ready: Returns whether the cold process has finished its imports. Before that it cannot fork, so no message is
            taken: the SuperNode expects the first heartbeat from the forked process within half a minute.
    """
    stub = _stub(site)
    tell_end(stub, "", endings["RESTARTED"])  # the processes of an earlier start of this program have ended with it
    worked, policy = -QUIET, policy_of(site)
    while True:
        if (now := policy_of(site)) != policy:
            policy = now
            hand_over(Request())
        if runs := stub.ListAppsToLaunch(find("ListAppsToLaunchRequest")()).run_ids:
            if is_ready() and (token := stub.RequestToken(find("RequestTokenRequest")(run_id=runs[0])).token):
                run = find("run_from_proto")(stub.GetRun(find("GetRunRequest")(run_id=runs[0])).run)
                hand_over(Request(token, run.fab_hash))
            worked = time.monotonic()
        time.sleep(BUSY if time.monotonic() - worked < QUIET else IDLE)


# The cold and the warm process


def serve(lines: Iterable[str], site: Site, ready: Callable[[], None] = lambda: None) -> None:
    """Do the work of the cold process: import torch and Flower. Then, for each request, fork a process that answers it.

    Args:
        lines: One request per line, as JSON. The lines end when the host ends.
        site: The site.
        ready: Called when the imports are done.
    """
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # some belong to extras that are not installed
            importlib.import_module(name)
    find("pull_clientappinputs")  # imports Flower
    ready()
    site, warm, policy, brought = replace(site, cold_process=os.getpid()), None, policy_of(site), _new_file()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes children that have ended
    for line in lines:
        request, before, policy = Request(**json.loads(line)), policy, policy_of(site)
        installed = policy is not None and policy.allow_code == "installed"
        wanted = INSTALLED if installed else request.code
        if policy != before:
            brought = _new_file()
        if warm is not None and (warm.code != wanted or warm.died or policy != before):
            warm.close()
            warm = None
        if not request.token:
            continue
        if warm is None and policy is not None:
            brought.seek(0)
            package = brought.read()
            if installed or hashlib.sha256(package).hexdigest() == wanted:
                warm = WarmProcess(site, wanted, package, policy.memory())
        if warm is None or not warm.answer(line):
            brought = _new_file()
            fork(partial(watch, site, request, brought))
    if warm is not None:
        warm.close()


class WarmProcess:
    """Fork a process that imports an app once and answers requests for it.

    Where the app cannot be imported, the process ends, and ``answer`` returns False.

    Args:
        site: The site.
        code: The SHA-256 of the app's package; ``INSTALLED``: the installed app.
        package: The package.
        memory: The memory limit, in bytes; None: no limit.
    """

    def __init__(self, site: Site, code: str, package: bytes, memory: int | None) -> None:
        self.code, self.died = code, False
        out, self._lines = os.pipe()
        told, ready = os.pipe()

        def stay() -> None:
            os.close(self._lines)
            limit_memory(memory)
            sys.argv = [PROGRAM]  # an app may read this at its import, to find out whether it is deployed
            folder = site.new_folder()
            try:
                app = load(code, package, folder)
                if len(os.listdir("/proc/self/task")) > 1:
                    raise RuntimeError(
                        "the app starts threads when it is imported, so every message imports it anew (threads do not survive a fork)"
                    )
                os.write(ready, READY)
                os.close(ready)
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                with os.fdopen(out) as lines:
                    messages = [fork(partial(watch, site, Request(**json.loads(line)), app)) for line in lines]
                for message in messages:  # as long as it works, it may import more of the app
                    with suppress(ChildProcessError):
                        os.waitpid(message, 0)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        fork(stay)
        os.close(out)
        os.close(ready)
        self._usable = os.read(told, len(READY)) == READY  # nothing to read: the process has ended
        os.close(told)

    def answer(self, line: str) -> bool:
        """Pass a request to the warm process, which forks a process that answers it.

        Args:
            line: The request as one line of JSON.

        Returns:
            True: the warm process received the request. False: the warm process has ended.
        """
        try:
            if self._usable:
                os.write(self._lines, line.encode())
        except BrokenPipeError:
            self._usable, self.died = False, True
        return self._usable

    def close(self) -> None:
        """Let the process end. The processes that it has forked for messages keep running."""
        os.close(self._lines)


def _new_file() -> IO[bytes]:
    """Return a new file without a name, in which the process of a message hands on the package that it has checked."""
    return tempfile.TemporaryFile(buffering=0)


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


# One message


def watch(site: Site, request: Request, app: App | IO[bytes]) -> None:
    """Answer a message in a process of its own, and tell the SuperNode if that process dies.

    Args:
        site: The site.
        request: The message.
        app: The loaded app. Or a file: the process loads the app that the message brings, and writes its package into the file.
    """
    kills, folder = endings["out_of_memory_kills"](), site.new_folder()
    status = os.waitpid(fork(lambda: answer(site, request, app, folder)), 0)[1]
    for_memory = endings["out_of_memory_kills"]() > kills
    if why := endings["ending"](os.waitstatus_to_exitcode(status), for_memory):
        print(f"the process that worked on a message {why}; the server gets this reason as an error", file=sys.stderr, flush=True)
        tell_end(_stub(site), request.token, f"its process {why}")
    shutil.rmtree(folder, ignore_errors=True)


def tell_end(stub: Any, token: str, why: str) -> None:
    """Tell the SuperNode that the process with this ``token`` has ended, and ``why``. Empty ``token``: all processes have ended."""
    stub.SendAppHeartbeat(find("SendAppHeartbeatRequest")(token=token), metadata=((endings["ENDED"], why.encode()),))


def answer(site: Site, request: Request, app: App | IO[bytes], folder: Path) -> None:
    """Answer one message in this process, if the policy of the site allows it.

    Args:
        site: The site.
        request: The message to fetch and answer.
        app: The loaded app, or a file, as for ``watch``.
        folder: The path of a new folder, in which this process may unpack an app.
    """
    find("start_parent_process_monitor")(site.cold_process)
    sys.argv = [PROGRAM]
    random.seed()  # else all forks would draw the same numbers
    with suppress(ImportError):
        importlib.import_module("numpy").random.seed()
    stub = _stub(site)
    beat = find("HeartbeatSender")(find("make_app_heartbeat_fn_grpc")(stub, request.token))
    beat.start()
    message, context, run, fab = find("pull_clientappinputs")(stub=stub, token=request.token)
    record = Record(site, message, context.run_config, fab.content)
    try:
        policy = policy_module().Policy.read(site.policy)
        policy.check_run(context.run_config)
        decision = policy.decide(run.fab_hash, fab.content, run.override_config, PACKAGE)
        decision.enforce()
        record.submitted_by(decision.submitter)
        limit_memory(policy.memory())
        code = INSTALLED if policy.allow_code == "installed" else decision.code
        if not isinstance(app, App):
            with suppress(OSError):  # on a full disk, the next message imports the app anew, too
                app.write(fab.content)
            app = load(code, fab.content, folder)
        if app.code != code:
            raise CannotLoad("this site has loaded another package than the one that came with the message")
        record.listen()
        given, context.node_config = context.node_config, policy.limits(placed(context, app.id))
        try:
            reply = _within_memory(policy, lambda: app.call(message=message, context=context))
        finally:
            context.node_config = given
        policy.check_reply(*policy_module().summary_of(reply))
        reply = record.checked(reply)
    except Exception as error:
        reply = record.failed(error)
    find("push_clientappoutputs")(stub=stub, token=request.token, message=reply, context=context)
    beat.stop()


def placed(context: Any, app: str) -> dict[str, Any]:
    """Return the node config of a message, with the number of the client for apps other than fl-bn's.

    Such apps read ``partition-id`` (the number of the client, from 0) and ``num-partitions`` (the number of clients). fl-bn's
    app finds its number by itself.

    Args:
        context: Flower's context of the message.
        app: The id of the app, PUBLISHER/NAME.
    """
    node, nodes = dict(context.node_config), str(context.run_config.get("client-nodes", "")).split(",")
    if app != OURS and str(context.node_id) in nodes:
        node |= {"partition-id": nodes.index(str(context.node_id)), "num-partitions": len(nodes)}
    return node


class Record:
    """Log the content of the answer to one message in the site's audit log, before the answer leaves the site.

    Args:
        site: The site.
        message: The message.
        run_config: The run config.
        fab: The archive of the run's app.
    """

    def __init__(self, site: Site, message: Any, run_config: Any, fab: bytes) -> None:
        self._folder, self._message = site.audit, message
        if self._folder is not None:
            self._about = site_module("leaving").about(message, run_config, hashlib.sha256(fab).hexdigest())

    def submitted_by(self, name: str) -> None:
        """Add the ``name`` of the run's submitter to all further lines. Empty: the site does not know the submitter."""
        if self._folder is not None:
            self._about["submitter"] = name or None

    def listen(self) -> None:
        """Begin to write a line, too, for each vector that the app sends in a layer-wise exchange (as in FedTAN).

        These vectors are sent while the app works on the message. They are not part of its answer.
        """
        if self._folder is not None and (departures := sys.modules.get("fl_bn.support.departures")) is not None:
            exchanged, asked = site_module("leaving").exchanged, self._message.metadata.message_type
            departures.listen(lambda *vector: self._write({"message": "exchange", **exchanged(asked, *vector)}))

    def checked(self, reply: Any) -> Any:
        """Write the line about ``reply``, an answer of the app, and return ``reply``.

        Raises:
            AuditError: The line cannot be written.
        """
        if self._folder is not None:
            self._write(site_module("leaving").answered(self._message.metadata.message_type, reply))
        return reply

    def failed(self, error: Exception) -> Any:
        """Write the line about an error, and return a reply that has the error in place of an answer.

        If the line cannot be written to the audit log, the reply has the ``AuditError`` about this instead.
        """
        reply = _error(self._message, error)
        refusal = "refused" if any(kind.__name__ in REFUSALS for kind in type(error).__mro__) else "failed"
        try:
            if self._folder is not None:
                self._write(site_module("leaving").answered(self._message.metadata.message_type, reply, refusal))
        except site_module("audit").AuditError as unwritten:
            return _error(self._message, unwritten)
        return reply

    def _write(self, entry: dict[str, Any]) -> None:
        site_module("audit").append(self._folder, {**self._about, **entry})


class CannotLoad(Exception):
    """Signal that the package of a run cannot be unpacked, or is not the one that this process has loaded."""


def load(code: str, package: bytes, folder: Path) -> App:
    """Unpack an app into a new folder, and load it.

    Args:
        code: The SHA-256 of the package, which names the new folder; ``INSTALLED``: load the app of the fl-bn that is installed
            here, and unpack nothing.
        package: The package (FAB archive), which the caller has checked.
        folder: The folder in which the new folder is made.

    Raises:
        CannotLoad: The package is damaged, or holds no Flower app.
    """
    if code == INSTALLED:
        return App(code, OURS, importlib.import_module(INSTALLED).app)
    try:
        (place := folder / code).mkdir(parents=True)
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            archive.extractall(place)  # nothing lands outside: it leaves out ``..`` and the root of paths, and makes no links
        app_id, version = find("get_metadata_from_config")(find("get_project_config")(place))
    except Exception as error:  # zipfile, tomllib and Flower may raise anything
        raise CannotLoad(f"this site cannot unpack the app of the run ({error}): pack and submit it anew") from error
    return App(code, app_id, find("get_load_client_app_fn")("", app_path=str(place), multi_app=True)(app_id, version, ""))


def limit_memory(most: int | None) -> None:
    """Limit the memory for data of this process, and of each process that it forks, to ``most`` bytes; None: no limit."""
    if most is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most if hard == resource.RLIM_INFINITY else min(most, hard)))


def _within_memory(policy: Any, work: Callable[[], Any]) -> Any:
    """Return the result of ``work``.

    Where an allocation fails and the policy has ``max-memory``, raise NotAllowed, with a message that names ``max-memory``.
    """
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        words = str(error).lower()
        if policy.max_memory is None or not (isinstance(error, MemoryError) or any(word in words for word in MEMORY)):
            raise
        raise policy_module().NotAllowed(f"this site's policy has max-memory = {policy.max_memory:g} GB, and the run needs more") from error


def _error(message: Any, error: Exception) -> Any:
    """Return the reply that Flower sends when a ClientApp raises ``error``."""
    from flwr.app import Error, Message

    print(endings["in_words"](error), file=sys.stderr, flush=True)
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
    made.add_argument("--appio-api-address", required=True, help="address on which the SuperNode listens, HOST:PORT")
    made.add_argument("--policy", type=Path, help="the site's policy file")
    made.add_argument("--audit", type=Path, help="the folder of the site's audit log; without it no log is written")
    made.add_argument("--health-server-address", help="address on which to answer health checks, HOST:PORT")
    return made


def main() -> None:
    """Run this program: fork the cold process, and ask the SuperNode for messages until that process ends.

    Raises:
        SystemExit: Flower has another version, the policy file is wrong, or the cold process has ended.
    """
    given = parser().parse_args()
    try:
        runpy.run_path(str(PACKAGE / "flower" / "compat.py"))["check_deployed"]("fl-bn's host of ClientApps")
        policy_module().Policy.read(given.policy)
    except ValueError as error:
        sys.exit(str(error))
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr" / "fl-bn")).absolute()
    site = Site(given.appio_api_address, home, given.policy, given.audit and given.audit.absolute())
    apps = home / "apps"  # what is there is of earlier starts of this program
    apps.unlink() if apps.is_symlink() else shutil.rmtree(apps, ignore_errors=True)

    requests, lines = os.pipe()
    told, ready = os.pipe()

    def stay() -> None:  # forked before gRPC is imported, since gRPC does not survive a fork
        os.close(lines)
        with os.fdopen(requests) as stream:
            serve(stream, site, lambda: os.close(ready))  # when ``ready`` is closed, ``told`` can be read

    fork(stay)
    os.close(requests)
    os.close(ready)
    signal.signal(
        signal.SIGCHLD, lambda number, frame: sys.exit("the process that answers the messages has ended: start this program again")
    )

    def hand_over(request: Request) -> None:
        os.write(lines, (json.dumps(asdict(request)) + "\n").encode())

    health = find("run_health_server_grpc_no_tls")(given.health_server_address) if given.health_server_address else None
    ask_for_work(site, hand_over, lambda: bool(select.select([told], [], [], 0)[0]))
    del health  # kept until here: a gRPC server stops as soon as no variable refers to it


if __name__ == "__main__":
    main()
