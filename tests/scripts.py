"""Import programs of this repository by their path, because another package of the same name may be installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def script(path: str) -> ModuleType:
    """Import the file ``path``, relative to the repository's root.

    Raises:
        FileNotFoundError: there is no such file.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[1] / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
