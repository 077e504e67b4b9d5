"""Compare several methods over several seeds: make the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_bn.app.config import ConfigError
from fl_bn.app.overrides import parse_overrides
from fl_bn.app.report.settings import AVERAGE
from fl_bn.app.sweep.file import Sweep, refuse_decided

OF_ALL = {  # keys that no method has for itself: methods are compared by one metric on the same samples
    "method": "the methods are --methods",
    "seed": "all have the same seeds, see --seeds",
    **dict.fromkeys(("task", "validation-share"), "all are compared by one number: see --run-config"),
}


def comparison(methods: Sequence[str], seeds: Sequence[int], base: Mapping[str, Any], title: str) -> Sweep:
    """Return the sweep that runs each method with each seed.

    Args:
        methods: The labels of the methods: ``fbn``, ``centralised-gn``, or, with
            run-config keys of its own, ``fbn:learning-rate=0.01;local-steps=1``.
        seeds: The seeds, of which each begins after the one before.
        base: Run-config keys of all runs. Each must have an effect in at least one
            run.
        title: The title of the table and the picture.

    Raises:
        ConfigError: A method is given twice, or a key is set by the comparison
            itself.
    """
    variants: dict[str, dict[str, Any]] = {}
    own = set(base)
    refuse_decided("fl-bn compare", base, {"method": OF_ALL["method"]})
    for label in map(str.strip, methods):
        method, _, options = label.partition(":")
        keys = parse_overrides(options.replace(";", " "))
        refuse_decided("fl-bn compare", keys, OF_ALL)
        if label in variants:
            raise ConfigError(f"every method must be given once, but {label!r} is given twice")
        variants[label] = {"method": method, **keys}
        own |= keys.keys()
    axes = {"method": variants, "seed": {str(seed): {"seed": seed} for seed in seeds}}
    report = {"report": {"rows": "method", "columns": [], "domains": AVERAGE}}
    return Sweep(title, dict(base), axes, own=frozenset(own), tables=report)
