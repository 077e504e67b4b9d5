"""The host of ClientApps, with messages that need no SuperNode: each in a process of its own, the app imported once, limits named."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fl_bn_site import app_host
from fl_bn_site.app_host import CannotLoad, Request, load
from tests.deployment.federation import wait_until
from tests.deployment.inner import Package
from tests.deployment.test_signing import package_of

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
        assert {line["program"] for line in said} == {"flwr-clientapp"}, "fl-bn's app then ends a message that hangs"
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


def test_an_app_that_cannot_be_kept_is_imported_by_every_message(tmp_path: Path) -> None:
    """Threads do not survive a fork."""
    with Host(tmp_path) as host:
        of = host.package("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
        assert [host.ask(Request(token, of))[0]["cold"] for token in "12"] == [True, True]
        wait_until("nothing of it stays", lambda: not host.folders())


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


def test_nothing_of_a_package_lands_outside_its_folder(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in ("../../../up", "/root", "a/../../../b", link):
            archive.writestr(name, str(tmp_path))
    with pytest.raises(CannotLoad):
        load("c0de", content.getvalue(), tmp_path / "apps/new")
    files = {path.relative_to(tmp_path).as_posix(): path.is_symlink() for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == dict.fromkeys((f"apps/new/c0de/{name}" for name in ("up", "root", "a/b", "link")), False)
