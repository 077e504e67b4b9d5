"""Talk to a SuperLink through Flower's command ``flwr``, which answers in JSON.

That command tells neither the run config of a run nor the key of a node. So fl-bn notes both, beside the SuperLink's database:
``submitted.jsonl`` has a line per run, and ``keys.json`` the node that each public key was registered as.
"""

from __future__ import annotations

import hashlib
import io
import json
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fl_bn.support.durable import append, write
from fl_bn.support.flower_config import OF_OUR_APP, OUR_APP, Scalar, flower_config
from fl_bn_site.certificates import read_public
from fl_bn_site.commands import environment, local, of_1_25, program
from fl_bn_site.folders import ServerFolder
from fl_bn_site.membership import owner

NAME = "deployment"  # what Flower calls the SuperLink here
# how lines of ``flwr`` begin that stand before the reason of an error, or before a log
PREAMBLE = ("Loading project configuration", "Success", "Creating a new `.gitignore`", "Using SuperLink")
ANSWER = 120.0  # seconds that ``flwr`` may take to answer; ``flwr run`` sends the whole package
QUIET = 30.0  # seconds without a line of a log after which the run's status is asked for
SILENCE = 600.0  # seconds without an answer after which the SuperLink counts as lost
SUPERLINK = """
[tool.flwr.federations.deployment]
address = {address}
root-certificates = {authority}
"""
PROJECT = """
[project]
name = "fl-bn-federation"
version = "0.1.0"

[tool.flwr.app]
publisher = "fl-bn"

[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "none:app"
"""


class ControlError(RuntimeError):
    """Signal that the SuperLink cannot be asked, does not answer, refuses a request, or does not know a run or a key.

    If Flower gave a message, the error includes that message.
    """


class KeyRefused(RuntimeError):
    """Signal that the SuperLink refuses the keys of some sites. The message names them, and says what to do."""


@dataclass(frozen=True)
class Node:
    """Describe a SuperNode that is registered at the SuperLink.

    Attributes:
        id: Flower's id of the node.
        online: Whether the node is connected now.
        seen: When the node was connected last; None: it was never connected.
    """

    id: int
    online: bool
    seen: datetime | None


@dataclass(frozen=True)
class Submitted:
    """Describe a run that was submitted to the SuperLink.

    Attributes:
        id: Flower's id of the run.
        status: Flower's status: ``pending``, ``starting``, ``running``, ``finished:completed`` or another.
        config: The run config that was submitted with the run; empty: fl-bn did not submit it from this folder.
        submitted: When the run was submitted; None: Flower does not tell.
        ended: When the run ended; None: it has not ended.
        started: When the run began; None: it has not begun.
        nbytes: The numbers of bytes so far, as a pair: received from the sites, sent to the sites.
        code: The SHA-256 of the package (FAB archive) that the sites receive; empty: not known.
        app: The id of the app, PUBLISHER/NAME; empty: not known.
    """

    id: int
    status: str
    config: Mapping[str, Any]
    submitted: datetime | None
    ended: datetime | None
    started: datetime | None = None
    nbytes: tuple[int, int] = (0, 0)
    code: str = ""
    app: str = ""

    @property
    def own(self) -> bool:
        """Return whether the run's app is a user's own Flower app. False: it is fl-bn's app, or is not known."""
        return self.app not in ("", OUR_APP) and not all(key in self.config for key in OF_OUR_APP)

    @property
    def name(self) -> str:
        """Return the name of the run's folder; empty where fl-bn did not submit the run."""
        return str(self.config.get("resume") or self.config.get("name") or "")


@dataclass(frozen=True)
class Control:
    """Talk to the Control API of one SuperLink.

    Every method raises ControlError where the SuperLink does not answer or refuses the request.

    Attributes:
        address: The address of the Control API, HOST:PORT.
        server: The server's folder.
        home: A folder that tells ``flwr`` the address and the authority.
    """

    address: str
    server: ServerFolder
    home: Path

    def ask(self, *words: str) -> dict[str, Any]:
        """Run ``flwr WORDS --format json``, and return the JSON object that it prints."""
        pipe, called = subprocess.PIPE, f"flwr {' '.join(words[:2])}"
        argv = self._flwr(*words, "--format", "json")
        with subprocess.Popen(argv, env=self._environment(), cwd=self.home, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                out, err = process.communicate(timeout=ANSWER)
            except subprocess.TimeoutExpired:  # ``flwr`` may hang after it has printed its answer
                process.kill()
                out, err = process.communicate()
        _, brace, rest = out.partition("{")
        try:
            answer: dict[str, Any] = json.loads(brace + rest)
        except json.JSONDecodeError:
            answer = {"error-message": (out + err).strip()}
        if not answer.get("success"):
            lines = [line for line in str(answer.get("error-message", "")).splitlines() if line.strip() and not line.startswith(PREAMBLE)]
            reason = " ".join(lines[-3:]) or f"`{called}` ended with exit code {process.returncode} and printed nothing"
            raise ControlError(f"the SuperLink at {self.address}: {reason}")
        return answer

    def register(self, public_key: Path) -> int:
        """Let the site with this public key connect, and return its node id."""
        return int(self.ask("supernode", "register", str(public_key))["node-id"])

    def nodes(self) -> dict[int, Node]:
        """Return the nodes that may connect, by their ids."""
        found = {}
        for told in self.ask("supernode", "list")["nodes"]:
            if told["status"] in ("registered", "online", "offline"):
                online = told["status"] == "online"
                seen = datetime.now().astimezone() if online else _time(told["offline-at"])
                found[int(told["node-id"])] = Node(int(told["node-id"]), online, seen)
        return found

    def start_run(self, package: bytes, run_config: Mapping[str, Scalar]) -> str:
        """Submit a package (FAB archive) to the SuperLink, which starts it as a run. Return Flower's id of the run.

        Raises:
            ControlError: Also where Flower would pack the package anew with other bytes than those that were signed.
        """
        code = hashlib.sha256(package).hexdigest()
        with tempfile.TemporaryDirectory(prefix="fl-bn-") as folder:
            app = Path(folder) / "app"
            with zipfile.ZipFile(io.BytesIO(package)) as archive:
                archive.extractall(app)
            if of_1_25():  # its ``flwr run`` reads the address there, and does not pack it
                with (app / "pyproject.toml").open("a", encoding="utf-8") as file:
                    file.write(self._superlink())
            answer = self.ask("run", str(app), "--run-config", flower_config(run_config))
        run = str(answer["run-id"])
        if not code.startswith(answer["fab-hash"]):
            self.ask("stop", run)
            raise ControlError(f"Flower here packs the run as {answer['fab-hash']}, and {code[:8]} was signed: sign it with this version")
        self.server.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        append(self.server.submitted_file, json.dumps({"run": int(run), "code": code, "config": dict(run_config)}).encode() + b"\n")
        return run

    def runs(self) -> list[Submitted]:
        """Return all runs of the SuperLink, the newest first."""
        known = {note["run"]: note for note in lines_of(self.server.submitted_file, "run")}
        found = []
        for told in self.ask("list")["runs"]:
            note = known.get(int(told["run-id"]), {"config": {}, "code": ""})
            times = (_time(told["pending-at"]), _time(told["finished-at"]), _time(told["running-at"]))
            traffic = told["network-traffic"]
            nbytes = (traffic["inbound-bytes"], traffic["outbound-bytes"])
            found.append(Submitted(int(told["run-id"]), told["status"], note["config"], *times, nbytes, note["code"], told["fab-id"]))
        return sorted(found, key=lambda run: run.submitted or datetime.min.astimezone(), reverse=True)

    def status(self, run: str) -> str:
        """Return Flower's status of the run with this id: ``running``, ``finished:completed``, ``finished:failed`` or another."""
        match = next((one for one in self.runs() if str(one.id) == run), None)
        if match is None:
            raise ControlError(f"the SuperLink at {self.address} has no run {run}: `fl-bn status --all` lists the runs")
        return match.status

    def log(self, run: str) -> Iterator[str]:
        """Yield the lines of a run's log from its beginning, and an empty text after each ``QUIET`` seconds without a line.

        It ends when Flower's command does: after the run's end, or where the connection breaks.
        """
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() and not line.startswith(PREAMBLE):
                    lines.put(line.rstrip())
            lines.put(None)

        argv = self._flwr("log", run, "--stream")
        pipe, rest = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(argv, env=self._environment(), cwd=self.home, stdout=pipe, stderr=rest, text=True) as process:
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            try:
                while True:
                    try:
                        line = lines.get(timeout=QUIET)
                    except queue.Empty:
                        line = ""
                    if line is None:
                        return
                    yield line
            finally:
                process.kill()
                reader.join()

    def _flwr(self, *words: str) -> list[str]:
        """Return a command line of ``flwr``, with the name of the SuperLink. Flower 1.25 wants a folder that explains the name, too."""
        before = [program("flwr"), *words]
        place = next((index for index, word in enumerate(before) if word.startswith("--")), len(before))
        names = [NAME] if words[0] == "run" or not of_1_25() else [str(self.home), NAME]
        return [*before[:place], *names, *before[place:]]

    def _superlink(self) -> str:
        return SUPERLINK.format(address=json.dumps(self.address), authority=json.dumps(str(self.server.authority)))

    def _environment(self) -> dict[str, str]:
        return environment({"FLWR_HOME": str(self.home), "PYTHONUNBUFFERED": "1"})


@contextmanager
def control_of(server: ServerFolder, address: str = "") -> Iterator[Control]:
    """Make a Control for the SuperLink of a server, for use inside the ``with`` block.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.

    Raises:
        ControlError: The installed version of Flower is not one that deployments know.
    """
    try:
        legacy = of_1_25()
    except ValueError as error:
        raise ControlError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="fl-bn-") as home:
        control = Control(address or local(server.control if legacy else server.fleet), server, Path(home))
        if legacy:
            (control.home / "pyproject.toml").write_text(PROJECT + control._superlink())
        else:
            (control.home / "config.toml").write_text(control._superlink().replace("[tool.flwr.federations.", "[superlink."))
        yield control


def lines_of(file: Path, needed: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a file that has one in each line; an empty list where there is no file.

    A line that cannot be read, or lacks the key ``needed``, is left out and told on stderr: the others count all the same. An
    incomplete last line, which an active run may be writing, is left out without a word.
    """
    found = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1] if file.exists() else (), 1):
        try:
            row = json.loads(line)
            row[needed]
            found.append(row)
        except (ValueError, TypeError, KeyError):
            print(f"{file}: line {number} cannot be read, and is left out: remove it, or put the file back from a copy", file=sys.stderr)
    return found


def key_of(site: Path) -> bytes:
    """Read the public key of a site, in DER.

    Args:
        site: The site's file in the folder ``sites`` of the server.

    Raises:
        ControlError: The file is missing or holds no public key. The message names the file.
    """
    try:
        return read_public(site)
    except (OSError, ValueError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else error
        raise ControlError(f"{site}: {reason}. server.toml names the site {site.stem}, so this file must hold its public key") from error


def nodes_of(server: ServerFolder, sites: Sequence[str], all_needed: bool = True) -> list[int]:
    """Return the node id of each site, in the order of ``sites``; 0: its present key was not registered.

    Raises:
        ControlError: The key of a site cannot be read or, where ``all_needed``, was not registered.
    """
    known = registered(server)
    nodes = {site: known.get(key_of(server.public_key(site)).hex(), 0) for site in sites}
    if all_needed and (missing := [site for site, node in nodes.items() if not node]):
        raise ControlError(
            f"the SuperLink lacks the key of {missing[0]}: `fl-bn register {shlex.quote(str(server.path))}` registers it, or says why"
        )
    return list(nodes.values())


def register_sites(server: ServerFolder, address: str = "", wait: float = 60.0) -> Iterator[tuple[str, str]]:
    """Let the sites of ``server.toml`` connect to the SuperLink, and no others.

    Nodes that belong to no site now are shut out. They are sites that were removed, or had another key. A key that the
    SuperLink refuses stops no other site. Call this under ``one_at_a_time``.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        wait: The seconds to wait for the SuperLink to answer.

    Yields:
        The name of a site, or ``a key of no site``; and a text that says what was done, such as ``registered``.

    Raises:
        KeyRefused: The SuperLink refuses the keys of some sites. The others are registered.
        ControlError: The SuperLink does not answer, or a site has no public key.
    """
    keys = {site: key_of(server.public_key(site)).hex() for site in server.sites}  # a missing key is an error before waiting
    deadline = time.monotonic() + wait
    with control_of(server, address) as control:
        while True:
            try:
                nodes = control.nodes()
                break
            except ControlError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        known = {key: node for key, node in registered(server).items() if not node or node in nodes}
        strangers, refused = nodes.keys() - known.values(), dict[str, ControlError]()
        for site, key in keys.items():
            new, begun = not known.get(key), key in known
            if new:
                _note(server, known | {key: 0}, keys)  # so that a node that appears is this key's, wherever this command is interrupted
                try:
                    known[key] = control.register(server.public_key(site))
                except ControlError as error:
                    appeared = control.nodes().keys() - known.values() - (set() if begun else strangers)
                    known.pop(key, None)
                    if len(appeared) != 1:
                        refused[site] = error
                        yield site, f"refused: {error}"
                        continue
                    known[key] = appeared.pop()
                _note(server, known, keys)
            yield site, "registered" if new else "was registered already"
        owners = {node: key for key, node in known.items()}
        for node in nodes:
            if (key := owners.get(node, "")) not in keys.values():
                control.ask("supernode", "unregister", str(node))  # it gets no message from now on
                known.pop(key, None)
                yield owner(server, bytes.fromhex(key)) or "a key of no site", "shut out: no site of server.toml has this key"
        _note(server, known, keys)
    if refused:
        raise KeyRefused(
            f"the SuperLink refuses the keys of {', '.join(refused)}; all other sites are registered. It never accepts a key again that it "
            "has shut out: make a new key pair at the site, and enter its site.pub here: "
            f"`fl-bn kit renew {shlex.quote(str(server.path))} --site {next(iter(refused))} --public-key FILE`"
        )


def registered(server: ServerFolder) -> dict[str, int]:
    """Return the node as which each public key was registered: key (DER in hexadecimal digits) -> node id; 0: that was interrupted."""
    file = server.keys_file
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def _note(server: ServerFolder, known: Mapping[str, int], keys: Mapping[str, str]) -> None:
    """Write ``keys_file``, and ``nodes_file``, which active runs read, since a new key means a new node."""
    server.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(server.keys_file, json.dumps(known).encode())
    nodes = {site: known[key] for site, key in keys.items() if known.get(key)}
    write(server.nodes_file, json.dumps(nodes).encode())


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text[:1].isdigit() else None  # N/A
