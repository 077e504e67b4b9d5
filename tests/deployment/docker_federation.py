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


def no_docker() -> str:
    """Return the reason why docker-compose.yml cannot be started on this machine; empty if it can."""
    for program in ("docker", "docker-compose"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no Docker engine answers"
    if not _has(base_image()) and (os.getuid() or shutil.which("debootstrap") is None):
        return f"no registry has {base_image()}, and tools/deployment/base_image.sh needs root and debootstrap to make it"
    return ""


def base_image() -> str:
    """Return the name of the image that the Dockerfile starts from."""
    lines = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    return next(line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE="))


def _has(image: str) -> bool:
    """Whether this machine or a registry has an image."""
    ways = (["docker", "image", "inspect", image], ["docker", "pull", "--quiet", image])
    return any(subprocess.run(way, capture_output=True, check=False).returncode == 0 for way in ways)


def command(*words: str, timeout: float = 600.0, code: int | None = 0) -> str:
    """Run a command in the repository; return its stdout and stderr. It must end with this exit code; None: with any."""
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
    assert code in (None, done.returncode), f"`{shlex.join(words)}` exited with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout


class DockerFederation:
    """Control the services, networks and volumes of the compose project. The end of the ``with`` block removes them."""

    def __init__(self) -> None:
        self.project = "fl-bn-test"
        self._compose = ["docker-compose", "--project-name", self.project]

    def __enter__(self) -> DockerFederation:
        if not _has(base_image()):
            command("sh", "tools/deployment/base_image.sh", timeout=3600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.compose("ps", code=None), self.logs(), sep="\n", file=sys.stderr)
        self.compose("down", "--volumes", "--remove-orphans", code=None)

    def compose(self, *words: str, timeout: float = 600.0, code: int | None = 0) -> str:
        return command(*self._compose, *words, timeout=timeout, code=code)

    def up(self) -> None:
        """Start everything; return when every service is healthy, within three minutes."""
        self.compose("up", "-d")
        end = time.monotonic() + 180
        while ill := [name for name in SERVICES if self.health(name) != "healthy"]:
            assert time.monotonic() < end, f"not healthy: {', '.join(ill)}\n{self.logs(*ill)}"
            time.sleep(1)

    def run(self, config: str, code: int = 0) -> str:
        """Submit a run as a user does; return its log. ``code`` is the exit code that it must have."""
        return self.compose("run", "--rm", "run", config, code=code)

    def fetch(self, folder: Path) -> Path:
        """Copy all run directories into ``folder``."""
        command("docker", "cp", f"{self.container('serverapp')}:/kit/server/results/.", str(folder))
        return folder

    def container(self, service: str) -> str:
        """Return the id of a service's container, running or not."""
        return self.compose("ps", "--all", "-q", service).split()[0]

    def health(self, service: str) -> str:
        """Return the health of a service's container: ``healthy``, ``unhealthy`` or ``starting``.

        Where the container does not run, return its status, such as ``exited``.
        """
        state = json.loads(command("docker", "inspect", "--format", "{{json .State}}", self.container(service)))
        return str(state["Health"]["Status"] if "Health" in state and state["Running"] else state["Status"])

    def inside(self, service: str, *words: str, code: int | None = 0) -> str:
        return command("docker", "exec", self.container(service), *words, code=code)

    def logs(self, *services: str, tail: int = 40) -> str:
        return self.compose("logs", "--no-color", f"--tail={tail}", *services, code=None)
