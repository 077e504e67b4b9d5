"""Say in one sentence which package of an extra is missing, and what installs it: ``pip install 'fl-bn[report]'``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

ABSENT = "not installed"

EXTRAS = {  # a module that is imported where it is needed: its extra in pyproject.toml
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
    "tensorboard": "report",
    "ray": "simulation",
    "torchvision": "vision",
    "segmentation_models_pytorch": "segmentation",
    "packaging": "deployment",
    "prometheus_client": "deployment",
}
DEPLOYMENT = ("packaging", "prometheus_client")  # modules of the extra of this name: without them there is no fl-bn kit, start, submit, ...


class NotInstalled(ImportError, ValueError):
    """Report that a command or a named thing needs a package of an extra that is not installed."""


def lacking(what: str, *modules: str) -> str:
    """Say which packages are missing.

    Args:
        what: What needs them: the subject of the sentence.
        modules: Modules of the packages, keys of ``EXTRAS``.

    Returns:
        One sentence with the command that installs them; empty: all are installed.
    """
    absent = [name for name in modules if find_spec(name) is None]
    return sentence(what, absent) if absent else ""


def need(what: str, *modules: str) -> None:
    """Raise NotInstalled where one of ``modules`` is missing, which ``what`` needs."""
    if message := lacking(what, *modules):
        raise NotInstalled(message)


def sentence(what: str, absent: list[str]) -> str:
    """Say what to install where the modules ``absent``, keys of ``EXTRAS``, are missing."""
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in absent))
    packages = " and ".join(name.replace("_", "-") for name in absent)
    return f"{what} needs {packages}, which {'are' if len(absent) > 1 else 'is'} not installed: pip install 'fl-bn[{extras}]'"


def version_of(package: str) -> str:
    """Return the installed version of ``package``; ``ABSENT`` where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
