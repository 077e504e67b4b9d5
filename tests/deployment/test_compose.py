"""docker-compose.yml and the image, read without an engine: Flower accepts every command line, and deploy/docker/README.md is kept to."""

from __future__ import annotations

import argparse
import fnmatch
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import typer
import yaml
from flwr.common.config import parse_config_args
from flwr.server.app import _parse_args_run_superlink
from flwr.supercore.cli.flower_superexec import _parse_args as _parse_args_superexec
from flwr.supercore.grpc_health import run_health_server_grpc_no_tls
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fl_bn.support.flower_config import SERVER
from fl_bn_site.gate import options
from fl_bn_site.programs import SUPERNODE
from tests.deployment.docker_federation import ROOT, SITES
from tests.deployment.inner import app
from tests.deployment.tls_servers import free_ports

Compose = dict[str, Any]
ONCE = ("kit", "register", "run")
IMAGE = "/opt/fl-bn/"  # where the image has the repository
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "flower-superlink": _parse_args_run_superlink,
    "flower-superexec": _parse_args_superexec,
    "flower-supernode": _parse_args_run_supernode,
}
AROUND = {"flower-superlink": f"{IMAGE}fl_bn_site/superlink.py"}  # a script that runs Flower's program
GATE, APPS = (["python", "-P", "-m", f"fl_bn_site.{name}"] for name in ("gate", "apps"))


def read() -> Compose:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())  # type: ignore[no-any-return]


def argv(service: Compose) -> list[str]:
    return [*service.get("entrypoint", []), *service.get("command", [])]


def volumes(service: Compose) -> dict[str, tuple[str, str]]:
    """``volume -> (path, mode)``."""
    split = [(entry + ":rw").split(":")[:3] for entry in service.get("volumes", [])]
    return {name: (path, mode) for name, path, mode in split}


def parsed(words: list[str]) -> argparse.Namespace:
    """As the program's own parser reads its command line; SystemExit or click's UsageError where it refuses."""
    if words[:4] == GATE:
        words = [SUPERNODE, *options(words[4:])[-1][SUPERNODE]]
    for program, script in AROUND.items():
        if script in words:
            assert (ROOT / script.removeprefix(IMAGE)).exists()
            words = [program, *words[words.index(script) + 1 :]]
    program, *rest = words
    if program in PARSERS:
        return PARSERS[program]().parse_args(rest)
    if program == "fl-bn":
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command, rest = command.get_command(None, rest[0]), rest[1:]
        command.make_context("fl-bn", rest)
    elif words[:4] == APPS:
        assert len(words) == 5
    else:
        assert program in ("sh", "python"), f"no parser for {program}"
        assert (ROOT / rest[0].removeprefix(IMAGE)).exists()
    return argparse.Namespace()


def test_every_command_line_is_accepted_by_the_program_s_own_parser() -> None:
    for service in read()["services"].values():
        parsed(argv(service))
        if "healthcheck" in service:
            parsed(service["healthcheck"]["test"][1:])


def test_tls_and_authentication_are_on() -> None:
    """And node configs number the sites as the kit does."""
    superlink = parsed(argv(read()["services"]["superlink"]))
    assert (superlink.enable_supernode_auth, superlink.insecure, superlink.isolation) == (True, False, "process")
    assert all((superlink.ssl_certfile, superlink.ssl_keyfile, superlink.ssl_ca_certfile))
    assert all(path.startswith("/state/") for path in (superlink.database, superlink.storage_dir))
    assert read()["services"]["kit"]["environment"]["SITES"] == ",".join(SITES)
    assert read()["services"]["serverapp"]["environment"][SERVER] == "/kit/server"  # whose exchange has TLS
    for place in range(3):
        node = parsed(argv(read()["services"][f"supernode-{place + 1}"]))
        assert (node.insecure, node.isolation) == (False, "process")
        assert (node.root_certificates, node.auth_supernode_private_key) == ("/kit/site/ca.crt", "/kit/site/site.key")
        wanted = {"partition-id": place, "num-partitions": 3, "site": SITES[place], "state-dir": "/state", "device": "auto"}
        assert parse_config_args([node.node_config]) == {**wanted, "exchange-addresses": "serverapp"}


def test_the_promises_hold() -> None:
    """Who may see which volume, and may he write; who is in which network; and nobody has a privilege."""
    compose = read()
    services, internal = compose["services"], {name for name, net in compose["networks"].items() if (net or {}).get("internal")}
    mounts: dict[str, dict[str, str]] = {
        "kit": {"authority": "rw", "server": "rw", "submitter": "rw", **dict.fromkeys(SITES, "rw")},
        "superlink": {"server": "ro", "superlink": "rw"},
        "register": {"server": "ro", "notes": "rw"},
        "serverapp": {"server": "ro", "results": "rw"},
        "run": {"server": "ro", "notes": "rw", "submitter": "ro"},
    }
    networks = {
        "kit": set[str](),
        **dict.fromkeys(("superlink", "serverapp"), {"public", "sites", "server"}),
        **dict.fromkeys(("register", "run"), {"server"}),
    }
    for n in (1, 2, 3):
        mounts[f"supernode-{n}"] = {f"site-{n}": "ro", f"node-{n}": "rw", f"packages-{n}": "rw", f"run-{n}": "rw"}
        mounts[f"clientapp-{n}"] = {f"state-{n}": "rw", f"packages-{n}": "ro", f"run-{n}": "rw"}
        networks |= dict.fromkeys((f"supernode-{n}", f"clientapp-{n}"), {"sites"})
        address = parsed(argv(services[f"supernode-{n}"])).clientappio_api_address
        assert address.startswith("127.0.0.1:"), "the plaintext port is in this container alone"
    assert {name: {volume: mode for volume, (_, mode) in volumes(service).items()} for name, service in services.items()} == mounts
    assert {name: set(service.get("networks", ())) for name, service in services.items()} == networks
    assert {volume for of in mounts.values() for volume in of} <= set(compose["volumes"]), "nothing of the host's"
    assert (services["kit"]["network_mode"], internal) == ("none", {"sites", "server"})
    for address in ("control_api_address", "serverappio_api_address"):
        host = getattr(parsed(argv(services["superlink"])), address).split(":")[0]
        assert host in services["superlink"]["networks"]["server"]["aliases"], "a name in the network `server` alone"
        assert not any(host in (of or {}).get("aliases", ()) for net, of in services["superlink"]["networks"].items() if net != "server")
    hardened = {"user": "10001:10001", "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    for name, service in services.items():
        assert {key: service.get(key) for key in hardened} == hardened, name
        assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & service.keys(), name
        assert all(service.get(limit) for limit in ("mem_limit", "cpus", "pids_limit")), name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        lasts = (None, False) if name in ONCE else ("unless-stopped", True)
        assert (service.get("restart"), "healthcheck" in service) == lasts, name


def test_the_image_has_a_folder_of_the_user_s_for_every_mount_point() -> None:
    """Else the engine makes it, for root, and nobody can write there."""
    made = re.search(r"install -d -o fl-bn -g fl-bn -m 0700 ([^&]*?)\n\n", (ROOT / "deploy/docker/Dockerfile").read_text())
    assert made is not None
    paths = {path for service in read()["services"].values() for path, _ in volumes(service).values()}
    assert paths <= set(made[1].replace("\\", " ").split())


def test_the_engine_is_sent_what_the_image_needs_and_no_keys() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / path).exists() for path in kept)
    assert kept >= {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "fl_bn", "server_app", "client_app"}
    wanted = [words[1] for service in read()["services"].values() for words in [argv(service)] if words[0] == "sh"]
    assert {path.removeprefix(IMAGE) for path in wanted} | {"deploy/docker/healthcheck.py"} <= kept
    assert not any(fnmatch.fnmatch(path, pattern) for path in kept for pattern in ("kit*", "*.key", ".git*", "runs*"))


def test_the_variant_without_cuda_installs_none(tmp_path: Path) -> None:
    files: dict[tuple[str, str], str] = {}
    for variant in ("cpu", "gpu"):
        folder = tmp_path / variant
        folder.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "requirements.hashed.txt"):
            shutil.copy(ROOT / name, folder)
        words = [sys.executable, str(ROOT / "deploy/docker/requirements.py"), variant, str(folder)]
        subprocess.run(words, check=True, env={**os.environ, "TORCH_INDEX": "https://example.org/cpu"}, timeout=60)
        files |= {(variant, path.stem): path.read_text() for path in folder.glob("*.txt")}
    assert files["gpu", "constraints"] == (ROOT / "constraints.txt").read_text()
    assert re.findall(r"(?m)^(?:torch|torchvision)==\S+\+cpu$", files["cpu", "constraints"]) != []
    assert not re.search(r"(?m)^(nvidia|cuda|triton)", files["cpu", "constraints"])
    assert files["cpu", "options"] == "--extra-index-url https://example.org/cpu\n"
    assert files["cpu", "hashed"] == "", "another build of torch, of which there are no hashes"
    hashed = (ROOT / "requirements.hashed.txt").read_text() if platform.machine() == "x86_64" else ""
    assert files["gpu", "hashed"] == hashed


def test_the_health_check_asks_the_process_and_the_way_to_its_server() -> None:
    alive, dead = (f"127.0.0.1:{port}" for port in free_ports(2))

    def healthcheck(*addresses: str) -> int:
        words = [sys.executable, str(ROOT / "deploy/docker/healthcheck.py"), *addresses]
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode

    server: grpc.Server = run_health_server_grpc_no_tls(alive)
    try:
        assert [healthcheck(*of) for of in ((alive,), (alive, alive), (dead,), (alive, dead))] == [0, 0, 1, 1]
    finally:
        server.stop(None).wait()
    assert [healthcheck(alive), healthcheck()] == [1, 1]
