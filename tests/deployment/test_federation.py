"""Real processes on loopback, TLS, authenticated nodes: the same model as in one process, and strangers stay out."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.site.certificates import write_site_key
from fl_bn.site.commands import environment
from fl_bn.site.kit import Plan, create
from tests.deployment.federation import SMALL, Federation, differing, free_ports, in_process, personal, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WAIT = 45.0  # seconds for a node to be refused


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation")) as running:
        running.start_all()
        yield running


RUNS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in ("hbn", "fedbn", "fedtan")},
    "hbn, secure": {"method": "hbn", "secure-aggregation": True},
    "fedbn, scaffold": {"method": "fedbn", "objective": "scaffold", "momentum": 0.0, "server-optimizer": "fedyogi", "unseen-client": True},
}


@pytest.mark.parametrize("run", RUNS)
def test_a_deployed_run_ends_with_the_bits_of_one_in_process(run: str, federation: Federation, tmp_path: Path) -> None:
    method, name = RUNS[run]["method"], run.replace(", ", "-")
    config: dict[str, Any] = {**SMALL, **RUNS[run], "name": name}
    log = federation.run(config)
    deployed, reference = federation.result(name), in_process(config, tmp_path / "reference")
    assert differing(deployed / "model.safetensors", reference / "model.safetensors") == []
    assert "3/3 clients" in log
    models = personal(federation, name)
    assert set(models) == (set(federation.sites) if method == "fedbn" else set())
    for path in models.values():
        assert differing(path, reference / "clients" / path.name) == []
    if "unseen-client" in config:
        assert differing(deployed / "unseen-client.safetensors", reference / "unseen-client.safetensors") == []
    if method == "fedtan":
        assert "exchange: listening on 127.0.0.1" in log
        assert "(TLS)" in log
    other = in_process({**config, "seed": 1}, tmp_path / "control")
    assert differing(deployed / "model.safetensors", other / "model.safetensors") != []  # control


def supernode(federation: Federation, folder: Path, *options: str) -> tuple[int | None, str]:
    """A node of one's own: its exit code (None: it still tried when it was ended), and what it said."""
    argv = ["flower-supernode", "--superlink", f"127.0.0.1:{federation.fleet}", "--max-retries", "2", "--isolation", "process"]
    folder.mkdir(exist_ok=True)
    output = folder / "out.txt"
    with output.open("wb") as target:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name(argv[0])),
                *argv[1:],
                "--clientappio-api-address",
                f"127.0.0.1:{free_ports(1)[0]}",
                *options,
            ],
            stdout=target,
            stderr=target,
            env=environment({"FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"}),
        )
        try:
            code: int | None = process.wait(WAIT)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
    return code, output.read_text(errors="replace")


def said(text: str, *words: str) -> str:
    """The line with one of ``words``."""
    lines = [line.strip() for line in text.splitlines() if any(word in line for word in words)]
    assert lines, f"none of {words} in:\n{text}"
    return lines[0]


def test_strangers_are_refused(federation: Federation, tmp_path: Path) -> None:
    authority = ("--root-certificates", str(federation.kit / "sites/a/ca.crt"))
    write_site_key(tmp_path / "stranger.key", tmp_path / "stranger.pub", "stranger")
    create(Plan("127.0.0.1", ["a"]), tmp_path / "other")
    own_key = ("--auth-supernode-private-key", str(federation.kit / "sites/a/site.key"))
    stranger = ("--auth-supernode-private-key", str(tmp_path / "stranger.key"))
    other = ("--root-certificates", str(tmp_path / "other/authority/ca.crt"))
    cases = {
        "without a key": (authority, ("public key", "UNAUTHENTICATED", "authentication")),
        "with an unregistered key": ((*authority, *stranger), ("public key", "UNAUTHENTICATED")),
        "that trusts another CA": ((*other, *own_key), ("CERTIFICATE_VERIFY_FAILED", "certificate")),
        "in plaintext": (("--insecure",), ("details =",)),
    }
    for name, (options, words) in cases.items():
        code, out = supernode(federation, tmp_path / name.replace(" ", "-"), *options)
        print(f"node {name}: exit code {code}: {said(out, *words)}")
        assert "SuperNode ID" not in out
        assert code != 0


def test_a_site_that_claims_another_s_place_is_refused_by_its_key(federation: Federation) -> None:
    """Site b calls itself client 0, which is site a."""
    config = {**SMALL, "method": "fedavg", "rounds": 1, "evaluate-every": 1, "clients-at-start": 1}
    federation.stop("sites/b")
    federation.edit("sites/b", {"partition-id": 0})
    before = federation.log("sites/b", "supernode").count("SuperNode ID")
    federation.start("sites/b")
    wait_until("site b is connected", lambda: federation.log("sites/b", "supernode").count("SuperNode ID") > before, 120)
    try:
        log = federation.run({**config, "name": "claims"})
    finally:
        federation.stop("sites/b")
        federation.edit("sites/b", {"partition-id": 1})
        federation.start("sites/b")
    assert "it calls itself client 0, but its key is client 1's: correct its partition-id" in log
    assert "2/2 clients" in log


def test_a_join_without_token_is_refused_and_harms_nobody(federation: Federation, tmp_path: Path) -> None:
    config: dict[str, Any] = {**SMALL, "method": "fedtan", "name": "strangers", "rounds": 2}
    before = federation.log("server", "serverapp").count("exchange: listening")
    process = federation.submit(config)
    try:
        wait_until("the exchange", lambda: federation.log("server", "serverapp").count("exchange: listening") > before, 180)
        ca = (federation.kit / "server/ca.crt").read_bytes()
        for token in ("", "0" * 32):
            with pytest.raises(ExchangeFailed) as refused:
                GrpcExchange(f"127.0.0.1:{federation.exchange}", token, 4, ca, 20.0, 20.0)
            print(f"join with token {token!r}: {refused.value}")
        time.sleep(1)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, out
    print(said(federation.log("server", "serverapp"), "refused"))
    reference = in_process(config, tmp_path / "reference")
    assert differing(federation.result("strangers") / "model.safetensors", reference / "model.safetensors") == []
