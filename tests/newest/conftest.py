"""Install the newest Flower in an environment of its own, as users have it, and put the wheel of fl-bn into a local index.

Later versions of Flower install an app's dependencies with uv for each run. For apps that name fl-bn among them, an environment variable of
uv names the index, so no file of the project does. torch takes gigabytes and is not installed again: the index has an empty wheel of that
name, and the environment also imports from the packages of the Python that runs the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fl_bn.flower.compat import LIBRARY
from tests.packaging.conftest import PIP, SOURCES, built, copied

BUSY = "Failed to start local SuperLink"  # Flower gives it 15 s


@dataclass(frozen=True)
class Newest:
    """Describe the environment in ``folder``. The ports from ``port`` to ``port + 4`` are free.

    ``home`` is the name of Flower's own folder in it. ``index`` says whether uv finds fl-bn in the local index.
    """

    folder: Path
    port: int
    home: str = "home"
    index: bool = True
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of commands: this environment's programs and wheels, and Flower's own folder and ports.

        No variable ``FLWR_DISABLE...`` may be set, because it would change how Flower works.
        """
        own = {
            "PATH": os.pathsep.join([str(self.folder / "env/bin"), os.environ["PATH"]]),
            "FLWR_HOME": str(self.folder / self.home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(self.port),
            "FLWR_LOCAL_CONTROL_API_PORT": str(self.port + 1),
            "FLWR_TELEMETRY_ENABLED": "0",
            **({"UV_FIND_LINKS": str(self.folder / "wheels")} if self.index else {}),
            "UV_CACHE_DIR": str(self.folder / "cache"),
            "RAY_ADDRESS": "local",
            "RAY_worker_niceness": "0",
            "COLUMNS": "300",
        }
        theirs = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        assert not [name for name in theirs if name.startswith("FLWR_DISABLE")]
        return theirs | own

    def run(self, *command: str, folder: Path, timeout: float = 280) -> str:
        """Run a command in ``folder``; return its output.

        If Flower's local SuperLink does not start in time, start it with a longer limit, and run the command again.
        """
        done = subprocess.run(command, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=timeout)
        if BUSY in done.stdout + done.stderr:
            self.start_local(folder)
            done = subprocess.run(command, cwd=folder, env=self.variables, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start_local(self, folder: Path) -> None:
        """Start the local SuperLink as ``flwr run`` does, but wait up to 120 seconds for it."""
        here = ("--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(self.port))
        log = self.folder / "superlink.log"
        with log.open("wb") as output:
            command = ("flower-superlink", *here)
            self.started.append(subprocess.Popen(command, cwd=folder, env=self.variables, stdout=output, stderr=subprocess.STDOUT))
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)

    def processes(self) -> list[int]:
        """Return the ids of all processes that were started in this environment, also the local SuperLink, which goes on after a run."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"FLWR_HOME={self.folder / self.home}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        for stop in (signal.SIGTERM, signal.SIGKILL):
            for number in self.processes():
                with contextlib.suppress(OSError):
                    os.kill(number, stop)
            end = time.monotonic() + 10
            while self.processes() and time.monotonic() < end:
                time.sleep(0.2)
        for process in self.started:
            process.wait(10)


def stand_in(name: str, version: str, folder: Path) -> None:
    """Write an empty wheel called ``name``, so that installers find this package, and install nothing else."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newest]:
    """Make the environment, or use the one in the folder ``FL_BN_NEWEST``, which is kept for later test runs."""
    folder = Path(os.environ.get("FL_BN_NEWEST") or tmp_path_factory.mktemp("newest"))
    if not (folder / "env").exists():
        make(folder)
    for home in folder.glob("home*"):  # of a run before
        shutil.rmtree(home)
    made = Newest(folder, 20000 + 5 * (os.getpid() % 2000))
    yield made
    made.end()


@pytest.fixture(scope="session")
def without_index(newest: Newest) -> Iterator[Newest]:
    """Return the environment without the local index, as a user has it who installed fl-bn from a file."""
    made = replace(newest, port=newest.port + 10000, home="home-without-index", index=False, started=[])
    yield made
    made.end()


@pytest.fixture(params=["wheel", "checkout"])
def installed(request: pytest.FixtureRequest, without_index: Newest, tmp_path: Path) -> Iterator[Newest]:
    """Return the environment without the index, with fl-bn installed from its wheel, or from a checkout (``pip install -e``)."""
    pip = [*PIP, "--python", str(without_index.folder / "env/bin/python"), "install", "--no-deps", "--force-reinstall"]
    if request.param == "checkout":
        subprocess.run([*pip, "-e", str(copied(SOURCES, tmp_path / "checkout"))], check=True, capture_output=True)
    yield without_index
    if request.param == "checkout":
        (wheel,) = (without_index.folder / "wheels").glob("fl_bn-*.whl")
        subprocess.run([*pip, str(wheel)], check=True, capture_output=True)


def make(folder: Path) -> None:
    venv.create(folder / "env", symlinks=True)
    pip = [*PIP, "--python", str(folder / "env/bin/python"), "install"]
    subprocess.run([*pip, f"flwr[simulation]{LIBRARY}"], check=True)
    (folder / "wheels").mkdir()
    wheel = built(folder / "wheels")
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, capture_output=True)
    stand_in("torch", "99.0", folder / "wheels")
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
