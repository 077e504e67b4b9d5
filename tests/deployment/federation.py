"""Deploy a federation on loopback for tests: a kit whose parts are real processes, with TLS and authenticated nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import load_file

from fl_bn.flower import run_in_process
from fl_bn.support.flower_config import flower_config
from fl_bn_site.commands import of_1_25
from fl_bn_site.folders import EXCHANGE_PORTS
from fl_bn_site.programs import SUPERNODE
from tests.deployment.tls_servers import free_ports, write_line

ROOT = Path(__file__).parents[2]
FL_BN = (sys.executable, "-m", "fl_bn.cli.main")
SMALL: dict[str, Any] = {  # a run of seconds in one process; deployed, each round is mostly Flower's own pace
    "model": "mlp", "clients": 3, "partition": "dirichlet", "partition-parameter": 1.0, "rounds": 3, "local-steps": 2, "evaluate-every": 3,
    "pictures": False, "wait-timeout": 120.0, "round-timeout": 120.0,
}  # fmt: skip


def wait_until(what: str, done: Callable[[], Any], timeout: float = 60.0, pause: float = 0.1) -> Any:
    end = time.monotonic() + timeout
    while not (result := done()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: this did not happen within {timeout:g} s")
        time.sleep(pause)
    return result


def farewell(process: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
    """End a program so that it says goodbye: the server takes a SuperNode that is killed for online, and its key for in use, for a minute.

    A SuperNode that the server refuses may not end by itself, so it is killed after twenty seconds.
    """
    process.send_signal(how)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Federation:
    """Run a deployed federation inside a ``with`` block; at its end, all processes are ended.

    Args:
        folder: The folder in which the kit is made.
        sites: The names of the sites.
        lines: Site -> key -> value: changes in the sites' TOML files.
        small_disks: Mount a file system of 64 MB for the results and for each site's state, and one of 128 MB for the server's state.
            Only root can do this.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str] = ("a", "b", "c"),
        lines: Mapping[str, Mapping[str, Any]] | None = None,
        small_disks: bool = False,
    ) -> None:
        self.kit, self.sites = folder / "kit", list(sites)
        fleet, control, self.serverappio, *rest = free_ports(3 + len(sites) + EXCHANGE_PORTS)
        nodes, self.exchange = rest[: len(sites)], rest[len(sites)]
        plan = {"superlink": "127.0.0.1", "sites": ",".join(sites), "fleet-port": fleet, "exchange-port": self.exchange, "output": self.kit}
        subprocess.run([*FL_BN, "kit", "create", *(f"--{key}={value}" for key, value in plan.items())], check=True, capture_output=True)
        self.fleet, self.nodes = fleet, dict(zip(sites, nodes, strict=True))
        self.control, self.runtime = (control, self.serverappio) if of_1_25() else (fleet, fleet)  # ports that runs and ServerApps use
        self.edit(
            "server", {"control": f"127.0.0.1:{control}", "serverappio": f"127.0.0.1:{self.serverappio}", "fleet": f"127.0.0.1:{fleet}"}
        )
        for site, port in self.nodes.items():
            self.edit(f"sites/{site}", {"clientappio": f"127.0.0.1:{port}", "device": "cpu", **(lines or {}).get(site, {})})
        self.environment: dict[str, dict[str, str]] = {}  # by part, beside this process's own
        for site in sites:
            self.mood(site).write_text("")
            self.environment[f"sites/{site}"] = {"FL_BN_MOOD": str(self.mood(site))}
        small = ("server/results", "server/state", *(f"sites/{site}/state" for site in sites)) if small_disks else ()
        self._mounts = [self.kit / folder for folder in small]
        for mount in self._mounts:
            mount.mkdir(parents=True)
            size = 128 if mount == self.kit / "server/state" else 64
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=700", "tmpfs", str(mount)], check=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def edit(self, part: str, values: Mapping[str, Any]) -> None:
        """Set keys in the TOML file of ``part``, which is ``server`` or ``sites/NAME``."""
        for key, value in values.items():
            write_line(next((self.kit / part).glob("s*.toml")), key, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for part in list(self._running):
            self.stop(part)
        for mount in self._mounts:
            subprocess.run(["umount", "--lazy", str(mount)], check=False)

    def mood(self, site: str) -> Path:
        """Return the file that tells the data set ``tools.deployment.moody`` how to fail at this site; empty: it does not fail."""
        return self.kit.parent / f"mood-{site}"

    # Parts: "server", "sites/a", ...

    def start(self, *parts: str) -> None:
        for part in parts:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "FL_BN_ALLOW_MODULES": "tools.deployment"}  # ``moody``'s is not sent
            environment |= self.environment.get(part, {})
            with (self.kit / part / "start.out").open("ab") as output:
                self._running[part] = subprocess.Popen(
                    [*FL_BN, "start", str(self.kit / part)], cwd=ROOT, stdout=output, stderr=output, start_new_session=True, env=environment
                )

    def start_all(self, sites: Sequence[str] = ()) -> None:
        """Start the server, wait until it has registered all sites, start ``sites`` (empty: all), and wait until they are connected."""
        self.start("server")
        wait_until("registration", lambda: self.log("server").count("registered") >= len(self.sites), 300)
        self.start_again(*(f"sites/{site}" for site in sites or self.sites))

    def start_again(self, *parts: str) -> None:
        """Start sites, and wait until they are connected."""
        before = {part: self.log(part).count("SuperNode ID") for part in parts}
        self.start(*parts)
        for part in parts:
            wait_until(f"{part} is connected", lambda part=part: self.log(part).count("SuperNode ID") > before[part], 300)  # type: ignore[misc]

    def command(self, command: str, *words: str, part: str = "server", code: int = 0, timeout: float = 900.0) -> str:
        """Run ``fl-bn COMMAND FOLDER WORDS`` for the folder of ``part``; return its output. It must end with exit status ``code``."""
        argv = [*FL_BN, *command.split(), str(self.kit / part), *words]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def add_site(self, site: str, **lines: Any) -> None:
        """Add a site to the federation, with ``lines`` in its TOML file."""
        self.command("kit add-site", site)
        (self.nodes[site],) = free_ports(1)
        self.edit(f"sites/{site}", {"clientappio": f"127.0.0.1:{self.nodes[site]}", "device": "cpu", **lines})
        self.environment[f"sites/{site}"] = {"FL_BN_MOOD": str(self.mood(site))}

    def stop(self, part: str, how: int = signal.SIGTERM) -> None:
        farewell(self._running.pop(part), how)

    def log(self, part: str) -> str:
        file = self.kit / part / "start.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def find(self, program: str, site: str = "") -> list[int]:
        """Return the ids of the processes of one kind: ``superlink``, ``serverapp``, ``supernode`` or ``clientapp``.

        The last two are those of ``site``. ``clientapp`` finds the base process, the warm ones and those of messages.
        """
        words = {
            "superlink": ("superlink.db", str(self.kit)),
            "serverapp": ("flwr-serverapp", f":{self.runtime}"),
            "supernode": (SUPERNODE[:15], str(self.kit / "sites" / site)),
            "clientapp": ("fl_bn_site.apps", str(self.kit / "sites" / site)),
        }[program]
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace") + entry.with_name("comm").read_text()
                if all(word in line for word in words):
                    found.append(int(entry.parent.name))
        return sorted(found)

    def online(self) -> list[str]:
        """Return the sites that are online; empty if the server does not answer."""
        with suppress(AssertionError):
            return [site["name"] for site in json.loads(self.command("status", "--json"))["sites"] if site["state"] == "online"]
        return []

    # Runs

    def submit(self, config: Mapping[str, Any] | str, *options: str) -> subprocess.Popen[str]:
        text = config if isinstance(config, str) else flower_config(config)
        argv = [*FL_BN, "submit", str(self.kit / "server"), "--run-config", text, *options]
        return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)

    def run(self, config: Mapping[str, Any]) -> str:
        """Submit a run, wait until it has completed, and return its output."""
        return ended(self.submit(config))

    def result(self, name: str) -> Path:
        return self.kit / "server" / "results" / name


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait until a submitted run has ended; return its output. ``code`` is the exit status that ``fl-bn submit`` must have."""
    out, _ = process.communicate(timeout=900)
    assert process.returncode == code, out
    return out


def rounds_of(federation: Federation, name: str) -> int:
    """Return how many rounds of a run are done."""
    file = federation.result(name) / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def in_process(config: Mapping[str, Any], folder: Path) -> Path:
    """Run ``config`` in this process, for comparison with the deployed run; write into ``folder``, and return the run directory."""
    shutil.rmtree(folder, ignore_errors=True)
    path: Path = run_in_process({**config, "output": str(folder), "device": "cpu", "resume": ""})
    return path


def differing(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors that are not equal, bit for bit, in two safetensors files."""
    a, b = load_file(one), load_file(other)
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name]))


def personal(federation: Federation, name: str) -> dict[str, Path]:
    """Return site -> the file of the model that its client saved at the end of the run ``name``."""
    found = {}
    for index, site in enumerate(federation.sites):
        path = federation.kit / "sites" / site / "state" / name / "clients" / f"client-{index}.safetensors"
        if path.exists():
            found[site] = path
    return found


def check_bits(federation: Federation, config: Mapping[str, Any], log: str, folder: Path) -> None:
    """Check that a run with output ``log`` ended with the models of the same run in this process, and not with those of another seed."""
    deployed, reference = federation.result(config["name"]), in_process(config, folder / "reference")
    assert log.count("3/3 clients") == config["rounds"], log
    assert differing(deployed / "model.safetensors", reference / "model.safetensors") == [], log
    models = personal(federation, config["name"])
    assert set(models) == (set(federation.sites) if config["method"] == "fedbn" else set())
    for path in models.values():
        assert differing(path, reference / "clients" / path.name) == []
    if "unseen-client" in config:
        assert differing(deployed / "unseen-client.safetensors", reference / "unseen-client.safetensors") == []
    if config["method"] == "fedtan":
        assert "exchange: listening on 127.0.0.1" in log
        assert "(TLS)" in log
    other = in_process({**config, "seed": 1}, folder / "control")
    assert differing(deployed / "model.safetensors", other / "model.safetensors") != []  # control
