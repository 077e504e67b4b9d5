"""A data set that fails on demand. The file named by FL_BN_MOOD says how: ``raise``, ``hang``, or ``memory`` (it asks
for more memory than it may have). Else an npz file is loaded.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

MORE = 6 * 10**9  # bytes


def load(path: str) -> tuple[Any, Any, Any, Any]:
    mood = Path(os.environ.get("FL_BN_MOOD", os.devnull))
    said = mood.read_text().strip() if mood.is_file() else ""
    if said == "raise":
        raise OSError("the network drive is gone")
    if said == "memory":
        np.ones(MORE // 8)
    while said == "hang" and mood.read_text().strip() == "hang":
        time.sleep(3600)
    with np.load(path) as archive:
        return archive["x_train"], archive["y_train"], archive["x_test"], archive["y_test"]
