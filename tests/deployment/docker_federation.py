"""Start docker-compose.yml's federation for a test: build, start, run, fetch the results, remove."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
SITES = ("site-1", "site-2", "site-3")
SERVICES = ("superlink", "serverapp", *(f"{role}-{i}" for i in (1, 2, 3) for role in ("supernode", "clientapp")))


class DockerFailed(RuntimeError):
    """A command failed; the message ends with the last lines of its output."""


def no_docker() -> str:
    """Return the reason why docker-compose.yml cannot be started on this machine; empty if it can."""
    for program in ("docker", "docker-compose"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if engine.returncode:
        return "no Docker engine answers"
    if not _present(base_image()) and not _pulled(base_image()) and (os.getuid() or shutil.which("debootstrap") is None):
        return f"no registry has {base_image()}, and tools/deployment/base_image.sh needs root and debootstrap to make it"
    return ""


def base_image() -> str:
    """Return the name of the image that the Dockerfile starts from."""
    lines = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    return next(line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE="))


def _present(image: str) -> bool:
    return not subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode


def _pulled(image: str) -> bool:
    return not subprocess.run(["docker", "pull", "--quiet", image], capture_output=True, check=False).returncode


def command(*words: str, timeout: float = 600.0, check: bool = True) -> str:
    """Run a command in the repository; return its stdout and stderr.

    Raises DockerFailed for a non-zero exit code or after ``timeout`` seconds.
    """
    try:
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        tail = (error.stdout or b"").decode(errors="replace")[-3000:]
        raise DockerFailed(f"`{shlex.join(words)}` was not done after {timeout:.0f} s:\n{tail}") from error
    if check and done.returncode:
        raise DockerFailed(f"`{shlex.join(words)}` exited with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


class DockerFederation:
    """Control the services, networks and volumes of the compose project. The end of the ``with`` block removes them."""

    def __init__(self) -> None:
        self.project = "fl-bn-test"
        self._compose = ["docker-compose", "--project-name", self.project]

    def __enter__(self) -> DockerFederation:
        if not _present(base_image()) and not _pulled(base_image()):
            command("sh", "tools/deployment/base_image.sh", timeout=3600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.compose("ps", check=False), self.logs(), sep="\n", file=sys.stderr)
        self.compose("down", "--volumes", "--remove-orphans", check=False)

    def compose(self, *words: str, timeout: float = 600.0, check: bool = True) -> str:
        return command(*self._compose, *words, timeout=timeout, check=check)

    def build(self) -> None:
        self.compose("build", "kit", timeout=1800)

    def up(self) -> None:
        """Start everything; return when every service is healthy. Raises DockerFailed after three minutes."""
        self.compose("up", "-d")
        self.wait_healthy()

    def wait_healthy(self, within: float = 180.0) -> None:
        """Return when all services are healthy. Raises DockerFailed after ``within`` seconds."""
        end = time.monotonic() + within
        while ill := [name for name in SERVICES if self.health(name) != "healthy"]:
            if time.monotonic() > end:
                raise DockerFailed(f"not healthy after {within:.0f} s: {', '.join(ill)}\n{self.logs(*ill)}")
            time.sleep(1)

    def run(self, config: str, timeout: float = 600.0) -> str:
        """Submit a run as a user does; return its log. Raises DockerFailed if the run failed."""
        return self.compose("run", "--rm", "run", config, timeout=timeout)

    def start_run(self, config: str) -> subprocess.Popen[str]:
        """Submit a run as a user does, but return its process at once."""
        words = [*self._compose, "run", "--rm", "run", config]
        return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def fetch(self, folder: Path) -> Path:
        """Copy all run directories into ``folder``."""
        command("docker", "cp", f"{self.container('serverapp')}:/kit/server/results/.", str(folder))
        return folder

    def container(self, service: str) -> str:
        """Return the id of a service's container, running or not. Raises DockerFailed if the service has none."""
        if not (found := self.compose("ps", "--all", "-q", service).split()):
            raise DockerFailed(f"{service} has no container")
        return found[0]

    def health(self, service: str) -> str:
        """Return the health of a service's container: ``healthy``, ``unhealthy`` or ``starting``.

        Where the container does not run, return its status, such as ``exited``.
        """
        state = json.loads(command("docker", "inspect", "--format", "{{json .State}}", self.container(service)))
        return str(state["Health"]["Status"] if "Health" in state and state["Running"] else state["Status"])

    def inside(self, service: str, *words: str, check: bool = True) -> str:
        return command("docker", "exec", self.container(service), *words, check=check)

    def logs(self, *services: str, tail: int = 40) -> str:
        return self.compose("logs", "--no-color", f"--tail={tail}", *services, check=False)

    def network(self, name: str) -> str:
        return f"{self.project}_{name}"
