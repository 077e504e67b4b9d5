"""Functions that tests run in worker processes. This file imports no torch, so that workers start quickly."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from fl_bn.support.wire import WireError


def double(x: int) -> int:
    logging.getLogger("flwr").warning("doubling %d", x)
    if x == 3:
        raise ValueError("not three")
    return 2 * x


def perish(x: int, marker: str) -> int:
    if x == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    Path(marker).touch()
    return x


class Odd(Exception):
    """Fail to be unpickled: the constructor needs two arguments, but passes on one."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def stumble(x: int, folder: str) -> int:
    Path(folder, f"{x} {os.urandom(4).hex()}").touch()
    if x == 1:
        raise Odd(7, "no such file")
    if x == 2:
        raise WireError("weights", "0.bias" * 50, "is missing")
    return x
