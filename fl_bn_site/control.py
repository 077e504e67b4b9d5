"""Talk to a SuperLink's Control API, directly or through Flower's own command ``flwr``, which answers in JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_bn.support.durable import write
from fl_bn.support.flower_config import flower_config
from fl_bn_site.certificates import public_in, read_public
from fl_bn_site.commands import check_flower, environment, local, program
from fl_bn_site.folders import ServerFolder
from fl_bn_site.membership import former_owner
from fl_bn_site.registered import Node, Submitted, registered_nodes, run_log, submitted_runs

FEDERATION = "deployment"
IN_USE = "already in use"  # Flower's words for a key that is registered
PREAMBLE = ("Loading project configuration", "Success", "Creating a new `.gitignore`")  # and these, before a reason
ANSWER = 300.0  # seconds that an answer of ``flwr`` may take; one that submits a run packs and sends the app
SILENCE = 600.0  # seconds without an answer of the SuperLink after which it counts as lost
BOUNDED = "import os, signal, sys; signal.alarm(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"  # ends also with nobody to end it
PROJECT = """\
[project]
name = "fl-bn-federation"
version = "0.1.0"

[tool.flwr.app]
publisher = "fl-bn"

[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "none:app"

[tool.flwr.federations.{federation}]
address = {address}
root-certificates = {authority}
"""


class ControlError(RuntimeError):
    """The SuperLink does not answer, or refuses. The message has Flower's words."""


class NotRegistered(ControlError):
    """The SuperLink does not know the key of a site, or not yet."""


@dataclass(frozen=True)
class Control:
    """Talk to the Control API of one SuperLink.

    Every method raises ControlError where the SuperLink does not answer or refuses.

    Attributes:
        address: HOST:PORT of the Control API.
        authority: The certificate that vouches for the SuperLink.
        project: A folder whose pyproject.toml tells ``flwr`` both.
    """

    address: str
    authority: Path
    project: Path

    def ask(self, *words: str, lock: int | None = None) -> dict[str, Any]:
        """Run ``flwr WORDS --format json``.

        Args:
            words: The arguments of ``flwr``.
            lock: See ``start_run``.

        Returns:
            The answer.

        Raises:
            ControlError: The SuperLink does not answer, or refuses.
        """
        argv, inherited = [program("flwr"), *words, "--format", "json"], () if lock is None else (lock,)
        if inherited:
            argv = [sys.executable, "-I", "-S", "-c", BOUNDED, str(math.ceil(ANSWER) + 30), *argv]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, env=_environment(), stdout=pipe, stderr=pipe, text=True, pass_fds=inherited) as process:
            try:
                out, err = process.communicate(timeout=ANSWER)
            except subprocess.TimeoutExpired:  # it may have said all, and still not end: see ``registered``
                process.kill()
                out, err = process.communicate()
        _, brace, rest = out.partition("{")
        try:
            answer: dict[str, Any] = json.loads(brace + rest)
        except json.JSONDecodeError:
            answer = {"error-message": (out + err).strip()}
        if not answer.get("success"):
            lines = [line for line in str(answer.get("error-message", "")).splitlines() if line.strip() and not line.startswith(PREAMBLE)]
            reason = " ".join(lines[-3:]) or f"`flwr {' '.join(words[:2])}` ended with {process.returncode} and said nothing"
            raise ControlError(f"the SuperLink at {self.address}: {reason}")
        return answer

    def register(self, public_key: Path) -> bool:
        """Let in the site with ``public_key``. Return False where it was let in before."""
        try:
            self.ask("supernode", "register", str(public_key), str(self.project), FEDERATION)
        except ControlError as error:
            if IN_USE in str(error):
                return False
            raise
        return True

    def start_run(self, app: Path, run_config: str, lock: int | None = None) -> str:
        """Submit an app.

        Args:
            app: The folder of the app.
            run_config: Keys of the run config, as ``flwr run`` takes them.
            lock: The descriptor of a locked file. It stays locked until the app is submitted, even if this
                process is killed meanwhile.

        Returns:
            Flower's id of the run.

        Raises:
            ControlError: The SuperLink does not answer, or refuses.
        """
        at = flower_config({"address": self.address, "root-certificates": str(self.authority)})
        answer = self.ask("run", str(app), FEDERATION, "--federation-config", at, "--run-config", run_config, lock=lock)
        return str(answer["run-id"])

    def unregister(self, node: int) -> None:
        """Shut out the site with this ``node``: from now on it gets no message."""
        self.ask("supernode", "unregister", str(node), str(self.project), FEDERATION)

    def stop(self, run: str) -> None:
        """End a run."""
        self.ask("stop", run, str(self.project), FEDERATION)

    def all_nodes(self) -> list[Node]:
        """Return the nodes of all sites that are let in."""
        try:
            return registered_nodes(self.address, self.authority.read_bytes())
        except ConnectionError as error:
            raise ControlError(str(error)) from error

    def runs(self) -> list[Submitted]:
        """Return all runs, the newest first."""
        try:
            return submitted_runs(self.address, self.authority.read_bytes())
        except ConnectionError as error:
            raise ControlError(str(error)) from error

    def registered(self) -> dict[bytes, int]:
        """Return the node ids of all sites that are let in, by public key (DER)."""
        return {public_in(node.key): node.id for node in self.all_nodes()}

    def nodes(self, sites: Sequence[Path]) -> list[int]:
        """Return the node id of each site.

        Args:
            sites: The files with the sites' public keys.

        Raises:
            NotRegistered: The SuperLink does not know a key.
            ControlError: The SuperLink does not answer, or a key cannot be read.
        """
        keys, nodes = [key_of(site) for site in sites], self.registered()
        if missing := [site for site, key in zip(sites, keys, strict=True) if key not in nodes]:
            raise NotRegistered(
                f"the SuperLink at {self.address} does not know the key {missing[0]}: `fl-bn register` tells it (`fl-bn start` does, too)"
            )
        return [nodes[key] for key in keys]

    def status(self, run: str) -> str:
        """Return the status of a run: running, finished:completed, finished:failed, ..."""
        match = next((one for one in self.runs() if str(one.id) == run), None)
        if match is None:
            raise ControlError(f"the SuperLink at {self.address} has no run {run}")
        return match.status

    def log(self, run: str, after: float) -> Iterator[tuple[str, float]]:
        """Follow the log of a run as ``run_log`` does. Where the connection breaks, the log ends."""
        with suppress(ConnectionError):
            yield from run_log(self.address, self.authority.read_bytes(), int(run), after)


def key_of(site: Path) -> bytes:
    """Return the public key in a site's file in ``sites/`` as DER. Raises ControlError, which names the file."""
    try:
        return read_public(site)
    except (OSError, ValueError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else error
        raise ControlError(f"{site}: {reason}. server.toml names the site {site.stem}, so its public key belongs there") from error


@contextmanager
def control_of(server: ServerFolder, address: str = "") -> Iterator[Control]:
    """Connect to the SuperLink of a server.

    Args:
        server: The server's folder.
        address: Of the Control API, if it is not the one in server.toml.

    Yields:
        The SuperLink.

    Raises:
        ControlError: The installed ``flwr`` is not of the deployment's version.
    """
    try:
        check_flower("the command flwr, through which fl-bn talks to a SuperLink,")
    except ValueError as error:
        raise ControlError(str(error)) from error
    address = address or local(server.control)
    with tempfile.TemporaryDirectory(prefix="fl-bn-") as project:
        text = PROJECT.format(federation=FEDERATION, address=json.dumps(address), authority=json.dumps(str(server.authority)))
        (Path(project) / "pyproject.toml").write_text(text)
        yield Control(address, server.authority, Path(project))


def register_sites(server: ServerFolder, address: str = "", wait: float = 60.0) -> Iterator[tuple[str, str]]:
    """Let in every site of ``server.toml``, and nobody else.

    A key that the SuperLink knows, but that no site has, is shut out: it belongs to a site that was removed, or
    is a site's former key.

    Args:
        server: The server's folder.
        address: Of the Control API, if it is not the one in server.toml.
        wait: For how many seconds to wait for a SuperLink.

    Yields:
        The name of a site and what became of it.

    Raises:
        ControlError: No SuperLink answers, it refuses a key, or a site has no key.
    """
    for site in server.sites:
        key_of(server.public_key(site))  # what is wrong here is said before anything is waited for
    deadline = time.monotonic() + wait
    with control_of(server, address) as control:
        while True:
            try:
                known = control.registered()
                break
            except ControlError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        keys = {site: key_of(server.public_key(site)) for site in server.sites}
        for key, node in known.items():
            if key not in keys.values():
                control.unregister(node)
                yield former_owner(server, key) or "a key of no site", "shut out: no site of server.toml has this key"
        for site, key in keys.items():
            yield site, "was registered already" if key in known or not control.register(server.public_key(site)) else "registered"
        _note_nodes(server, keys, control)


def _note_nodes(server: ServerFolder, keys: Mapping[str, bytes], control: Control) -> None:
    """Write which node each site has now, for runs that go on: a site with a new key has a new node.

    A folder that may not be written to, as in docker-compose.yml, has no such file. There a site with a new key
    takes part from the next run on.
    """
    nodes = control.registered()
    known = {site: nodes[key] for site, key in keys.items() if key in nodes}
    with suppress(OSError):
        server.nodes_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(server.nodes_file, json.dumps(known).encode())


def _environment() -> dict[str, str]:
    return environment({"FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"})
