"""A data set whose site can be in a mood: the file that FL_BN_MOOD names says ``raise`` or ``hang``; else it is an npz file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np


def load(path: str) -> tuple[Any, Any, Any, Any]:
    mood = Path(os.environ.get("FL_BN_MOOD", os.devnull))
    said = mood.read_text().strip() if mood.is_file() else ""
    if said == "raise":
        raise OSError("the network drive is gone")
    while said == "hang" and mood.read_text().strip() == "hang":
        time.sleep(3600)
    with np.load(path) as archive:
        return archive["x_train"], archive["y_train"], archive["x_test"], archive["y_test"]
