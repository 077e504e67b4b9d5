"""The audit log of a site: chained, rotated, safe with several processes; each kind of change is found and named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn_site import audit
from fl_bn_site.audit import digest, head_in
from fl_bn_site.audit_check import forget
from fl_bn_site.status import RunStatus, Status
from fl_bn_site.tables import tables_of_status, wide_console
from tests.deployment.inner import SiteFolder, app, append, check, files_in, lines_in
from tests.listed import listed

Change = Callable[[list[bytes]], list[bytes]]
ENTRY = {
    "run": "7", "name": "fedbn", "submitter": None, "code": "c" * 64, "message": "train", "id": "m", "round": 1, "method": "fedbn",
    "sections": {"weights": {"tensors": 4, "bytes": 1000}, "metrics": {"tensors": 0, "bytes": 32}}, "tensors": 4, "bytes": 1032,
    "smallest-samples": None, "message-bytes": 2000, "decision": "sent", "reason": "",
}  # fmt: skip


def seven_lines(folder: Path) -> Path:
    for round in range(1, 8):
        append(folder / "audit", {**ENTRY, "round": round})
    return folder / "audit"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return seven_lines(tmp_path)


def change(folder: Path, how: Change) -> None:
    (path,) = files_in(folder)
    path.write_bytes(b"".join(how(path.read_bytes().splitlines(keepends=True))))


def test_a_whole_log_has_no_fault(log: Path) -> None:
    found = check(log)
    assert (found.lines, found.faults) == (7, ())
    assert head_in(log) == (7, found.head)
    first, second, *_ = lines_in(log)
    assert [line.values and line.values["before"] for line in (first, second)] == [audit.START, first.hash]
    assert first.hash == digest(files_in(log)[0].read_bytes().split(b"\n")[0])
    assert all(path.stat().st_mode & 0o077 == 0 for path in (files_in(log)[0], log / audit.HEAD, log))


def replaced(old: bytes, new: bytes) -> Change:
    """Change line 4."""
    return lambda lines: [*lines[:3], lines[3].replace(old, new, 1), *lines[4:]]


@listed(
    ("how", "words"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b'"bytes":1032', b'"bytes":1031'), *lines[3:]], "line 3 or line 4 was changed"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b"1032", b"1")], "line 7 was changed"),
        (lambda lines: [*lines[:3], b"xyz\n", *lines[4:]], "line 4 was changed"),
        (lambda lines: [*lines[:2], *lines[5:]], "lines 3 to 5 were removed"),
        (lambda lines: lines[2:], "lines 1 to 2 were removed"),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "line 3 was inserted or moved"),
        (lambda lines: [*lines[:3], lines[1], *lines[3:]], "line 2 was inserted or moved"),
        (lambda lines: lines[:3], "lines 4 to 7 were cut off"),
        (lambda lines: [*lines[:5], lines[5][:40]], "lines 6 to 7 were cut off"),
        (lambda lines: [], "lines 1 to 7 were cut off"),
        # and nothing in a line stops the check or the totals
        (replaced(b'"line":4', b'"line":10000000000000000000000000'), "line 4 was changed"),
        (replaced(b'"message-bytes":2000', b'"message-bytes":10000000000000000000000000'), "line 4 was changed"),
        (replaced(b'"name":"fedbn"', b'"name":"\\ud800"'), "line 4 was changed"),
        (replaced(b'"tensors":4', b'"tensors":"4"'), "line 4 was changed"),
        (replaced(b'"round":4', b'"round":' + b"9" * 5000), "line 4 was changed"),
        (replaced(b'"time":"20', b'"time":"x20'), "line 4 was changed"),
    ],
    ids=[str(number) for number in range(16)],
)
def test_each_change_is_found_and_named(how: Change, words: str, tmp_path: Path) -> None:
    log = seven_lines(tmp_path)
    change(log, how)
    assert any(words in fault for fault in check(log).faults), check(log).faults
    for form in ((), ("--lines",), ("--json",)):
        assert typed("audit", str(log), *form)[0] == 1
    append(log, ENTRY)  # what is written later does not hide it
    assert check(log).faults


def test_without_its_head_a_log_says_that_its_end_is_unknown_and_goes_on_to_say_so(log: Path) -> None:
    (log / audit.HEAD).unlink()
    change(log, lambda lines: lines[:-1])
    for _ in range(2):
        assert len(check(log).faults) == 1
        append(log, ENTRY)


def test_a_log_that_was_computed_anew_differs_from_the_hash_that_was_noted(log: Path, tmp_path: Path) -> None:
    noted = check(log).head
    for round in range(1, 8):
        append(tmp_path / "anew", {**ENTRY, "round": round, "bytes": 1})
    found = check(tmp_path / "anew", noted)
    assert (found.faults, found.noted) == ((), False), "only the hash shows it"
    append(log, ENTRY)
    assert check(log, noted).noted
    assert check(log, noted[:12]).noted


def test_a_crash_in_a_line_or_before_the_head_leaves_a_whole_log(log: Path) -> None:
    head = (log / audit.HEAD).read_bytes()
    append(log, ENTRY)
    (log / audit.HEAD).write_bytes(head)  # the process ended before it wrote it
    assert check(log).faults == ()
    with files_in(log)[0].open("ab") as file:
        file.write(b'{"line": 9, "bef')
    assert check(log).faults == ()
    append(log, ENTRY)
    assert (check(log).faults, check(log).lines) == ((), 9)
    *_, last = lines_in(log)
    assert last.values is not None
    assert "half a line of 16 bytes was removed" in last.values["note"]


def test_the_log_is_rotated_without_a_break_and_old_files_are_forgotten_by_a_line_that_says_so(tmp_path: Path) -> None:
    for _ in range(20):
        append(tmp_path, ENTRY, largest=1500)
    assert len(files_in(tmp_path)) > 4
    assert all(path.stat().st_size <= 1500 for path in files_in(tmp_path))
    now = datetime.now(UTC)
    assert forget(tmp_path, now - timedelta(hours=1)) == (0, 0)
    assert (check(tmp_path).lines, check(tmp_path).faults) == (20, ())
    lost = files_in(tmp_path)[2]
    lost.rename(tmp_path / "lost")
    assert len(check(tmp_path).faults) == 1
    (tmp_path / "lost").rename(lost)
    files, lines = forget(tmp_path, now + timedelta(hours=1))
    assert (files > 4, len(files_in(tmp_path))) == (True, 1)
    append(tmp_path, ENTRY)
    found = check(tmp_path)
    assert (found.lines, found.faults, found.forgotten) == (22 - lines, (), lines)
    change(tmp_path, lambda kept: kept[1:])  # control: one line more
    assert "removed or moved" in check(tmp_path).faults[0]


WRITER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("audit", {file!r})
audit = sys.modules["audit"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)
assert not any(name.split(".")[0] in ("fl_bn", "fl_bn_site", "torch", "flwr") for name in sys.modules)
for i in range(25):
    audit.append(Path({folder!r}), {{"by": sys.argv[1], "i": i}}, 4000)
"""


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    """By the module's path alone, as the site's program loads it."""
    code = WRITER.format(file=audit.__file__, folder=str(tmp_path / "log"))
    writers = [subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    found = check(tmp_path / "log")
    assert (found.lines, found.faults) == (100, ())
    said = [(line.values or {}).get("by") for line in lines_in(tmp_path / "log")]
    assert {said.count(str(number)) for number in range(4)} == {25}


def typed(*words: str, columns: int = 80) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, [*words])
    return done.exit_code, done.output


def test_the_command_totals_filters_and_names_what_did_not_leave(site: SiteFolder) -> None:
    assert typed("audit", str(site.path))[0] == 2  # this site has sent no answer yet
    for round in (1, 2):
        append(site.audit_log, {**ENTRY, "round": round})
    append(site.audit_log, {**ENTRY, "message": "evaluate", "sections": {"evaluation": {"tensors": 0, "bytes": 48, "samples": 9}}})
    append(site.audit_log, {**ENTRY, "name": "", "run": "8", "decision": "refused", "reason": "policy [no]", "sections": {}})
    code, out = typed("audit", str(site.path))
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[1].split() == ["fedbn", "train", "weights", "1-2", "2", "8", "2,000"]
    assert out.splitlines()[3].split() == ["fedbn", "evaluate", "evaluation", "1", "1", "0", "48", "9"]
    assert "refused: policy [no]" in " ".join(out.split())
    assert check(site.audit_log).head in out.replace("\n", "")
    told = json.loads(typed("audit", str(site.path), "--json")[1])
    assert (told["lines"], told["totals"][0]["bytes"], len(told["refused"])) == (4, 2000, 1)
    assert len(typed("audit", str(site.path), "--lines")[1].splitlines()) == 4
    for words, lines in ((("--run", "8"), 1), (("--run", "fedbn"), 3), (("--since", "2100-01-01"), 0)):
        assert json.loads(typed("audit", str(site.path), "--json", *words)[1])["lines"] == lines
    assert typed("audit", str(site.path), "--since", "yesterday")[0] == 2
    code, out = typed("audit", str(site.path), "--run", "fedbm", columns=500)
    assert (code, "of: fedbn, 8" in out) == (2, True)


def test_the_command_and_kit_verify_name_a_change(site: SiteFolder) -> None:
    for _ in range(3):
        append(site.audit_log, ENTRY)
    noted = check(site.audit_log).head
    code, out = typed("kit", "verify", str(site.path), "--noted", noted, columns=500)
    assert (code, noted in out) == (0, True)
    assert typed("kit", "verify", str(site.path), "--noted", "0" * 64)[0] == 1
    change(site.audit_log, lambda lines: lines[:-1])
    for words in (("kit", "verify", str(site.path)), ("audit", str(site.audit_log))):
        code, out = typed(*words, columns=500)
        assert (code, "lines 3 to 3 were cut off at the end" in out) == (1, True)
    shutil.rmtree(site.audit_log)
    for folder in (site.path, site.path.parents[1], site.path.parents[1] / "server"):  # the kit and the server have none
        assert typed("kit", "verify", str(folder), "--noted", noted, columns=500)[0] == 1


def test_no_word_of_a_site_is_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunStatus(1, "night", "", "", "", None, "running", 1, 3, refused={"A": "it failed: [/srv/a.csv] [red]well"})
    wide_console().print(tables_of_status(Status("now", "", 80, [], [run])))
    assert "it failed: [/srv/a.csv] [red]well" in capsys.readouterr().out
