"""Talk to the Control API of a SuperLink: by gRPC, or through Flower's command ``flwr``, which answers in JSON."""

from __future__ import annotations

import json
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
from fl_bn_site.certificates import public_in, read_public
from fl_bn_site.commands import check_flower, environment, local, program
from fl_bn_site.folders import ServerFolder
from fl_bn_site.membership import former_owner
from fl_bn_site.registered import Node, Submitted, registered_nodes, run_log, submitted_runs

FEDERATION = "deployment"
IN_USE = "already in use"  # part of Flower's message where a key is registered already
PREAMBLE = ("Loading project configuration", "Success", "Creating a new `.gitignore`")  # lines of ``flwr`` before the reason of an error
ANSWER = 300.0  # seconds that ``flwr`` or start_run.py may take to answer; start_run.py sends the whole package
SILENCE = 600.0  # seconds without an answer after which the SuperLink counts as lost
STARTER = (sys.executable, "-P", str(Path(__file__).with_name("start_run.py")))  # submits a package
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
    """Signal that the SuperLink cannot be asked, does not answer, refuses a request, or does not know a run or a key.

    If Flower gave a message, the error includes that message.
    """


@dataclass(frozen=True)
class Control:
    """Talk to the Control API of one SuperLink.

    Every method except ``log`` raises ControlError where the SuperLink does not answer or refuses the request.

    Attributes:
        address: The address of the Control API, HOST:PORT.
        authority: The certificate file of the authority that signed the SuperLink's certificate.
        project: A folder whose pyproject.toml tells ``flwr`` the address and the authority.
    """

    address: str
    authority: Path
    project: Path

    def ask(self, *words: str) -> dict[str, Any]:
        """Run ``flwr WORDS --format json``.

        Args:
            words: The arguments of ``flwr``.

        Returns:
            The JSON object that ``flwr`` prints.

        Raises:
            ControlError: The SuperLink does not answer, or refuses the request.
        """
        return self._answer([program("flwr"), *words, "--format", "json"], f"flwr {' '.join(words[:2])}")

    def _answer(self, argv: list[str], called: str) -> dict[str, Any]:
        """Run a program that prints one JSON object, and return the object.

        Args:
            argv: The program and its arguments.
            called: The name of the program in error messages.

        Raises:
            ControlError: The SuperLink does not answer, or refuses the request.
        """
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, env=_environment(), stdout=pipe, stderr=pipe, text=True) as process:
            try:
                out, err = process.communicate(timeout=ANSWER)
            except subprocess.TimeoutExpired:  # ``flwr`` may hang after it has printed its answer: see registered.py
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

    def register(self, public_key: Path) -> bool:
        """Let the site with this public key connect.

        Args:
            public_key: The file of the key.

        Returns:
            True where the SuperLink did not know the key before; False where it did.
        """
        try:
            self.ask("supernode", "register", str(public_key), str(self.project), FEDERATION)
        except ControlError as error:
            if IN_USE in str(error):
                return False
            raise
        return True

    def start_run(self, package: Path, run_config: str) -> str:
        """Submit a package (FAB archive) to the SuperLink, which starts it as a run. Sites receive the same bytes.

        Args:
            package: The file of the package (``project.build``).
            run_config: Keys of the run config, as ``flwr run --run-config`` takes them.

        Returns:
            Flower's id of the run.

        Raises:
            ControlError: The SuperLink does not answer, or refuses the package.
        """
        argv = [*STARTER, self.address, str(self.authority), str(package), run_config]
        return str(self._answer(argv, "start_run.py")["run-id"])

    def unregister(self, node: int) -> None:
        """Shut out the site with this node id. It gets no message from now on."""
        self.ask("supernode", "unregister", str(node), str(self.project), FEDERATION)

    def stop(self, run: str) -> None:
        """End the run with this id."""
        self.ask("stop", run, str(self.project), FEDERATION)

    def all_nodes(self) -> list[Node]:
        """Return the nodes of all sites that may connect."""
        try:
            return registered_nodes(self.address, self.authority.read_bytes())
        except ConnectionError as error:
            raise ControlError(str(error)) from error

    def runs(self) -> list[Submitted]:
        """Return all runs of the SuperLink, the newest first."""
        try:
            return submitted_runs(self.address, self.authority.read_bytes())
        except ConnectionError as error:
            raise ControlError(str(error)) from error

    def registered(self) -> dict[bytes, int]:
        """Return the node ids of all sites that may connect: public key (in DER) -> node id."""
        return {public_in(node.key): node.id for node in self.all_nodes()}

    def nodes(self, sites: Sequence[Path]) -> list[int]:
        """Return the node id of each site, in the order of ``sites``.

        Args:
            sites: The public key files of the sites.

        Raises:
            ControlError: The SuperLink does not answer or does not know a key, or a key cannot be read.
        """
        keys, nodes = [key_of(site) for site in sites], self.registered()
        if missing := [site for site, key in zip(sites, keys, strict=True) if key not in nodes]:
            raise ControlError(
                f"the SuperLink at {self.address} does not know the key {missing[0]}: `fl-bn start` of the server registers it"
            )
        return [nodes[key] for key in keys]

    def status(self, run: str) -> str:
        """Return Flower's status of the run with this id: ``running``, ``finished:completed``, ``finished:failed`` or another."""
        match = next((one for one in self.runs() if str(one.id) == run), None)
        if match is None:
            raise ControlError(f"the SuperLink at {self.address} has no run {run}: `fl-bn runs` lists the runs")
        return match.status

    def log(self, run: str, after: float) -> Iterator[tuple[str, float]]:
        """Follow the log of a run, as ``run_log`` does. Where the connection breaks, the iterator ends without an error.

        Args:
            run: Flower's id of the run.
            after: Yield only what was logged after this time, in seconds since 1970; 0: yield the whole log.

        Yields:
            A piece of the log and its time.
        """
        with suppress(ConnectionError):
            yield from run_log(self.address, self.authority.read_bytes(), int(run), after)


def key_of(site: Path) -> bytes:
    """Read the public key of a site.

    Args:
        site: The site's file in the folder ``sites`` of the server.

    Returns:
        The key in DER.

    Raises:
        ControlError: The file is missing or holds no public key. The message names the file.
    """
    try:
        return read_public(site)
    except (OSError, ValueError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else error
        raise ControlError(f"{site}: {reason}. server.toml names the site {site.stem}, so this file must hold its public key") from error


@contextmanager
def control_of(server: ServerFolder, address: str = "") -> Iterator[Control]:
    """Make a Control for the SuperLink of a server, for use inside the ``with`` block.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.

    Yields:
        The Control.

    Raises:
        ControlError: The installed version of Flower is not the one that deployments need.
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
    """Let the sites of ``server.toml`` connect to the SuperLink, and no others.

    Keys that the SuperLink knows, but that belong to no site now, are shut out. They are keys of sites that were
    removed, or former keys of sites.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        wait: The seconds to wait for the SuperLink to answer.

    Yields:
        The name of a site, or ``a key of no site``; and a text that says what was done, such as ``registered``.

    Raises:
        ControlError: The SuperLink does not answer or refuses a key, or a site has no public key.
    """
    for site in server.sites:
        key_of(server.public_key(site))  # raise for a missing key before waiting for the SuperLink
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
    """Write the file ``nodes_file``: site -> Flower's id of its node. Active runs read it, since a new key means a new node.

    If this program may not write to the folder, as in docker-compose.yml, there is no such file. Then a site with a new key
    takes part only in runs that start later.
    """
    nodes = control.registered()
    known = {site: nodes[key] for site, key in keys.items() if key in nodes}
    with suppress(OSError):
        server.nodes_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(server.nodes_file, json.dumps(known).encode())


def _environment() -> dict[str, str]:
    return environment({"FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"})
