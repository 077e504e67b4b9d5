"""Install a user's own package in a folder during a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_bn.app.config import REGISTRIES
from fl_bn.app.run_keys import VALUES
from fl_bn.support.user_code import import_extensions


@contextmanager
def registries_kept() -> Iterator[None]:
    """Restore the registries and ``VALUES`` after the block, also after an error."""
    registries = [*REGISTRIES.values(), VALUES]
    kept = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, before in zip(registries, kept, strict=True):
            registry.clear()  # type: ignore[attr-defined]
            registry.update(before)  # type: ignore[attr-defined]


@contextmanager
def installed(site: Path, modules: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install ``own_package`` in the folder ``site``, with an entry point for each of its ``modules``; undo this after the block."""
    metadata, folder = site / "own_package-1.0.dist-info", site / "own_package"
    for made in (metadata, folder):
        made.mkdir(parents=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fl_bn]\n" + "".join(f"{name} = own_package.{name}\n" for name in modules))
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr("fl_bn.app.run_directory.environment", dict)  # takes as long as the run
    import_extensions.cache_clear()
    with registries_kept():
        yield
    forget()


def forget() -> None:
    """Forget the imported package, so that the next run config imports it as a new process does."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        del sys.modules[module]
    import_extensions.cache_clear()
    importlib.invalidate_caches()
