"""Refuse keys that the user set but that the run does not use: key K belongs to M, and the run has no M.

The declaration of a key says what it belongs to (``option(used=...)``). An option
of a method, an objective or a server optimiser belongs to it. A key is set by the
user if its value is not the default, since Flower passes every key of
pyproject.toml to a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_bn.app.errors import ConfigError
from fl_bn.data.partition import BY_DOMAIN, PARAMETRISED
from fl_bn.methods import METHODS
from fl_bn.options import Option, Used, in_config, options_by_key, used_with


class HasNoEffect(ConfigError):
    """Signal that the user set keys without effect in the run. ``by_key`` says why."""

    def __init__(self, by_key: Mapping[str, str]) -> None:
        super().__init__("; ".join(by_key.values()))
        self.by_key = dict(by_key)

    def __reduce__(self) -> tuple[type[HasNoEffect], tuple[dict[str, str]]]:
        return HasNoEffect, (self.by_key,)


Registries = Mapping[str, Mapping[str, object]]


def conditions(config: Any, registries: Registries, general: Mapping[str, Option]) -> dict[str, Used]:
    """Return key -> what it belongs to, for the keys that not every run uses.

    ``registries`` has, by the key that chooses an entry, the constructors by name.
    ``general`` are all other options.
    """
    owners = {key: spec.used for key, spec in general.items() if spec.used is not None}
    for chooser, registry in registries.items():
        takers: dict[str, list[str]] = {}
        for name, constructor in registry.items():
            own = {key for key in options_by_key(constructor) if key not in general}
            for key in own | (options_by_key(constructor, hidden=True).keys() & general.keys()):
                takers.setdefault(key, []).append(name)
        owners |= {key: used_with(chooser, *names) for key, names in takers.items() if config[chooser] not in names}
    return owners


def unused(config: Any, registries: Registries, general: Mapping[str, Option]) -> dict[str, str]:
    """Return key -> the refusal, for all keys that the run does not use; arguments as ``conditions``."""
    owners = {key: used.owner for key, used in conditions(config, registries, general).items() if not used.holds(config)}
    return {key: f"{key}={in_config(config[key])} has no effect in this run: {key} belongs to {owner}" for key, owner in owners.items()}


OWN_DATA = Used("data that the run config names, and not to dataset='sites'", lambda c: c["dataset"] != "sites")
SITES_DATA = used_with("dataset", "sites")
FREEZES_EARLY_ENOUGH = Used(
    "a run of more rounds than that",
    lambda c: c["freeze-after"] < c["rounds"] or c["rounds"] == 0 or "freeze-after" in options_by_key(METHODS[c["method"]]),
)
PARAMETER = OWN_DATA & used_with("partition", *PARAMETRISED)
OWN_DOMAINS = used_with("partition", *BY_DOMAIN)
WRITES = Used("a run with a folder (output)", lambda c: bool(c["output"]))
