"""A real Ray cluster of two raylets on this machine: the same bits as in process, also when one of them is killed in mid-run."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private.services import write_node_ip_address
from ray.cluster_utils import Cluster

from tests.experiment.inside import override
from tests.integration.runs import ROOT, TINY, bits, differences, environment, tiny

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore::ResourceWarning")]
LIMIT = 500.0  # seconds
THREE = (  # Flower 1.25 replaces all options by those that are given
    "options.num-supernodes=3 options.backend.client-resources.num-cpus=1 options.backend.init-args.address='auto'"
)


def node(letter: str) -> dict[str, Any]:
    return {"num_cpus": 1, "object_store_memory": 120 * 2**20, "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": letter * 56}}


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Two nodes of one CPU, each with an address of its own: a driver takes the node that has its machine's address for its own."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 starves beside other tests
    cluster = Cluster(True, head_node_args={"include_dashboard": False, **node("a")})
    second, head = cluster.add_node(node_ip_address="127.0.0.2", **node("b")), cluster.head_node
    write_node_ip_address(head.get_session_dir_path(), head.node_ip_address)  # the second node wrote its own into the common folder
    yield cluster, second
    cluster.shutdown()
    gc.collect()  # the files that Ray left open, here, where that is no error


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_run_over_two_nodes_gives_the_bits_of_one_in_process_also_when_one_is_killed(machines: tuple[Any, Any], tmp_path: Path) -> None:
    cluster, second = machines
    keys = {**TINY, "method": "fedbn", "rounds": 8, "local-steps": 60, "wait-timeout": LIMIT, "output": str(tmp_path), "name": "killed"}
    command = ["flwr", "run", ".", "cluster", "--run-config", override(keys), "--federation-config", THREE]
    variables = {**environment(tmp_path / "flower"), "RAY_ADDRESS": cluster.address, "PYTHONFAULTHANDLER": "1"}
    rounds, log = tmp_path / "killed" / "rounds.jsonl", tmp_path / "log"
    with log.open("w") as said, subprocess.Popen(command, cwd=ROOT, env=variables, stdout=said, stderr=subprocess.STDOUT) as process:
        end = time.monotonic() + LIMIT
        while lines(rounds) < 2 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        cluster.remove_node(second, allow_graceful=False)  # as a power cut does
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where it hangs: PYTHONFAULTHANDLER
            code = process.wait()
    text = log.read_text()
    assert code == 0, text
    assert "was lost in round" in text
    assert "processes left: 1" in text
    assert [json.loads(line)["accepted"] for line in rounds.read_text().splitlines()] == [3] * 8
    longer = {"rounds": 8, "local-steps": 60}
    assert differences(bits(tiny(tmp_path / "here", "fedbn", **longer)), bits(tmp_path / "killed")) == []
    assert differences(bits(tiny(tmp_path / "other", "fedbn", seed=1)), bits(tmp_path / "killed")) != []  # control
