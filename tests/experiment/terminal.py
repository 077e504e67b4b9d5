"""Run the command ``fl-bn`` as a process of its own: in a pipe, interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from fl_bn.cli.main import app; app()")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "110"}


def in_a_pipe(*args: str, interrupt_at: str = "", folder: Path = ROOT) -> tuple[int, str]:
    """Run fl-bn with its output in a pipe, and send SIGINT after a line with ``interrupt_at``; return exit status and output."""
    process = subprocess.Popen(
        [*COMMAND, *args], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    came = ""
    with process:
        for line in process.stdout or ():
            came += line
            if interrupt_at and interrupt_at in line:
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
    return process.returncode, came
