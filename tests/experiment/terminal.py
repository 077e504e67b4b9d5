"""Run the command ``fl-bn`` as a process of its own: on a terminal, in a pipe, interrupted."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from fl_bn.cli.main import app; app()")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "110"}


def on_a_terminal(*args: str, type_at: str = "", folder: Path = ROOT) -> tuple[int, str]:
    """Run fl-bn on a pseudo-terminal, and type Ctrl-C when the output has ``type_at``; return exit status and output."""
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where pytest itself runs in the background
        os.chdir(folder)
        os.execve(COMMAND[0], [*COMMAND, *args], ENVIRONMENT)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    came, typed = b"", not type_at
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        came += part
        if not typed and type_at.encode() in came:
            os.write(terminal, b"\x03")
            typed = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), came.decode()


def lines(text: str) -> list[str]:
    """Return the lines that a terminal shows at the end: without colours, and with the last text of lines that were overwritten."""
    text = re.sub(r"\x1b\[2K|\x1b\[1A", "\r", text).replace("\r\n", "\n")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [shown for line in plain.split("\n") if (shown := line.rstrip("\r").rpartition("\r")[2].rstrip())]


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
