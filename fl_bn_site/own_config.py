"""Read the run config of a user's own Flower app. Its keys are those of the app's pyproject.toml."""

from __future__ import annotations

from datetime import datetime

from fl_bn.app.errors import ConfigError
from fl_bn.app.overrides import parse_overrides
from fl_bn.support.flower_config import Scalar
from fl_bn.support.names import unknown
from fl_bn_site.project import OF_RUN
from fl_bn_site.submitters import Package

ROUNDS = "num-server-rounds"  # the key of Flower's own apps for the number of rounds


def own_config(package: Package, overrides: str, now: datetime) -> tuple[dict[str, Scalar], bool]:
    """Read the run-config keys that the user gave for their own Flower app, and add the name of the run.

    Args:
        package: The package of the app.
        overrides: The user's keys, such as ``num-server-rounds=3 lr=0.1``.
        now: The present time, which is part of a new name.

    Returns:
        keys: The user's keys and ``name``. ``num-server-rounds`` is added where the app has it as a whole number.
        made: True: this function made the name. False: the user gave it.

    Raises:
        ConfigError: The app has no such key, or a value has another type than the default of its key.
    """
    defaults, given = package.defaults or {}, parse_overrides(overrides)
    for name, value in given.items():
        if name not in defaults:
            keys = [key for key in defaults if key not in OF_RUN]
            raise ConfigError(f"{unknown('run-config key', name, keys)}; an app's keys stand in its pyproject.toml")
        kind = type(defaults[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"{name} must be of type {kind.__name__}, as in the app's pyproject.toml, but got {value!r}")
    if type(defaults.get(ROUNDS)) is int:
        given = {ROUNDS: defaults[ROUNDS]} | given  # so that `fl-bn status` knows how many rounds are planned
    if given.get("name"):
        from fl_bn.app.config import RunConfig  # imports torch

        RunConfig.from_mapping({"name": given["name"]})  # the name of a folder
        return given, False
    return {**given, "name": f"{now:%Y%m%d-%H%M%S}-{package.project}"}, True
