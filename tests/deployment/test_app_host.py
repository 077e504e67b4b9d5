"""The host of ClientApps, with messages that need no SuperNode: each in a process of its own, the app imported once, limits named."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower.layerwise.exchange_address import DEPLOYED
from fl_bn_site import app_host, supernode
from fl_bn_site.app_host import CannotUnpack, Record, Request, Site, unpack
from fl_bn_site.audit import lines_in
from fl_bn_site.policy import NotAllowed

ROOT = Path(__file__).parents[2]

# The host by its path, as deployments run it: the package around it would import torch.
ALONE = f"""
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("app_host", {app_host.__file__!r})
app_host = sys.modules["app_host"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(app_host)
"""
# What runs in a Python of its own: the host's cold process, where an app is a file of Python, and a message writes one line.
HOST = """
import json, time
app_host.PRELOADED = ("json",)
out = Path({out!r})

def load(site, request, installed):
    made = {{"loaded by": os.getpid(), "messages": 0}}
    exec((site.app_folder(request) / "app.py").read_text(), {{}}, made)
    return made

def answer(site, request, app):
    cold = app is None
    try:
        app = load(site, request, False) if cold else app
        app["messages"] += 1
        said = {{**app, "cold": cold, "pid": os.getpid()}}
    except Exception as error:
        said = {{"cold": cold, "error": repr(error)}}
    with out.open("a") as file:
        file.write(json.dumps({{"token": request.token, **said}}) + "\\n")

app_host.load, app_host.answer = load, answer
app_host.serve(sys.stdin, app_host.Site("nowhere", Path({home!r}), Path({home!r}) / "policy.toml"))
"""


class Host:
    def __init__(self, folder: Path) -> None:
        self.out, self.site = folder / "out", Site("nowhere", folder)
        self.out.write_text("")
        code = ALONE + HOST.format(out=str(self.out), home=str(folder))
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)

    def unpack(self, request: Request, code: str) -> None:
        folder = self.site.app_folder(request)
        folder.mkdir(parents=True)
        (folder / "app.py").write_text(code)

    def ask(self, *requests: Request) -> list[dict[str, Any]]:
        """What each message's process said, in the order of ``requests``."""
        before = len(self.out.read_text().splitlines())
        assert self.process.stdin is not None
        for request in requests:
            self.process.stdin.write(json.dumps(asdict(request)) + "\n")
            self.process.stdin.flush()
        end = time.monotonic() + 30
        while len(lines := self.out.read_text().splitlines()[before:]) < len(requests):
            assert time.monotonic() < end, "a message got no answer"
            time.sleep(0.02)
        said = {line["token"]: line for line in map(json.loads, lines)}
        return [said[request.token] for request in requests]

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def request(token: str, app: str = "a" * 64) -> Request:
    return Request(token, "fl-bn/fl-bn", "0.1.0", app)


def test_an_app_is_imported_once_and_every_message_has_a_process_of_its_own(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.unpack(request(""), "import sys; program = sys.argv[0]; del sys")
        said = host.ask(request("1"), request("2"), request("3"))
        assert {line["program"] for line in said} == {DEPLOYED}, "fl-bn's app then ends a message that hangs"
        assert len({line["pid"] for line in said}) == 3
        assert len({line["loaded by"] for line in said}) == 1
        assert said[0]["loaded by"] not in {line["pid"] for line in said}
        assert [line["messages"] for line in said] == [1, 1, 1], "what a message changes ends with it"
        assert not any(line["cold"] for line in said)

        host.unpack(request("", "b" * 64), "x = 2")
        (other,) = host.ask(request("4", "b" * 64))
        assert (other["x"], other["loaded by"] == said[0]["loaded by"]) == (2, False)
    assert host.process.returncode == 0


def test_an_app_that_is_not_unpacked_yet_is_the_first_message_s_affair(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        (first,) = host.ask(request("1"))
        assert (first["cold"], "FileNotFoundError" in first["error"]) == (True, True)
        host.unpack(request(""), "x = 1")
        (second,) = host.ask(request("2"))
        assert (second["cold"], second["x"]) == (False, 1)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("raise RuntimeError('broken app')", "broken app"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", ""),
    ],
    ids=["raises", "starts threads"],
)
def test_an_app_that_cannot_be_kept_is_imported_by_every_message(tmp_path: Path, code: str, word: str) -> None:
    with Host(tmp_path) as host:
        host.unpack(request(""), code + "\ndel threading, time" * ("threading" in code))
        for line in host.ask(request("1"), request("2")):
            assert line["cold"]
            assert word in line.get("error", "")


@pytest.mark.parametrize("preloaded", [True, False])
def test_an_app_with_scikit_learn_is_kept_since_its_threads_start_before(preloaded: bool) -> None:
    """scikit-learn's BLAS starts a thread at its import, and threads do not survive a fork. The control leaves scipy out."""
    script = ALONE + (
        "import importlib\n"
        f"for name in app_host.PRELOADED:\n if {preloaded} or 'scipy' not in name: importlib.import_module(name)\n"
        "if not (child := os.fork()):\n"
        " from sklearn.datasets import load_digits\n"
        " print(len(os.listdir('/proc/self/task')), flush=True); os._exit(0)\n"
        "os.waitpid(child, 0)"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout.strip() == "1") is preloaded


def test_the_messages_of_a_cold_process_that_is_killed_end(tmp_path: Path) -> None:
    """A message watches the cold process (Flower's monitor, every 0.2 s)."""
    script = ALONE + (
        "import time; app_host.find('start_parent_process_monitor'); pid = os.fork()\n"
        "if pid == 0:\n app_host.find('start_parent_process_monitor')(os.getppid()); print(os.getpid(), flush=True); time.sleep(60)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as cold:
        assert cold.stdout is not None
        message = int(cold.stdout.readline())
        os.kill(cold.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while Path(f"/proc/{message}").exists() and "Z" not in Path(f"/proc/{message}/status").read_text().split("State:")[1][:4]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_memory_beyond_the_policy_is_refused_by_name() -> None:
    script = ALONE + (
        "policy = app_host.policy_module().Policy(max_memory=float(sys.argv[1])); app_host.limit_memory(policy.memory())\n"
        "try:\n    app_host._within_memory(policy, lambda: len(bytearray(1 << 28))); print('enough')\n"
        "except app_host.policy_module().NotAllowed as error:\n    print(error)"
    )
    said = [
        subprocess.run([sys.executable, "-c", script, most], capture_output=True, text=True, timeout=100, check=True).stdout.strip()
        for most in ("0.2", "0.5")
    ]
    assert said == ["this site's policy has max-memory = 0.2 GB, and the run needs more", "enough"]


def test_other_errors_are_not_put_down_to_memory() -> None:
    """Negative control."""
    policy = app_host.policy_module().Policy(max_memory=1.0)

    def fail() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        app_host._within_memory(policy, fail)


def test_the_host_s_policy_module_is_the_site_s_own() -> None:
    assert app_host.policy_module().__name__ == "policy_of_this_site"
    assert app_host.policy_module() is app_host.policy_module()
    assert app_host.policy_module().NotAllowed is not NotAllowed


def test_a_supernode_asks_often_while_there_is_work_and_rarely_else(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [1000.0]
    monkeypatch.setattr(supernode.time, "sleep", slept.append)
    monkeypatch.setattr(supernode.time, "monotonic", lambda: now[0])
    clock = supernode.PollingTime(0.5)
    clock.worked = now[0] - 100
    clock.sleep(3)  # nothing came for long
    clock.sleep(0.5)  # an app is at work
    clock.sleep(3)
    now[0] += 61
    clock.sleep(3)
    assert slept == [3, 0.1, 0.5, 3]
    assert clock.monotonic() == now[0], "the rest of `time` is as it was"


def test_the_host_answers_health_checks_for_as_long_as_it_lives() -> None:
    """As compose asks it, while no SuperNode is there. The negative control: after its end nobody answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        health = f"127.0.0.1:{free.getsockname()[1]}"

    def check() -> int:
        words = [sys.executable, str(ROOT / "deploy/docker/healthcheck.py"), health]
        return subprocess.run(words, capture_output=True, check=False).returncode

    words = [sys.executable, "-P", app_host.__file__, "--appio-api-address=127.0.0.1:1", f"--health-server-address={health}"]
    host = subprocess.Popen(words)
    try:
        end = time.monotonic() + 60
        while check():
            assert time.monotonic() < end, "no answer"
        for _ in range(3):  # not only at once
            time.sleep(0.3)
            assert check() == 0
    finally:
        host.terminate()
        host.wait()
    assert check() == 1


def test_an_app_that_cannot_be_unpacked_is_said_in_a_sentence_and_is_a_line_of_the_log(tmp_path: Path) -> None:
    from flwr.app import Message, RecordDict

    asked = Message(RecordDict(), dst_node_id=1, message_type="train", ttl=60.0)
    site, content = Site("nowhere", tmp_path / "home", audit=tmp_path / "audit"), io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pyproject.toml", "[project]\nname = 'x'\n")
    record = Record(site, asked, {"name": "mine"}, content.getvalue())
    for fab, words in ((content.getvalue(), "Flower refuses its files"), (b"no archive", "File is not a zip file")):
        with pytest.raises(CannotUnpack) as told:
            unpack(site, Request("token", "you/x", "1", "a" * 64), fab, "any")
        reply = record.failed(told.value)
        assert f"cannot unpack the app of the run ({words}): the site's clientapp.log has what Flower printed" in reply.error.reason
        *_, line = lines_in(tmp_path / "audit")
        assert line.values is not None
        assert (line.values["decision"], line.values["bytes"], line.values["name"]) == ("failed", 0, "mine")
        assert line.values["reason"] == reply.error.reason
    assert list((tmp_path / "home/apps").iterdir()) == [], "nothing of it stays"
