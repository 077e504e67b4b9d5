"""The supervisor, with small programs in Flower's place; and once with Flower's."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_bn_site.commands import Command, program
from fl_bn_site.folders import SiteFolder
from fl_bn_site.kit import KitPlan, create
from fl_bn_site.superlink import tells
from fl_bn_site.supervisor import AlreadyRunning, DailyLog, Delays, Output, SupervisedProgram, supervise

QUICK = Delays(first=0.2, longest=0.8, grace=1.0)


def command(name: str, code: str, folder: Path, **more: object) -> Command:
    return Command(name, (sys.executable, "-I", "-S", "-u", "-c", code), {"SUPERVISED": "yes"}, folder, **more)  # type: ignore[arg-type]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def until(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def supervised(commands: list[Command], folder: Path, end_when: Callable[[], object], patience: Delays = QUICK) -> list[str]:
    """Supervises until ``end_when``, then sends SIGTERM; what the supervisor itself said."""

    def end() -> None:
        try:
            until(end_when)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    supervise(commands, folder, patience)
    thread.join()
    return [line[24:] for line in lines(folder / "fl-bn.log")]


def running(pid: int) -> bool:
    """And no zombie: what has ended may stay in the table of processes until someone asks for its exit code."""
    try:
        return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is None
    except FileNotFoundError:
        return False


def test_the_wait_doubles_up_to_its_limit() -> None:
    assert [Delays().delay(failures) for failures in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert Delays().delay(10_000) == 30


def test_a_program_that_ends_is_started_again_after_longer_and_longer_waits(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"import time; print(time.monotonic(), file=open({str(starts)!r}, 'a')); raise SystemExit(3)"
    said = supervised([command("faulty", code, tmp_path)], tmp_path, lambda: len(lines(starts)) >= 5)
    times = [float(line) for line in lines(starts)]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert all(gap >= wait for gap, wait in zip(gaps, [0.2, 0.4, 0.8, 0.8], strict=False)), gaps
    waits = [re.search(r"faulty ended with exit code 3; it is started again in (\S+) s", line) for line in said]
    assert [found[1] for found in waits if found][:4] == ["0.2", "0.4", "0.8", "0.8"]


def test_a_steady_program_starts_again_at_once_however_often_it_ended(tmp_path: Path) -> None:
    patience = Delays(first=0.05, longest=60.0, steady=0.0)
    said = supervised([command("steady", "", tmp_path)], tmp_path, lambda: len(lines(tmp_path / "fl-bn.log")) > 12, patience)
    assert sum("again in 0.05 s" in line for line in said) >= 5


@pytest.mark.parametrize("deaf", [False, True])
def test_a_program_starts_again_when_a_file_that_it_has_read_changes(tmp_path: Path, deaf: bool) -> None:
    """A site's new key. While the file is away, nothing happens. A SuperNode that tries to connect does not hear SIGTERM."""
    key, starts = tmp_path / "site.key", tmp_path / "starts"
    key.write_text("old")
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " * deaf
    code = f"{ignores}import time; print(open({str(key)!r}).read(), file=open({str(starts)!r}, 'a')); time.sleep(60)"
    steps: list[str] = []

    def done() -> bool:
        if not steps and lines(starts) == ["old"]:
            key.unlink()
            steps.append("away")
            time.sleep(0.5)
            assert lines(starts) == ["old"]
            key.write_text("new")
        return lines(starts) == ["old", "new"]

    said = supervised([command("supernode", code, tmp_path, reads=(key,))], tmp_path, done)
    assert f"supernode is started again, since {key} has changed" in said
    assert ("supernode does not end, and is killed" in said) is deaf


def test_what_has_done_its_work_is_not_started_again(tmp_path: Path) -> None:
    once = command("once", "print('done')", tmp_path, once=True)
    other = command("other", "", tmp_path)
    said = supervised([once, other], tmp_path, lambda: sum("other started" in line for line in lines(tmp_path / "fl-bn.log")) > 2)
    assert sum("once" in line for line in said) == 1


def test_output_is_kept_and_shown_with_the_program_s_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys, time; print(os.environ['SUPERVISED'], os.getcwd()); print('\\033[91mred\\033[0m', file=sys.stderr);"
        "print('the end', flush=True); time.sleep(60)"
    )
    speaker = command("speaker", code, tmp_path, hints={"red": "what to do", "blue": "never said"})
    said = supervised([speaker], tmp_path, lambda: any("the end" in line for line in lines(tmp_path / "speaker.log")))
    kept = [line[24:] for line in lines(tmp_path / "speaker.log")]
    assert sorted(kept) == sorted([f"yes {tmp_path}", "red", "the end"])
    shown = capfd.readouterr().out.splitlines()
    assert {f"speaker   | yes {tmp_path}", "speaker   | red", "speaker   | the end"} <= set(shown)
    assert "speaker said 'red': what to do" in said


def test_a_log_file_is_put_aside_when_it_is_large_or_a_day_old(tmp_path: Path) -> None:
    path = tmp_path / "speaker.log"

    def say(text: str, at: float) -> None:
        handler = DailyLog(path, maxBytes=1000, backupCount=2, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        record = logging.LogRecord("speaker", logging.INFO, "", 0, text, (), None)
        record.created = at
        handler.emit(record)
        handler.close()

    now = time.time()
    say("first", now - 86300)
    say("second", now - 86200)
    assert not (tmp_path / "speaker.log.1").exists(), "control: 100 s after the first line it is no day old"
    say("third", now + 200)
    assert [line[24:] for line in lines(tmp_path / "speaker.log.1")] == ["first", "second"]
    say("x" * 990, now + 200)
    assert [line[24:] for line in lines(tmp_path / "speaker.log.1")] == ["third"]
    assert not (tmp_path / "speaker.log.3").exists()


def test_a_superlink_s_log_has_no_line_for_a_question() -> None:
    def tell(message: str) -> bool:
        return tells(logging.LogRecord("flwr", logging.INFO, "", 0, message, ({},), None))

    assert not tell("[Fleet.PullMessages] node_id=%s")
    assert tell("[Fleet.CreateNode] node_id=%s")


def test_programs_are_asked_to_end_and_killed_if_they_do_not(tmp_path: Path) -> None:
    ready, polite = tmp_path / "ready", tmp_path / "polite"
    on_term = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: {then}); print('r', file=open({ready!r}, 'a')); time.sleep(60)"
    )
    bye = f"(print('bye', file=open({str(polite)!r}, 'a')), sys.exit(0))"
    commands = [
        command("polite", on_term.format(then=bye, ready=str(ready)), tmp_path),
        command("deaf", on_term.format(then="time.sleep(60)", ready=str(ready)), tmp_path),
    ]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    start = time.monotonic()
    said = supervised(commands, tmp_path, lambda: len(lines(ready)) == 2)
    assert lines(polite) == ["bye"]
    assert [line for line in said if "killed" in line] == ["deaf does not end, and is killed"]
    assert time.monotonic() - start < 15
    pids = [int(line.rpartition(" ")[2]) for line in said if "started" in line]
    assert len(pids) == 2
    assert not any(running(pid) for pid in pids)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_what_a_program_has_left_behind_ends_before_it_starts_again(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, file=open({str(pids)!r}, 'a')); raise SystemExit(1)"
    supervised([command("parent", code, tmp_path)], tmp_path, lambda: len(lines(pids)) >= 2)
    until(lambda: not any(running(int(pid)) for pid in lines(pids)), 5)


def test_what_keeps_a_program_s_output_open_holds_nothing_up(tmp_path: Path) -> None:
    """In a session of its own it is not killed, as what the kernel does not let end is not."""
    output = Output(tmp_path)
    program = SupervisedProgram(Command("left", ("sh", "-c", "setsid sleep 12 & exit 3"), {}, tmp_path), QUICK, output)
    longest, end = 0.0, time.monotonic() + 8
    while time.monotonic() < end and sum("left started" in line for line in lines(tmp_path / "fl-bn.log")) < 2:
        begin = time.monotonic()
        program.look(begin)
        longest = max(longest, time.monotonic() - begin)
        time.sleep(0.02)
    assert "left ended with exit code 3" in "".join(lines(tmp_path / "fl-bn.log"))
    assert longest < 4
    program.kill()
    output.close()


def test_a_character_that_the_terminal_cannot_show_stops_no_output(tmp_path: Path) -> None:
    code = "import sys, time; sys.stdout.buffer.write('\\U0001f600\\nafter\\n'.encode()); sys.stdout.flush(); time.sleep(60)"
    script = (
        "import sys; from pathlib import Path; from fl_bn_site.commands import Command;"
        "from fl_bn_site.supervisor import supervise;"
        f"supervise([Command('smiling', (sys.executable, '-S', '-c', {code!r}), {{}}, Path({str(tmp_path)!r}))], Path({str(tmp_path)!r}))"
    )
    argv, terminal = [sys.executable, "-c", script], os.environ | {"PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(argv, env=terminal, stdout=subprocess.PIPE) as supervisor:
        try:
            until(lambda: len(lines(tmp_path / "smiling.log")) == 2, 30)
        finally:
            supervisor.terminate()
            shown = supervisor.communicate()[0].decode("ascii").splitlines()
    assert [line[24:] for line in lines(tmp_path / "smiling.log")] == ["\U0001f600", "after"]
    assert {"smiling   | ?", "smiling   | after"} <= set(shown)


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = Command("missing", (str(tmp_path / "none"),), {}, tmp_path)
    said = supervised([missing], tmp_path, lambda: "again" in "".join(lines(tmp_path / "fl-bn.log")))
    assert any("missing ended with exit code 127" in line for line in said)
    assert "none cannot be run: No such file" in (tmp_path / "missing.log").read_text()


def test_a_folder_is_started_once(tmp_path: Path) -> None:
    refused = []

    def try_again() -> bool:
        if lines(tmp_path / "fl-bn.log"):
            with pytest.raises(AlreadyRunning, match=f"in {tmp_path.parent} already") as error:
                supervise([], tmp_path)  # the lock comes before the signals, which only a main thread may set
            refused.append(error)
        return bool(refused)

    supervised([command("one", "import time; time.sleep(60)", tmp_path)], tmp_path, try_again)
    assert refused


def test_programs_and_what_they_started_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); p = subprocess.Popen(['sleep', '60']);"
        f"print(os.getpid(), p.pid, file=open({str(pids)!r}, 'a')); time.sleep(60)"
    )
    script = (
        "import sys; from pathlib import Path; from fl_bn_site.commands import Command;"
        "from fl_bn_site.supervisor import supervise;"
        f"supervise([Command('deaf', (sys.executable, '-S', '-c', {code!r}), {{}}, Path({str(tmp_path)!r}))], Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as supervisor:
        until(lambda: lines(pids), 60)
        both = [int(pid) for pid in lines(pids)[0].split()]
        assert all(running(pid) for pid in both)
        supervisor.kill()
    until(lambda: not any(running(pid) for pid in both), 10)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def change(path: Path, **ports: int) -> None:
    """Gives other ports to lines of a TOML file."""
    text = path.read_text()
    for line, port in ports.items():
        text, count = re.subn(rf'^({line} = "[^"]*:)\d+"', rf'\g<1>{port}"', text, flags=re.MULTILINE)
        assert count == 1
    path.write_text(text)


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([program("fl-bn"), "start", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_kit_s_server_and_site_find_each_other(tmp_path: Path) -> None:
    fleet, control, serverappio, clientappio = free_ports(4)
    create(KitPlan("127.0.0.1", ["A", "B", "C"], fleet_port=fleet), tmp_path / "kit")
    server, site = tmp_path / "kit/server", tmp_path / "kit/sites/B"
    change(server / "server.toml", control=control, serverappio=serverappio)
    change(site / "site.toml", clientappio=clientappio)
    with started(server) as one, started(site) as other:
        until(lambda: "SuperNode ID:" in "".join(lines(site / "logs/supernode.log")), 120)
        until(lambda: len(lines(server / "logs/register.log")) == 3, 60)
        assert [line.rpartition(",")[2][4:] for line in lines(server / "logs/register.log")] == [f"{name}: registered" for name in "ABC"]
        assert "Activated node_id" in (server / "logs/superlink.log").read_text()
        for process in (other, one):
            process.terminate()
            assert process.wait(30) == 0
    assert "SuperNode terminated gracefully" in (site / "logs/supernode.log").read_text()
    assert "SuperLink terminated gracefully" in (server / "logs/superlink.log").read_text()
    assert list((SiteFolder.read(site).state_dir).iterdir()) == []
