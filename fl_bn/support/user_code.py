"""Find functions that a run config names as "package.module:function", in allowed modules only.

A run config is sent to every machine that takes part, often unsigned. So it may
only name functions of the app's own modules, whose code a client's site has
accepted, and of those that the machine's owner allows. Every other name
(``os:system``) is refused before anything is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fl_bn.support.names import short

GROUP = "fl_bn"  # the group of entry points by which packages add names
VARIABLE = "FL_BN_ALLOW_MODULES"  # environment variable for machines and programs without a node config
OWN = "*"  # allows every module outside of Python's own and of installed packages
OURS = "fl_bn"  # the package whose functions a run config may never name
_STANDARD = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
_INSTALLED = ("site-packages", "dist-packages")


class Refused(ValueError):
    """Signal that a run config names a module that it may not name on this machine."""


@dataclass(frozen=True)
class Modules:
    """Hold the modules whose functions a run config may name.

    Attributes:
        app: the app's folder, all of whose modules are allowed. None: there is no
            app.
        names: modules that the machine's owner allows, with their submodules. ``*``
            allows all modules except those of Python and of installed packages.
    """

    app: Path | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, app: Path | None, allowed: str = "") -> Modules:
        """Collect the allowed modules of this machine, those of the Flower app in ``app`` among them.

        ``allowed`` names further modules, separated by commas, as does
        ``FL_BN_ALLOW_MODULES``. A folder of installed packages is ignored.
        """
        texts = (allowed, os.environ.get(VARIABLE, ""))
        names = tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
        return cls(app.resolve() if app is not None and _is_app(app) else None, names)

    def check(self, module: str) -> None:
        """Raise ``Refused``, before any import, if a run config may not name functions of ``module``."""
        top = module.partition(".")[0]
        if any(f"{module}.".startswith(f"{name}.") for name in self.names if name != OWN):
            return
        if top == OURS:
            raise Refused(f"{module} is part of fl-bn, whose functions a run config may not name; {_ADVICE}")
        places = _places(top)
        if not places:
            raise Refused(f"there is no module {top!r}; install its package, or put its folder on PYTHONPATH")
        if self.app is not None and places[0] == self.app and (len(set(places)) == 1 or self._holds(module)):
            return
        if OWN in self.names and not _foreign(top, places):
            return
        whose = "Python's own module" if _standard(top, places) else f"in {next((p for p in places if p != self.app), places[0])}"
        raise Refused(f"{module} is {whose}; {_ADVICE}")

    def _holds(self, module: str) -> bool:
        """Return whether the app's folder has a file for ``module``.

        Without ``__init__.py``, a package may be in several folders, of which only
        the app's are allowed.
        """
        assert self.app is not None
        base = self.app.joinpath(*module.split("."))
        return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


_ADVICE = (
    "a run config may name functions of the app's own modules (next to its pyproject.toml) and of modules that this machine's owner "
    f"allows: allow-modules in the node config or site.toml, {VARIABLE} in the environment elsewhere"
)


def function(what: str, name: str, modules: Modules | None = None) -> Callable[..., Any]:
    """Import a function by its name "package.module:function", to make ``what``.

    Raises:
        Refused: ``modules`` do not allow the module in the name, or the module that
            defines the function.
        ValueError: the name has another form, or there is no such function.
        Exception: any error that importing the module raises.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise ValueError(f"{what} must be named as package.module:function, but got {short(name)}")
    if modules is not None:
        _check(modules, what, name, module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ImportError(f"{what} {name!r} cannot be imported: {error}") from error
        raise ValueError(f"{what} {name!r}: there is no module {error.name!r}: install it, or set PYTHONPATH") from error
    value = getattr(module, function_name, None)
    if not callable(value):
        public = [key for key, member in vars(module).items() if inspect.isfunction(member) and not key.startswith("_")]
        raise ValueError(f"{what}: {module_name} has no function {function_name!r}, but has {', '.join(public) or 'none'}")
    if modules is not None:  # a module also holds what it imported: ``from os import system``
        _check(modules, what, name, str(getattr(value, "__module__", None)))
    return value  # type: ignore[no-any-return]


@cache
def import_extensions() -> None:
    """Import the modules that installed packages list in the entry-point group ``fl_bn``.

    Each adds methods, tasks or others to fl-bn's registries, as in
    ``METHODS["mine"] = mine``. If one cannot be imported, ``ValueError`` names its
    package.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # another package's code may raise anything
            whose = f"the installed package {point.dist.name}" if point.dist else "an installed package"
            raise ValueError(f"{whose} extends fl-bn by {point.value}, whose import failed: {type(error).__name__}: {error}") from error


def _check(modules: Modules, what: str, name: str, module: str) -> None:
    try:
        modules.check(module)
    except Refused as error:
        defined = "" if module == name.partition(":")[0] else "it was defined elsewhere: "
        raise Refused(f"{what} {name!r} is not called: {defined}{error}") from error


@cache
def _is_app(folder: Path) -> bool:
    try:
        return "app" in tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("tool", {}).get("flwr", {})
    except (OSError, ValueError):
        return False


def _places(top: str) -> list[Path]:
    """Return the folders of the module or package ``top``, if there is one."""
    try:
        spec = importlib.util.find_spec(top)  # for a name without dots this finds the module without importing it
    except ValueError:  # the module was loaded without a spec, like __main__
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(location).resolve().parent for location in spec.submodule_search_locations]
    return [Path(spec.origin).resolve().parent if spec.has_location and spec.origin else _STANDARD[0]]


def _standard(top: str, places: list[Path]) -> bool:
    return top in sys.stdlib_module_names or any(place in _STANDARD for place in places)


def _foreign(top: str, places: list[Path]) -> bool:
    return _standard(top, places) or any(part in place.parts for place in places for part in _INSTALLED)
