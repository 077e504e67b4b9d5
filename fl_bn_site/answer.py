"""Answer one message at a site's gate: check it, write the audit log, and let an app answer in a process of its own."""

from __future__ import annotations

import copy
import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

from fl_bn.support.flower_config import OUR_APP
from fl_bn_site import audit, leaving, wire
from fl_bn_site.apps import PACKET, Job
from fl_bn_site.packages import PackageError, unpack
from fl_bn_site.policy import INSTALLED, NotAllowed, Policy, PolicyError
from fl_bn_site.signing import NotSigned, admit

UNLOADABLE, RAISED, DIED = 1, 2, 8  # Flower's error codes
LONGEST = 7 * 86400.0  # seconds that an app may work on a message, whatever deadline the server sets
ABSENT = 15.0  # seconds for which the gate looks for the program that runs the apps
NOBODY = f"the program that runs its ClientApps does not answer for {ABSENT:.0f} s: read the output of `fl-bn start` there"
RESTARTED = "the program that runs its ClientApps was restarted while it worked on the message"
LATE = "its process did not answer before the deadline of the message, and was ended"


@dataclass(frozen=True)
class Site:
    """Hold what the gate knows of its site.

    Attributes:
        home: The folder of the gate, which other users may not enter.
        policy: The site's policy file.
        audit: The folder of the audit log.
        packages: The folder in which packages are unpacked. The apps may read it.
        apps: The socket of the program that runs the apps.
    """

    home: Path
    policy: Path
    audit: Path
    packages: Path
    apps: Path


class AppError(Exception):
    """Signal that an app gave no answer.

    Attributes:
        code: Flower's code of the error.
        refused: Whether the app itself refused the message.
    """

    def __init__(self, reason: str, code: int, refused: bool = False) -> None:
        super().__init__(reason)
        self.code, self.refused = code, refused


class Answer:
    """Answer one message in place of the functions with which Flower installs, loads and calls a ClientApp.

    Args:
        site: The site.
    """

    def __init__(self, site: Site) -> None:
        self.site, self.package = site, b""

    def install(self, package: bytes, *_: Any, **__: Any) -> Path:
        """Keep the package. Nothing of it is unpacked before the message is checked."""
        self.package = package
        return self.site.packages

    def loader(self, *_: Any, **__: Any) -> Callable[..., Callable[..., Message]]:
        """Return a function that takes the server's name of the app and returns the ClientApp: this gate."""
        return lambda app, *_, **__: lambda message, context: self.answer(str(app), message, context)

    def answer(self, app: str, message: Message, context: Context) -> Message:
        """Return the answer to a message: an app's, or an error.

        Its line in the audit log is on the disk before this function returns.

        Args:
            app: The id of the app, PUBLISHER/NAME, as the server says it. It decides on ``placed`` alone.
            message: The message.
            context: Its context. ``context.state`` is replaced by what the app left there.
        """
        about = leaving.about(message, context.run_config, hashlib.sha256(self.package).hexdigest())
        kind = message.metadata.message_type

        def log(entry: Mapping[str, Any]) -> None:
            audit.append(self.site.audit, {**about, **entry})

        refusal = "failed"
        try:
            policy = self._checked(context, about)
            given = copy.copy(context)
            given.node_config = policy.limits(placed(context, app))

            def leaves(entry: Mapping[str, Any], samples: int = 0) -> None:
                policy.check_leaving(entry["sections"], samples)
                log(entry)

            reply, state = self._ask(policy, about["code"], message, given, lambda *vector: leaves(leaving.exchanged(*vector)))
            leaves(leaving.answered(kind, reply), 0 if reply.has_error() else leaving.fewest(reply.content.metric_records))
        except AppError as error:
            refusal = "refused" if error.refused else refusal
            reply = _error(message, str(error), error.code)
        except Exception as error:  # whatever the server or the app has sent, what leaves has a line
            refusal = "refused" if isinstance(error, NotAllowed) else refusal
            reply = _error(message, f"{type(error)}:<'{error}'>", UNLOADABLE if isinstance(error, PackageError) else RAISED)
        else:
            context.state = state
            return reply
        try:
            log(leaving.answered(kind, reply, refusal))
        except audit.AuditError as error:
            reply = _error(message, f"{type(error)}:<'{error}'>", RAISED)
        print(f"a {kind} message gets an error as its answer: {reply.error.reason}", file=sys.stderr, flush=True)  # last, as it may fail
        return reply

    def _checked(self, context: Context, about: dict[str, Any]) -> Policy:
        """Check package and run config by the site's policy, and enter the submitter in ``about``.

        Raises:
            NotAllowed: The policy refuses the run.
        """
        if str(context.run_id) != about["run"]:  # Flower 1.42 keeps one context for a series of runs, which the server chooses
            raise NotAllowed(f"the message is of run {about['run']}, and its context of run {context.run_id}")
        try:
            policy = Policy.read(self.site.policy)
            policy.check_run(context.run_config)
            if signature := policy.check_package(self.package, context.run_config):
                about["submitter"] = signature.submitter.name
                # what the site keeps of a run is in a folder of the run's name
                if about["name"] not in (None, *(leaving.text(context.run_config.get(key)) for key in ("name", "resume"))):
                    raise NotSigned(f"the message is of the run {about['name']}, which the signature does not name")
                if admit(self.site.home / "accepted", context.run_id, signature, about["code"]):
                    print(f"run {context.run_id} is admitted: signed by {signature.submitter}, code {about['code']}", file=sys.stderr)
        except PolicyError as error:
            raise NotAllowed(str(error)) from error
        except NotSigned as error:
            raise NotAllowed(f"{policy.has_code()}, but {error}") from error
        except OSError as error:
            raise NotAllowed(f"this site cannot read what it needs, or write down that it accepted the run: {error}") from error
        return policy

    def _ask(self, policy: Policy, code: str, message: Message, context: Context, log: Callable[..., None]) -> tuple[Message, Any]:
        """Let the app answer.

        Args:
            policy: The policy of the site.
            code: The SHA-256 of the package.
            message: The message.
            context: Its context.
            log: Checks a vector of a layer-wise exchange by the policy, and writes a line of the audit log about it, before it leaves.

        Returns:
            The answer, and the state of the client.

        Raises:
            AppError: The app raised an error, or its process ended.
            NotAllowed: The policy does not allow a vector to leave.
            WireError: The process sent something that is no answer.
            PackageError, OSError: The package cannot be unpacked.
            AuditError: The audit log cannot be written.
        """
        told = hashlib.sha256(repr(policy).encode()).hexdigest()
        folder = "" if policy.allow_code == INSTALLED else str(unpack(self.site.packages, self.package, told))
        with connect(self.site.apps, Job(code if folder else "", folder, told, policy.memory())) as (control, data):
            seconds = min(LONGEST, message.metadata.ttl)
            end = time.monotonic() + seconds
            deadline = threading.Timer(seconds, data.shutdown, (socket.SHUT_RDWR,))
            deadline.start()
            try:
                wire.send_message(data, message, context)
                while "exchange" in (header := wire.receive(data))[0]:
                    section, nbytes, samples = header[0]["exchange"]
                    log(str(section), int(nbytes), int(samples))
                    wire.send(data, {})
            except (EOFError, OSError):
                if time.monotonic() >= end:
                    raise AppError(LATE, DIED) from None
                control.settimeout(ABSENT)
                raise AppError(control.recv(PACKET).decode(errors="replace") or RESTARTED, DIED) from None
            finally:
                deadline.cancel()
        return _read(message, policy, *header)


def _read(message: Message, policy: Policy, header: Mapping[str, Any], blobs: list[bytes]) -> tuple[Message, Any]:
    """Return the answer and the client's state that the process of an app sent."""
    if "error" in header:
        if header.get("memory") and policy.max_memory is not None:
            raise NotAllowed(f"this site's policy has max-memory = {policy.max_memory:g} GB, and the run needs more")
        code = UNLOADABLE if header.get("unloadable") else RAISED
        raise AppError(str(header["error"]), code, header.get("refused") is True)
    state = wire.records_of(header.get("state"), blobs)
    if "reply" in header:
        return Message(wire.records_of(header["reply"], blobs), reply_to=message), state
    return _error(message, str(header.get("reason")), RAISED), state


def _error(message: Message, reason: str, code: int) -> Message:
    return Message(Error(code=code, reason=leaving.text(reason)), reply_to=message)  # as the log has it


@contextmanager
def connect(apps: Path, job: Job) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give a job to the program that runs the apps.

    Args:
        apps: The socket of that program.
        job: The job.

    Yields:
        A connection on which that program says how the process of the app ended, and a connection to this process.

    Raises:
        AppError: The program does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        end = time.monotonic() + ABSENT
        with chdir(apps.parent):  # the path of a socket must be short
            while control.connect_ex(apps.name):
                if time.monotonic() > end:
                    raise AppError(NOBODY, DIED)
                time.sleep(0.1)
        data, theirs = socket.socketpair()
        with data:
            with theirs:
                socket.send_fds(control, [json.dumps(asdict(job)).encode()], [theirs.fileno()])
            yield control, data


def placed(context: Context, app: str) -> dict[str, Any]:
    """Return the node config of a message, with the number of the client for apps other than fl-bn's.

    Such apps read ``partition-id`` (the number of the client, from 0) and ``num-partitions`` (the number of clients). fl-bn's
    app finds its number by itself.

    Args:
        context: Flower's context of the message.
        app: The id of the app, PUBLISHER/NAME.
    """
    node, nodes = dict(context.node_config), str(context.run_config.get("client-nodes", "")).split(",")
    if app != OUR_APP and str(context.node_id) in nodes:
        node |= {"partition-id": nodes.index(str(context.node_id)), "num-partitions": len(nodes)}
    return node
