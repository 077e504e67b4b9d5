"""Packages that come with an extra of fl-bn, ``pip install 'fl-bn[report]'``: what is missing is said in one sentence."""

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
    "flwr_datasets": "partitioners",
    "packaging": "deployment",
    "prometheus_client": "deployment",
}
DEPLOYMENT = ("packaging", "prometheus_client")  # modules of the extra of this name: without them there is no fl-bn kit, start, submit, ...


class NotInstalled(ImportError, ValueError):
    """A named thing needs a package of an extra, and that package is not installed."""


def lacking(what: str, *modules: str) -> str:
    """One sentence on what ``what`` lacks of ``modules``, and the command that installs it; empty where all are there."""
    absent = [name for name in modules if find_spec(name) is None]
    return sentence(what, absent) if absent else ""


def need(what: str, *modules: str) -> None:
    """Raises NotInstalled where ``what`` lacks one of ``modules``."""
    if told := lacking(what, *modules):
        raise NotInstalled(told)


def sentence(what: str, absent: list[str]) -> str:
    """Return what to install where the modules ``absent``, keys of ``EXTRAS``, are missing."""
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in absent))
    packages = " and ".join(name.replace("_", "-") for name in absent)
    return f"{what} needs {packages}, which {'are' if len(absent) > 1 else 'is'} not installed: pip install 'fl-bn[{extras}]'"


def version_of(package: str) -> str:
    """The installed version; ``ABSENT`` where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
