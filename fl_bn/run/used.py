"""Define when run-config keys have an effect, and refuse keys that the user set but that have no effect.

The condition of a key is given with its declaration (``option(used=...)``). This module defines the conditions of
``RunKeys`` and ``DataKeys``. An option of a method, an objective or a server optimiser has an effect if its owner is
chosen. A key counts as set by the user if its value is not the default. The reason is that Flower passes every key of
pyproject.toml to a run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fl_bn.data.partition import BY_DOMAIN, PARAMETRISED
from fl_bn.methods import METHODS, Method
from fl_bn.options import Option, Used, hidden_options, in_config, method_where, options_by_key, used_with
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, STRENGTHS
from fl_bn.run.errors import ConfigError


class HasNoEffect(ConfigError):
    """Signal that the user set keys that have no effect in the run.

    Attributes:
        by_key: Key without effect -> the sentence that says why.
    """

    def __init__(self, by_key: Mapping[str, str]) -> None:
        super().__init__("; ".join(by_key.values()))
        self.by_key = dict(by_key)

    def __reduce__(self) -> tuple[type[HasNoEffect], tuple[dict[str, str]]]:
        return HasNoEffect, (self.by_key,)


Registries = Mapping[str, Mapping[str, object]]


def conditions(config: Any, registries: Registries, general: Mapping[str, Option]) -> dict[str, Used]:
    """Return key -> the condition under which it has an effect. Keys that always have an effect are left out.

    Args:
        config: The run config.
        registries: For each key that chooses an entry by name, such as ``method``, the registry: name -> constructor.
        general: The options of all general keys, by key.
    """
    uses: dict[str, Used | None] = {key: spec.used for key, spec in general.items()}
    for chooser, registry in registries.items():
        takers: dict[str, dict[str, Used | None]] = {}
        hidden = {key: [name for name, one in registry.items() if key in hidden_options(one)] for key in general}
        uses |= {key: used_with(chooser, *names) for key, names in hidden.items() if names and config[chooser] not in names}
        for name, constructor in registry.items():
            for key, (_, spec) in options_by_key(constructor).items():
                takers.setdefault(key, {})[name] = spec.used
        for key, by_taker in takers.items():
            if (chosen := config[chooser]) not in by_taker:
                uses.setdefault(key, used_with(chooser, *by_taker))
            elif key not in uses or by_taker[chosen] is not None:
                uses[key] = by_taker[chosen]
    return {key: used for key, used in uses.items() if used is not None}


def check_used(config: Any, given: Collection[str], registries: Registries, general: Mapping[str, Option]) -> None:
    """Check that every key that the user set has an effect in the run.

    Args:
        config: The run config.
        given: The keys that the user set.
        registries: For each key that chooses an entry by name, such as ``method``, the registry: name -> constructor.
        general: The options of all general keys, by key.

    Raises:
        HasNoEffect: A key has no effect.
    """
    refused = {
        key: refusal(config, key, unmet)
        for key, used in conditions(config, registries, general).items()
        if key in given and (unmet := used.unmet(config))
    }
    if refused:
        raise HasNoEffect(refused)


def refusal(config: Any, key: str, unmet: Used) -> str:
    """Return an error message: which key has no effect, the reason, and what to do.

    Args:
        config: The run config.
        key: The key.
        unmet: The condition of the key, which the run config does not meet.
    """
    others = [of for of in unmet.of if of != key]
    here = ", ".join(f"{of}={in_config(config[of])}" for of in others)
    return (
        f"{key}={in_config(config[key])} has no effect with {here}: it counts only {unmet.where}. Leave {key} out, or change "
        f"{' or '.join(others)}"
    )


def _freezes_later(method: Method, config: Any) -> bool:
    first, last = (method.freezes_statistics(method.phase(round, config["rounds"])) for round in (1, max(1, config["rounds"])))
    return last and not first


OWN_DATA = Used("where the run config names the data, not with dataset='sites'", lambda c: c["dataset"] != "sites", ("dataset",))
SITES_DATA = used_with("dataset", "sites")
FREEZES_LATER = method_where(
    "where statistics freeze after some rounds (methods fixbn and fedtan2, or freeze-after)", _freezes_later, "freeze-after", "rounds"
)
FREEZES_EARLY_ENOUGH = Used(
    "where the run has more rounds than that",
    lambda c: c["freeze-after"] < c["rounds"] or c["rounds"] == 0 or "freeze-after" in options_by_key(METHODS[c["method"]]),
    ("rounds",),
)
PARAMETER = OWN_DATA & used_with("partition", *PARAMETRISED)
TESTED_AS_GIVEN = Used(
    "where runs are tested on the test data, and not on validation samples", lambda c: not c["validation-share"], ("validation-share",)
)
OWN_DOMAINS = used_with("partition", *BY_DOMAIN)
ATTACKERS = Used("with attackers, byzantine > 0", lambda c: c["byzantine"] > 0, ("byzantine",))
HAS_WHAT_IS_ATTACKED = method_where(
    "where the server combines BatchNorm's statistics",
    lambda method, config: config["attack-on"] != "statistics" or method.has_statistics,
    "attack-on",
)
LIES = used_with("attack", *(name for name in ATTACKS if name != LABEL_FLIP))
STRENGTH = used_with("attack", *STRENGTHS)
WRITES = Used("where results are written to a folder (output)", lambda c: bool(c["output"]), ("output",))
