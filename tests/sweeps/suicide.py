"""A network whose construction kills the worker process of a sweep, as the kernel does when memory is short."""

import multiprocessing
import os
import signal
from typing import Any

from fl_bn.models import build as built


def build(**arguments: Any) -> Any:
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return built("mlp", **arguments)
