"""docker-compose.yml for real. Over three sites in containers the model is that of ``run_in_process``; walls stand."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.docker_federation import DockerFederation, command, no_docker
from tests.deployment.federation import differing, in_process
from tests.deployment.inner import parse_overrides

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]
QUICK = "model='mlp' rounds=2 local-steps=2 evaluate-every=1 pictures=false"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3); print('connected')"


@pytest.fixture(scope="module")
def federation() -> Iterator[DockerFederation]:
    if reason := no_docker():
        pytest.skip(f"docker-compose.yml is not started: {reason}")
    with DockerFederation() as federation:
        federation.compose("build", "kit", timeout=1800)
        federation.up()
        yield federation


@pytest.mark.parametrize("method", ["hbn", "fedtan"])
def test_the_model_is_that_of_one_process(federation: DockerFederation, method: str, tmp_path: Path) -> None:
    config = f"method='{method}' {QUICK}"
    out = federation.run(f"{config} name='{method}'")
    assert ("exchange: listening on 0.0.0.0:9095 (TLS)" in out, "finished:completed" in out) == (True, True), out
    apart = federation.fetch(tmp_path) / method / "model.safetensors"
    values = {**parse_overrides(config), "clients": 3}
    assert differing(apart, in_process(values, tmp_path / "one") / "model.safetensors") == []
    assert differing(apart, in_process({**values, "seed": 1}, tmp_path / "other") / "model.safetensors") != [], "negative control"


def test_a_failed_run_is_an_exit_code(federation: DockerFederation) -> None:
    """A learning rate that no run survives."""
    federation.run(f"method='fedavg' {QUICK} learning-rate=1e30 max-failed-rounds=1 name='fails'", code=1)


def test_everything_runs_without_privileges(federation: DockerFederation) -> None:
    for service in ("superlink", "serverapp", "supernode-1", "clientapp-1"):
        status = federation.inside(service, "sh", "-c", "id -u; cat /proc/1/status; touch /opt/fl-bn/x || true")
        assert "10001" in status.splitlines()  # what goes to stderr may come first
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert "Read-only file system" in status


def reaches(federation: DockerFederation, service: str, host: str, port: int) -> bool:
    return "connected" in federation.inside(service, "python", "-c", CONNECT, host, str(port), code=None)


def address(federation: DockerFederation, service: str, network: str) -> str:
    """A container's own address in a network, as an intruder would find it by scanning."""
    found = f'{{{{(index .NetworkSettings.Networks "{federation.project}_{network}").IPAddress}}}}'
    return command("docker", "inspect", "--format", found, federation.container(service)).strip()


def test_sites_reach_what_they_need_and_nothing_else(federation: DockerFederation) -> None:
    superlink = address(federation, "superlink", "sites")
    assert reaches(federation, "supernode-1", "superlink", 9092)
    assert reaches(federation, "serverapp", "control", 9091)
    assert not reaches(federation, "supernode-1", superlink, 9091), "ServerAppIo is plaintext"
    assert not reaches(federation, "supernode-1", superlink, 9093), "whoever reaches the Control API may submit runs"
    assert not reaches(federation, "clientapp-1", superlink, 9093)
    for service in ("supernode-1", "supernode-2"):
        assert not reaches(federation, "clientapp-1", address(federation, service, "sites"), 9094), "ClientAppIo is plaintext"
    published = federation.compose("port", "superlink", "9092").strip().rpartition(":")
    with socket.create_connection((published[0], int(published[2])), timeout=3):
        assert published[0] == "127.0.0.1", "for sites on other machines only when asked"


def test_nobody_sees_another_s_key(federation: DockerFederation) -> None:
    def keys(service: str) -> list[str]:
        found = federation.inside(service, "find", "/", "-xdev", "-name", "*.key", code=None)
        mounted = federation.inside(service, "find", "/kit", "/state", "-name", "*.key", code=None)
        return sorted({line for line in (found + mounted).splitlines() if line.endswith(".key")})

    assert keys("supernode-1") == ["/kit/site/site.key"]
    assert keys("clientapp-1") == []
    assert keys("superlink") == keys("serverapp") == ["/kit/server/server.key"]


def test_starting_again_changes_nothing(federation: DockerFederation) -> None:
    before = federation.inside("superlink", "sha256sum", "/kit/server/ca.crt", "/kit/server/server.key")
    for other in ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.newest.yml"):
        command("docker-compose", "-f", "docker-compose.yml", "-f", other, "config", "--quiet")
    federation.up()
    assert "the kit is there already" in federation.logs("kit")
    assert "was registered already" in federation.logs("register")
    assert federation.inside("superlink", "sha256sum", "/kit/server/ca.crt", "/kit/server/server.key") == before
