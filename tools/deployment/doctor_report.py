"""Print as Markdown what ``fl-bn doctor`` reports about six broken set-ups and a sound one.

    python -m tools.deployment.doctor_report > deploy/doctor.md

The real command runs in a process of its own, on a real kit and against a server that speaks TLS. The exit code is 1
if the doctor misses a broken set-up or finds a fault in the sound one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fl_bn_site.commands import program
from tests.deployment.broken import BROKEN, SITE, Setup, made

HEAD = """\
# What `fl-bn doctor` says

Made by `python -m tools.deployment.doctor_report > deploy/doctor.md`, which breaks a sound site in six ways, one at a time, and runs
`fl-bn doctor kit/sites/A` on each. Of the broken ones only the lines that are not `ok` are shown. The wrong version is
staged: the metadata of a Flower 1.31. Everything else is real: keys, certificates, a TLS server, sockets, files.
"""


def said(folder: Path, breaking: Callable[[Setup], None] = lambda setup: None) -> tuple[int, list[str]]:
    """Make a sound kit in ``folder``, spoil it by ``breaking``, and run the doctor. Return its exit code and its lines."""
    with made(folder, breaking) as setup:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(setup.pythonpath), os.environ.get("PYTHONPATH", "")])}
        argv = [program("fl-bn"), "doctor", str(Path("kit") / SITE)]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"fl-bn doctor ended with {done.returncode}: {done.stderr}")
    return done.returncode, [line.replace(f"{folder}{os.sep}", "").replace(str(folder), "FOLDER") for line in done.stdout.splitlines()]


def found_out(code: int, lines: list[str], check: str, words: str) -> bool:
    """Return whether ``check`` alone failed, its line contains ``words``, and the exit code is 1."""
    failed = [line for line in lines if line.startswith("fail")]
    return code == 1 and len(failed) == 1 and failed[0].startswith(f"fail  {check}: ") and words in failed[0]


def main() -> int:
    missed = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as place:
        for name, (breaking, check, words) in BROKEN.items():
            code, lines = said(Path(place).resolve() / name.replace(" ", "-"), breaking)
            shown = [line for line in lines if not line.startswith("ok ")]
            print(f"## {name.capitalize()}\n\n```\n" + "\n".join(shown) + f"\n```\nExit code {code}.\n", flush=True)
            if not found_out(code, lines, check, words):
                missed.append(name)
        code, lines = said(Path(place).resolve() / "sound")
        print("## The sound site, all lines\n\n```\n" + "\n".join(lines) + f"\n```\nExit code {code}.", flush=True)
    if code:
        missed.append("the sound site")
    print("\n".join(f"not as expected: {name}" for name in missed), end="", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
