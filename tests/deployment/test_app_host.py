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
from fl_bn_site.app_host import CannotLoad, Record, Request, Site, load
from fl_bn_site.audit import lines_in
from fl_bn_site.policy import NotAllowed
from fl_bn_site.submitters import Package
from tests.deployment.federation import wait_until
from tests.deployment.test_signing import package_of

ROOT = Path(__file__).parents[2]

# The host by its path, as deployments run it: the package around it would import torch.
ALONE = f"""
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("app_host", {app_host.__file__!r})
app_host = sys.modules["app_host"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(app_host)
"""
# What runs in a Python of its own: the host's cold process. A message finds its package in a file, and writes one line.
HOST = """
import json
app_host.PRELOADED = ("json",)
out, home = Path({out!r}), Path({home!r})

def answer(site, request, app, folder):
    said = {{"cold": not isinstance(app, app_host.App), "pid": os.getpid()}}
    try:
        if said["cold"]:
            package = (home / request.code).read_bytes()
            app.write(package)
            app = app_host.load(request.code, package, folder)
        module = sys.modules["app"]
        module.messages += 1
        said |= {{name: value for name, value in vars(module).items() if type(value) in (int, str)}}
    except Exception as error:
        said["error"] = repr(error)
    with out.open("a") as file:
        file.write(json.dumps({{"token": request.token, **said}}) + "\\n")

app_host.answer = answer
app_host.serve(sys.stdin, app_host.Site("nowhere", home, home / "policy.toml"))
"""
PYPROJECT = """
project = {name = "app", version = "1"}
[tool.flwr.app]
publisher = "p"
components = {serverapp = "app:app", clientapp = "app:app"}
"""
APP = """
import os, sys
from flwr.clientapp import ClientApp
loaded_by, program, app, messages = os.getpid(), sys.argv[0], ClientApp(), 0
"""


class Host:
    def __init__(self, folder: Path) -> None:
        self.out, self.home = folder / "out", folder
        self.out.write_text("")
        code = ALONE + HOST.format(out=str(self.out), home=str(folder))
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)

    def package(self, code: str) -> str:
        """The SHA-256 of a new package, which messages find."""
        package = Package(package_of({"pyproject.toml": PYPROJECT, "app.py": APP + code}))
        (self.home / package.code).write_bytes(package.content)
        return package.code

    def folders(self) -> list[Path]:
        """The folders of packages that are unpacked now."""
        return list((self.home / "apps").glob("*/*"))

    def send(self, request: Request) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()

    def ask(self, *requests: Request) -> list[dict[str, Any]]:
        """What each message's process said, in the order of ``requests``."""
        before = len(self.out.read_text().splitlines())
        for request in requests:
            self.send(request)
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


def test_an_app_is_imported_once_and_every_message_has_a_process_of_its_own(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        code, other = host.package(""), host.package("x = 2")
        (first,) = host.ask(Request("0", code))
        said = host.ask(*(Request(token, code) for token in "123"))
        assert {line["program"] for line in said} == {DEPLOYED}, "fl-bn's app then ends a message that hangs"
        assert len({line["pid"] for line in said}) == 3
        assert len({line["loaded_by"] for line in said}) == 1
        assert said[0]["loaded_by"] not in {line["pid"] for line in said}
        assert [line["messages"] for line in said] == [1, 1, 1], "what a message changes ends with it"
        assert [line["cold"] for line in (first, *said)] == [True, False, False, False]

        (_, last) = (host.ask(Request(token, other))[0] for token in "45")
        assert (last["cold"], last["x"], last["loaded_by"] == said[0]["loaded_by"]) == (False, 2, False)
    assert host.process.returncode == 0


def test_no_process_imports_what_another_has_unpacked_and_a_new_policy_ends_all_of_it(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        code = host.package("import os; x = 1")
        for folder in ("apps", "elsewhere"):
            (tmp_path / folder).mkdir()
        (tmp_path / "apps" / code).symlink_to(tmp_path / "elsewhere")
        files = [host.ask(Request(token, code))[0]["__file__"] for token in "01"]
        assert files[0] != files[1], "the process of the first message has unpacked it, and the warm one"
        wait_until("the first message has ended", lambda: host.folders() == [Path(files[1]).parent])
        assert Path(files[1]).parent.name == code
        Path(files[1]).write_text("raise SystemExit")
        (tmp_path / "policy.toml").write_text("min-samples = 2\n")
        host.send(Request())
        wait_until("the package is deleted", lambda: not host.folders())
        said = [host.ask(Request(token, code))[0] for token in "23"]
        assert [(line["cold"], line["x"]) for line in said] == [(True, 1), (False, 1)]
        assert list((tmp_path / "elsewhere").iterdir()) == []


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
        of = host.package(code)
        for token in "123":
            (line,) = host.ask(Request(token, of))
            assert line["cold"]
            assert word in line.get("error", "")
        wait_until("nothing of it stays", lambda: not host.folders())


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
    site, content = Site("nowhere", tmp_path / "home", audit=tmp_path / "audit"), package_of({"app.py": ""})
    record = Record(site, asked, {"name": "mine"}, content)
    for fab, words in ((content, "Cannot find pyproject.toml in "), (b"no archive", "File is not a zip file")):
        with pytest.raises(CannotLoad) as told:
            load(Package(fab).code, fab, site.new_folder())
        reply = record.failed(told.value)
        assert f"this site cannot unpack the app of the run ({words}" in reply.error.reason
        *_, line = lines_in(tmp_path / "audit")
        assert line.values is not None
        assert (line.values["decision"], line.values["bytes"], line.values["name"]) == ("failed", 0, "mine")
        assert line.values["reason"] == reply.error.reason


def test_nothing_of_a_package_lands_outside_its_folder(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in ("../../../up", "/root", "a/../../../b", link):
            archive.writestr(name, str(tmp_path))
    with pytest.raises(CannotLoad, match="Cannot find pyproject.toml"):
        load("c0de", content.getvalue(), tmp_path / "apps/new")
    files = {path.relative_to(tmp_path).as_posix(): path.is_symlink() for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == dict.fromkeys((f"apps/new/c0de/{name}" for name in ("up", "root", "a/b", "link")), False)
