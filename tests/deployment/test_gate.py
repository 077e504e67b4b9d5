"""A site's gate, with apps in real processes but without a SuperNode: what it refuses, what runs, what leaves, and who dies."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fl_bn_site import wire
from fl_bn_site.answer import LATE, Answer, Site
from fl_bn_site.gate import SECRET, write_command
from fl_bn_site.packages import PackageError, files_of, unpack
from fl_bn_site.programs import listens, pause_less
from tests.deployment.federation import wait_until
from tests.deployment.inner import Package, check, hand_out, lines_in
from tests.deployment.test_signing import ALICE, MINE, package_of
from tests.listed import listed

PYPROJECT = """
project = {name = "app", version = "1"}
[tool.flwr.app]
publisher = "p"
components = {serverapp = "app:app", clientapp = "app:app"}
config = {rounds = 1, name = "", run-signature = ""}
"""
# An app that answers with what its module says of itself. ``{}`` stands for the body of the call.
APP = """
import os, sys
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
loaded_by, program, messages = os.getpid(), sys.argv[0], 0

def app(message, context):
    global messages
    messages += 1
    told = {"pid": os.getpid(), "loaded_by": loaded_by, "messages": messages, "program": program, "file": __file__}
BODY
    return Message(RecordDict({"told": ConfigRecord(told)}), reply_to=message)
"""
ALONE = "import sys; from fl_bn_site import apps; apps.PRELOADED = ('flwr.app',); apps.main()"


def package(body: str = "pass", above: str = "") -> bytes:
    """A package whose app does ``body`` with a message, after the module has done ``above``."""
    return package_of({"pyproject.toml": PYPROJECT, "app.py": above + APP.replace("BODY", f"    {body}")})


class Apps:
    """A process that runs apps for all tests of this file, and has imported little."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.start()

    def start(self) -> None:
        self.place.unlink(missing_ok=True)
        self.process = subprocess.Popen([sys.executable, "-c", ALONE, str(self.place)], start_new_session=True)
        wait_until("the apps listen", self.place.exists, 120)

    def end(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


class Gate:
    """A site with a folder of its own."""

    def __init__(self, folder: Path, apps: Apps) -> None:
        self.folder, self.apps = folder, apps
        self.site = Site(folder / "node", folder / "policy.toml", folder / "node/audit", folder / "packages", apps.place)
        self.site.home.mkdir()
        self.policy("")

    def policy(self, text: str) -> None:
        hand_out([ALICE], self.folder)
        self.site.policy.write_text(text if "allow-code" in text else f'allow-code = "any"\n{text}')

    def ask(
        self, content: bytes, run: int = 5, app: str = "p/app", ttl: float = 600.0, asked: Any = (), told: Any = (), **config: Any
    ) -> Message:
        """Ask as Flower's program does: it installs a package, loads an app by the server's names, and calls it.

        ``asked`` has other fields of the message's metadata, and ``told`` other records, as a server may choose them.
        """
        answer = Answer(self.site)
        answer.install(content, flwr_dir="/nowhere", skip_prompt=True)
        message = Message(RecordDict({"arrays": ArrayRecord(), **dict(told)}), 1, "train", ttl=ttl)
        message.metadata.__dict__.update({"_run_id": run, "_message_id": message.object_id, "_src_node_id": 1, **dict(asked)})
        given = {"rounds": 1, "name": "", "run-signature": ""} | config
        self.context = Context(run, 7, {"state-dir": "/state"}, RecordDict(), given)
        return answer.loader("", app_path=None, multi_app=True)(app, "../../1", "0" * 64)(message=message, context=self.context)

    def told(self, content: bytes, **config: Any) -> dict[str, Any]:
        """What the app of a package says of itself."""
        reply = self.ask(content, **config)
        assert not reply.has_error(), reply.error.reason
        return dict(reply.content["told"])

    def lines(self) -> list[dict[str, Any]]:
        assert check(self.site.audit).faults == ()
        return [line.values for line in lines_in(self.site.audit) if line.values]


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apps]:
    made = Apps(tmp_path_factory.mktemp("apps") / "run/apps.sock")
    yield made
    made.end()


@pytest.fixture
def gate(tmp_path: Path, apps: Apps) -> Gate:
    return Gate(tmp_path, apps)


def test_an_app_is_imported_once_and_every_message_has_a_process_of_its_own(gate: Gate) -> None:
    """Two runs that take turns keep their apps."""
    content, other = package(), package("told['other'] = 1")
    said = [gate.told(one) for one in (content, other, content, other, content)]
    assert len({one["pid"] for one in said}) == 5
    assert [one["loaded_by"] for one in said[:3]] == [one["loaded_by"] for one in said[2:]]
    assert len({one["loaded_by"] for one in said}) == 2
    assert {one["messages"] for one in said} == {1}, "what a message changes ends with it"
    assert {one["program"] for one in said} == {"flwr-clientapp"}, "fl-bn's app then ends a message that hangs"
    assert [one.get("other") for one in said] == [None, 1, None, 1, None]
    threads = package(above="import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    assert all(one["pid"] == one["loaded_by"] for one in (gate.told(threads), gate.told(threads))), "threads do not survive a fork"


# What a message brings and takes away


def test_content_and_state_come_back_as_they_were(gate: Gate) -> None:
    body = (
        "context.state['kept'] = ConfigRecord({'bytes': [b'', bytes(range(256))], 'text': 'ä', 'yes': True})\n"
        "    told |= {'key': context.node_config['state-dir'], 'rounds': context.run_config['rounds']}\n"
        "    import numpy as np\n    from flwr.app import Array\n"
        "    arrays = ArrayRecord({'x': Array(np.arange(6, dtype='float32').reshape(2, 3)), 'empty': Array(np.zeros((0, 2)))})\n"
        "    metrics = MetricRecord({'loss': float('nan'), 'samples': 9, 'each': [1.5, 2.0]})\n"
        "    return Message(RecordDict({'arrays': arrays, 'metrics': metrics, 'told': ConfigRecord(told)}), reply_to=message)"
    )
    reply = gate.ask(package(body), rounds=3)
    arrays = reply.content.array_records["arrays"]
    assert np.array_equal(arrays["x"].numpy(), np.arange(6, dtype="float32").reshape(2, 3))
    assert arrays["empty"].numpy().shape == (0, 2)
    metrics = dict(reply.content.metric_records["metrics"])
    assert np.isnan(metrics.pop("loss"))
    assert metrics == {"samples": 9, "each": [1.5, 2.0]}
    assert dict(gate.context.state["kept"]) == {"bytes": [b"", bytes(range(256))], "text": "ä", "yes": True}
    told = reply.content["told"]
    assert (told["key"], told["rounds"]) == ("/state", 3)
    (line,) = gate.lines()
    assert (line["decision"], line["tensors"], line["run"], line["message"]) == ("sent", 2, "5", "train")


def bare(*frame: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """What is read where the process of an app sends these bytes."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"".join(frame))
        far.close()
        return wire.receive(near)


RECORDS: list[Any] = [  # that Flower could not send
    3, [["a"]], [["a", "pickle", {}]], [["a", "config", {"b": {"blob": 9}}]], [["a", "config", {"b": {"other": 0}}]],
    [["a", "metrics", {"n": 10**26}]], [["a", "metrics", {"n": "text"}]], [["\ud800", "config", {}]],
    [["a", "arrays", {"x": ["float32", [-1], "numpy.ndarray", {"blob": 0}]}]], [["a", "arrays", {"x": []}]],
    [["a", "arrays", {"x": ["float32", [2**31], "numpy.ndarray", {"blob": 0}]}]],
]  # fmt: skip


def test_what_an_app_sends_is_read_by_its_schema() -> None:
    for length, sent in ((9, b"cut"), (24, b'{"sizes": [17179869184]}')):  # what is announced is not allocated before it comes
        with pytest.raises(EOFError):
            bare(wire.LENGTH.pack(length), sent)
    for header in (b"no json", b"[]", b"{}", b'{"sizes": [-1]}', b'{"sizes": ["1"]}', b'{"sizes": ' + b"[" * 100_000):
        with pytest.raises(wire.WireError):
            bare(wire.LENGTH.pack(len(header)), header)
    with pytest.raises(wire.WireError):
        bare(wire.LENGTH.pack(1 << 60))
    for records in RECORDS:
        with pytest.raises(wire.WireError):
            wire.records_of(records, [b"1234"])


# Who dies


def test_the_reason_of_a_death_or_of_an_error_is_the_reply_within_a_second(gate: Gate) -> None:
    gate.told(package())  # the program has started
    begin = time.monotonic()
    reply = gate.ask(package("os.kill(os.getpid(), 9)"))
    assert (reply.error.code, reply.error.reason) == (8, "its process was killed by SIGKILL")
    assert time.monotonic() - begin < 5.0, "an import of the app, and less than a second"
    assert gate.ask(package("os._exit(3)")).error.reason == "its process ended with exit code 3"
    late = gate.ask(package("import time; time.sleep(60)"), ttl=2.0)
    assert late.error.reason == "its process did not answer before the deadline of the message, and was ended"
    reply = gate.ask(package("raise LookupError('no data \\ud800')"))
    assert (reply.error.code, reply.error.reason) == (2, "<class 'LookupError'>:<'no data ?'>")
    reply = gate.ask(package(above="import nothing_of_this_name\n"))
    assert (reply.error.code, "nothing_of_this_name" in str(reply.error.reason)) == (1, True), "a server does not ask again"
    reply = gate.ask(package("raise LookupError('x' * 2**20)"))
    assert [line["decision"] for line in gate.lines()] == ["sent", *["failed"] * 6]
    assert (len(str(reply.error.reason)), reply.error.reason) == (500, gate.lines()[-1]["reason"]), "what leaves is what is logged"


def test_the_deadline_holds_whatever_an_app_does(gate: Gate) -> None:
    """It hangs at its import, while a long message waits for it, or later. Then the next message is answered."""
    for content, long in ((package(above="import time; time.sleep(600)\n"), 1 << 22), (package("import time; time.sleep(600)"), 1)):
        begin = time.monotonic()
        assert gate.ask(content, ttl=3.0, long="x" * long).error.reason == LATE
        assert time.monotonic() - begin < 8.0
        assert not gate.ask(package()).has_error()


def test_what_leaves_has_a_line_that_can_be_read_whatever_was_sent(gate: Gate) -> None:
    """Numbers and texts that Flower takes, and that no log should have."""
    content = [
        "'fl-bn/moments': ArrayRecord({'x.count': Array('float32', (1,), 'DATA OF A PATIENT', b'1234')})",
        "'fl-bn/metrics': MetricRecord({'samples': 2**62})",
        "'m': MetricRecord({'a': float('nan')})",
    ]
    bodies = [
        f"from flwr.app import Array, ArrayRecord, MetricRecord; return Message(RecordDict({{{one}}}), reply_to=message)" for one in content
    ]
    for body in bodies:
        gate.ask(package(body))
    for asked in ({"_group_id": "9" * 5000}, {"_group_id": "9" * 20}, {"_message_id": "\n" * 9999}):
        gate.ask(package(), asked=asked)
    gate.ask(package(), **{"batch-size": "x"})
    assert "of run 6, and its context of run 5" in str(gate.ask(package(), asked={"_run_id": 6}).error.reason), "as in a series of 1.42"
    assert len(gate.lines()) == 8


def test_a_program_that_is_started_again_gives_up_its_messages(gate: Gate) -> None:
    replies: list[Message] = []
    gate.told(package())
    content = package(f"import time; open({str(gate.folder / 'hangs')!r}, 'w'); time.sleep(60)")
    asking = threading.Thread(target=lambda: replies.append(gate.ask(content)))
    asking.start()
    wait_until("the message hangs", (gate.folder / "hangs").exists, 60)
    gate.apps.end()
    asking.join(10)
    assert replies[0].error.reason == "the program that runs its ClientApps was restarted while it worked on the message"
    gate.apps.start()
    assert gate.told(package())["messages"] == 1


def test_an_app_ends_with_its_gate(gate: Gate) -> None:
    """As where Flower ends a command since its run was stopped."""
    gate.told(package())
    place = gate.folder / "pid"
    body = f"import time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    asking = get_context("fork").Process(target=gate.ask, args=(package(body),))
    asking.start()
    wait_until("the message hangs", lambda: place.exists() and place.read_text(), 120)
    asking.kill()
    asking.join()
    wait_until("its process is gone", lambda: not Path("/proc", place.read_text()).exists(), 5)


# What is refused


def test_of_a_run_that_is_refused_nothing_is_unpacked(gate: Gate) -> None:
    """Of a run config that is signed, the server can leave out no key, change none, and send no other default."""
    gate.policy('allow-code = "signed"\n')
    content = package()
    signed, plain = Package(content, MINE).signed({"rounds": 2}), Package(content, MINE).signed({})
    for config in ({"rounds": 2}, signed | {"rounds": 3}, signed | {"run-signature": 3}, plain | {"rounds": 9}):
        reply = gate.ask(content, **config)
        assert reply.error.code == 2
        assert "NotAllowed'>:<'this site's policy has allow-code = signed, but the" in str(reply.error.reason)
    assert not gate.site.packages.exists()
    assert not (gate.site.home / "accepted").exists()
    gate.told(content, **signed)  # control
    gate.told(content, **plain)
    named, other = Package(content, MINE).signed({"name": "mine"}), {"fl-bn/config": ConfigRecord({"run": "other/state-00000001"})}
    assert "of the run other, which the signature does not name" in str(gate.ask(content, told=other, **named).error.reason)
    gate.told(content, told={"fl-bn/config": ConfigRecord({"run": "mine/state-00000001"})}, **named)  # control
    assert "was used for run 5 already" in str(gate.ask(content, run=6, **signed).error.reason)
    decisions = [(line["decision"], line["submitter"]) for line in gate.lines()]
    assert decisions == [("refused", None)] * 4 + [("sent", "alice")] * 2 + [("refused", "alice"), ("sent", "alice"), ("refused", "alice")]
    assert {line["code"] for line in gate.lines()} == {Package(content).code}


def test_memory_beyond_the_policy_is_refused_by_name(gate: Gate) -> None:
    content = package("bytearray(1 << 29)")
    gate.policy("max-memory = 0.3\n")
    assert "this site's policy has max-memory = 0.3 GB, and the run needs more" in str(gate.ask(content).error.reason)
    gate.policy("max-memory = 1.5\n")
    gate.told(content)  # control


def test_what_summarises_too_few_samples_stays(gate: Gate) -> None:
    """Vectors of an exchange, one by one or as questions of a replay, must tell their number of samples. Replies and their moments may."""
    gate.policy("min-samples = 8\n")
    vector = "from fl_bn.support.departures import leaving; leaving('exchange', 64, COUNT)"
    reply = (
        "from flwr.app import Array, MetricRecord; array = ArrayRecord({'x': Array('float32', (1,), '', b'1234')}); "
        "return Message(RecordDict({'fl-bn/{}': array, 'fl-bn/metrics': MetricRecord({'{}': COUNT})}), reply_to=message)"
    )
    told = (("exchange", "batch"), ("moments", "measured"), ("weights", "samples"))
    replies = [reply.replace("{}", section, 1).replace("{}", number, 1) for section, number in told]
    for body in (vector, *replies):
        for count, leaves in ((8, True), (7, False), (0, body in replies[1:])):
            answer = gate.ask(package(body.replace("COUNT", str(count))))
            assert leaves != ("min-samples = 8" in str(answer.has_error() and answer.error.reason)), (body, count)
            assert gate.lines()[-1]["decision"] == ("sent" if leaves else "refused")
            assert body is not vector or not leaves or gate.lines()[-2]["message"] == "exchange", "each vector has a line"


def test_where_the_line_cannot_be_written_no_answer_leaves(gate: Gate) -> None:
    (gate.site.home / "audit").write_text("a file in the place of the folder")
    reply = gate.ask(package())
    assert (reply.error.code, "AuditError" in str(reply.error.reason)) == (2, True)
    gate.policy('allow-code = "installed"\n')
    assert "AuditError" in str(gate.ask(package()).error.reason), "nor the reason of a refusal"


# Code on disk is not trusted


def plant(file: Path, line: str) -> None:
    file.parent.chmod(0o755)
    file.chmod(0o644)
    file.write_text(line + file.read_text())


def test_a_planted_line_does_not_run(gate: Gate) -> None:
    content, mark = package(), gate.folder / "ran"
    file = Path(gate.told(content)["file"])
    assert file.parent == gate.site.packages / Package(content).code
    evil = f"open({str(mark)!r}, 'w')\n"
    gate.policy("min-samples = 1\n")  # the app is imported anew
    plant(file, evil)
    assert gate.told(content)["file"] == str(file)
    for name in ("extra.py", "app/__init__.py", "__pycache__/app.cpython-311.pyc"):
        gate.policy(f"min-samples = {len(name)}\n")
        file.parent.chmod(0o755)
        (file.parent / name).parent.mkdir(exist_ok=True)
        (file.parent / name).write_text(evil)
        gate.told(content)
        assert not (file.parent / name).exists()
    assert not mark.exists()
    gate.policy("")
    gate.told(package(above=evil))
    assert mark.exists()  # control


@listed("there", ["a folder", "a link to a folder", "a file", "a link to a file"])
def test_what_was_there_before_is_replaced(there: str, tmp_path: Path) -> None:
    content = package()
    evil = unpack(tmp_path / "elsewhere", content, "")
    plant(evil / "app.py", "raise SystemExit\n")
    place = tmp_path / "packages" / evil.name
    place.parent.mkdir()
    if there == "a file":
        place.write_text("x")
    elif there == "a link to a folder":
        place.symlink_to(evil)
    else:
        shutil.copytree(evil, place)
    if there == "a link to a file":
        (place / "app.py").unlink()
        (place / "app.py").symlink_to(evil / "app.py")
    found = unpack(place.parent, content, "")
    assert (found, found.is_symlink(), (found / "app.py").is_symlink()) == (place, False, False)
    assert (found / "app.py").read_bytes() == files_of(content)["app.py"]
    assert (evil / "app.py").read_text().startswith("raise")


def test_no_text_of_the_server_is_a_path_and_nothing_of_a_package_lands_outside_its_folder(gate: Gate) -> None:
    before, content = set(gate.folder.iterdir()), package()
    for app in ("../../..", "/etc", "p/app\0", "p/../../x"):
        assert not gate.ask(content, app=app).has_error()
    assert set(gate.folder.iterdir()) - before == {gate.site.packages}
    assert {path.name for path in gate.site.packages.iterdir()} == {Package(content).code, "policy"}
    for name in ("../up", "/root", "a/../../b", "..", "a\\b"):
        with pytest.raises(PackageError):
            files_of(package_of({name: "x"}))


def test_flower_finds_no_other_program_and_no_other_site_s_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower 1.42 starts the program of the task that the server names. A SuperExec waits until its own SuperNode listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken, subprocess.Popen(["sleep", "60"]) as other:
        assert [listens(process, taken.getsockname()[1]) for process in (os.getpid(), other.pid)] == [True, False]
        other.kill()
    monkeypatch.setenv("PATH", os.environ["PATH"])
    assert shutil.which("flower-superexec")  # control
    (folder := tmp_path / "an environment").mkdir()
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    write_command(tmp_path / "home")
    assert b"in <module>" in subprocess.run(["flwr-clientapp"], capture_output=True, check=False).stderr  # it runs, and finds no gate
    found = [shutil.which(name) for name in ("flwr-clientapp", "flwr-serverapp", "flower-superexec", "python")]
    assert found == [str(tmp_path / "home/bin/flwr-clientapp"), None, None, None]
    assert os.stat(tmp_path / "home" / SECRET).st_mode & 0o777 == 0o600


def test_waits_for_a_tensor_grow_with_the_time_since_the_first_one_began(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: sum(waited))
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(threading.Event, "wait", lambda event, timeout: waited.append(timeout))
    pause_less()
    for pause in (0.5, 3.0, 5.0):  # while an app works, after it, and as Flower's programs end
        time.sleep(pause)
    assert slept == [0.1, 0.1, 5.0]
    event, flowers = threading.Event(), [1.0, 2.0, 4.0, 8.0, *[10.0] * 28, 24.0]
    for pause in flowers:
        event.wait(pause)
    expected = [min(pause, max(0.1, 0.2 * sum(waited[:i]))) for i, pause in enumerate(flowers[:-1])]
    assert waited == pytest.approx([*expected, 24.0])
    assert waited[0] == 0.1
    assert waited[-2] == 10.0
