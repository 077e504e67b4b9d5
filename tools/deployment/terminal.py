"""Run commands as an operator types them, record output and duration, and make the copies of the repository for them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_bn.run.overrides import parse_overrides
from tests.deployment.federation import ROOT, differing, in_process, wait_until

GUIDES = (
    "deploy/README.md",
    *(f"docs/how-to/{name}.md" for name in ("audit", "data", "machines", "operate", "own-code", "stolen-keys", "tables", "upgrade")),
    *(f"fl_bn_site/kit_files/{name}.md" for name in ("install", "kit", "server", "site")),
)
INSTALL = "pip install -q -c constraints.txt -e '.[deployment,report,vision]'"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
LONGEST = 240  # characters of a line
PYTHON = ((sysconfig.get_path("purelib"), "site-packages"), (sysconfig.get_path("stdlib"), "python"))


class Terminal:
    """Run commands in a folder, and write them with their output as the text of a page.

    Args:
        folder: The folder. By default, commands use the fl-bn that is installed in its ``server-copy``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder / "server-copy"
        self.spare = self.metrics = 0  # ports for a site that joins later, and for the metrics
        self.server, self.sites = "kit/server", list[str]()  # change when the server moves, or a site joins or leaves
        self.lines: list[str] = []
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self._fenced = False
        self.guides = {name: (ROOT / name).read_text() for name in GUIDES}

    # What is written

    def say(self, text: str) -> None:
        self.fence(False)
        self.lines += [text, ""]

    def shown(self, *lines: str) -> None:
        self.fence(True)
        self.lines += [self._clean(line) for line in lines]

    def taken(self) -> str:
        """Return the text of the page that was written since the last call of this method."""
        self.fence(False)
        text, self.lines = "\n".join(self.lines), []
        return text.strip() + "\n"

    def fence(self, wanted: bool) -> None:
        if wanted != self._fenced:
            self.lines += ["```text"] if wanted else ["```", ""]
            self._fenced = wanted

    def _clean(self, line: str) -> str:
        line = ANSI.sub("", line).rstrip()
        for place, shown in ((str(self.folder), "~"), (str(ROOT), "~/fl-bn"), *PYTHON):
            line = line.replace(place, shown)
        return line if len(line) <= LONGEST else f"{line[:LONGEST]} [...]"

    # What is typed

    def environment(self, copy: Path | None = None) -> dict[str, str]:
        scripts = (copy or self.copy) / ".venv/bin"
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "150", "FLWR_TELEMETRY_ENABLED": "0"}

    def type(self, command: str, keep: str = "", code: int = 0, copy: Path | None = None, timeout: float = 900.0) -> str:
        """Run ``command``, and add it and its output to the page.

        Args:
            command: The command line. Each ``fl-bn`` command in it must occur in a guide.
            keep: A regular expression: only lines that match it come into the page; empty: all lines.
            code: The exit code that the command must have.
            copy: The copy of the repository whose fl-bn is used; None: the server's.
            timeout: The seconds after which the command is killed.

        Returns:
            The whole output.

        Raises:
            RuntimeError: The command has another exit code.
            AssertionError: No guide has the command.
        """
        self._in_a_guide(command)
        begin = time.monotonic()
        argv, env = ["bash", "-c", command], self.environment(copy)
        done = subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        seconds, out = time.monotonic() - begin, done.stdout + done.stderr
        self.shown(f"$ {command}    ({seconds:.0f} s)")
        omitted = False
        for line in filter(str.strip, out.splitlines()):
            if not keep or re.search(keep, line):
                self.shown(line)
                omitted = False
            elif not omitted:
                self.shown("[...]")
                omitted = True
        if done.returncode != code:
            raise RuntimeError(f"{command}: expected exit code {code}, but got {done.returncode}:\n{out}")
        return out

    def start(self, command: str, name: str, copy: Path | None = None) -> None:
        """Start ``command`` in the background, as in a terminal of its own. Its output goes to the file ``name``.out."""
        self._in_a_guide(command)
        self.shown(f"$ {command}    (in a terminal of its own)")
        with self._output(name).open("ab") as output:
            self.started[name] = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder, env=self.environment(copy), stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def stop(self, name: str, kill: bool = False) -> None:
        process = self.started.pop(name)
        begin = time.monotonic()
        process.kill() if kill else process.terminate()
        process.wait(60)
        if kill:
            self.shown(f"# kill -9 of the terminal with `fl-bn start kit/{name}`")
        else:
            self.shown(f"^C in the terminal of {name}    ({time.monotonic() - begin:.0f} s)")

    def until(self, what: str, done: Callable[[], Any], timeout: float = 300.0) -> Any:
        begin = time.monotonic()
        found = wait_until(what, done, timeout, pause=0.3)
        self.shown(f"# {what}: after {time.monotonic() - begin:.0f} s")
        return found

    def ended(self, name: str, keep: str, code: int = 0) -> str:
        """Wait until the command that ``start`` started as ``name`` ends. Return its output.

        Args:
            name: The name that was given to ``start``.
            keep: A regular expression: the lines of the output that match it come into the page.
            code: The exit code that the command must have.

        Raises:
            RuntimeError: The command has another exit code.
        """
        process = self.started.pop(name)
        begin = time.monotonic()
        found = process.wait(900)
        out = self.out(name)
        self.shown(f"# the terminal of {name}, {time.monotonic() - begin:.0f} s later:")
        self.shown(*(line for line in out.splitlines() if re.search(keep, line)))
        if found != code:
            raise RuntimeError(f"{name}: expected exit code {code}, but got {found}:\n{out}")
        return out

    def out(self, name: str) -> str:
        return self._output(name).read_text(errors="replace")

    def _output(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '-')}.out"

    def _in_a_guide(self, command: str) -> None:
        for typed in re.findall(r"(?:^|[;&|] *)(fl-bn (?:kit )?[a-z-]+)", command):
            if not any(typed in text for text in self.guides.values()):
                raise AssertionError(f"no guide has the command {typed}")

    # What is looked at meanwhile

    def status(self) -> dict[str, Any]:
        argv = ["fl-bn", "status", self.server, "--json"]
        done = subprocess.run(argv, cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=False)
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"sites": [], "runs": []}
        return found

    def online(self) -> None:
        def here() -> bool:
            return {site["name"] for site in self.status()["sites"] if site["state"] == "online"} >= set(self.sites)

        self.until(f"{', '.join(self.sites)} online", here)

    def rounds(self, name: str) -> int:
        file = self.folder / self.server / "results" / name / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def received(self, site: str) -> list[str]:
        log = self.folder / "kit/sites" / site / "logs/supernode.log"
        return [line for line in log.read_text(errors="replace").splitlines() if "Receiving: " in line]

    def same_bits(self, name: str, config: str) -> None:
        reference = in_process({**parse_overrides(config), "clients": len(self.sites), "name": name}, self.folder / "reference")
        wrong = differing(self.folder / self.server / "results" / name / "model.safetensors", reference / "model.safetensors")
        if wrong:
            raise AssertionError(f"{name} differs in {wrong}")
        self.shown("# model.safetensors is, bit for bit, that of the same run in one process")


def install(folder: Path, origin: Path, tag: str) -> None:
    """Clone the repository into ``folder``, unless the folder exists, and install fl-bn in an environment there.

    The environment also sees the packages of this Python, so that nothing large is downloaded.
    """
    if folder.exists():
        return
    subprocess.run(["git", "clone", "-q", "--branch", tag, str(origin), str(folder)], check=True, stderr=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "venv", str(folder / ".venv")], check=True)
    (site,) = (folder / ".venv/lib").glob("python3*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for script in Path(sysconfig.get_path("scripts")).iterdir():
        own = folder / ".venv/bin" / script.name
        first, _, rest = script.read_bytes().partition(b"\n") if script.is_file() else (b"", b"", b"")
        if first.startswith(b"#!") and b"python" in first and not own.exists():
            own.write_bytes(f"#!{folder}/.venv/bin/python\n".encode() + rest)
            own.chmod(0o755)
    path = f"{folder}/.venv/bin{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path}
    subprocess.run(["bash", "-c", INSTALL], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def release(origin: Path, version: str) -> None:
    """Commit and tag a new ``version`` in the repository at ``origin``. Only its version number differs."""
    file = origin / "pyproject.toml"
    file.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', file.read_text(), count=1))
    git = ["git", "-C", str(origin), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "commit", "-qam", version], check=True)
    subprocess.run([*git, "tag", f"v{version}"], check=True)


def lines_of(file: Path, values: Mapping[str, str]) -> None:
    text = file.read_text()
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f'{key} = "{value}"', text)
        assert count == 1, f"{file} has no line {key}"
    file.write_text(text)
