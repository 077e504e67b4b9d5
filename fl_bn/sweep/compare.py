"""Compare several methods over several seeds: make the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_bn.data.record import evaluated_on
from fl_bn.run.assembly import task
from fl_bn.run.config import ConfigError
from fl_bn.run.overrides import parse_overrides
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import Sweep, refuse_decided


def comparison(methods: Sequence[str], seeds: Sequence[int], base: Mapping[str, Any], title: str) -> Sweep:
    """Return the sweep that runs each method with each seed.

    Args:
        methods: The labels of the methods: ``fbn``, ``centralised-gn``, or, with
            run-config keys of its own, ``fbn:learning-rate=0.01;local-steps=1``.
        seeds: The seeds, of which each begins after the one before.
        base: Run-config keys of all runs. Each must have an effect in at least one run.
        title: The title of the table and the picture.

    Raises:
        ConfigError: A method is given twice, or a key is set by the comparison itself.
    """
    variants: dict[str, dict[str, Any]] = {}
    own = set(base)
    refuse_decided("fl-bn compare", base, {"method": "the methods are --methods"})
    for label in map(str.strip, methods):
        method, _, options = label.partition(":")
        keys = parse_overrides(options.replace(";", " "))
        refuse_decided("fl-bn compare", keys, {"method": "the methods are --methods", "seed": "all have the same seeds, see --seeds"})
        if label in variants:
            raise ConfigError(f"every method must be given once, but {label!r} is given twice")
        variants[label] = {"method": method, **keys}
        own |= keys.keys()
    axes = {"method": variants, "seed": {str(seed): {"seed": seed} for seed in seeds}}
    report = {"report": {"rows": "method", "columns": []}}
    return Sweep(title, dict(base), axes, own=frozenset(own), tables=report)


def check_metric(cells: Sequence[Cell]) -> None:
    """Raise ``ConfigError`` unless all cells measure the same metric on the same kind of samples."""
    if len(splits := {(cell.config.validation_share, cell.config.changes.split) for cell in cells}) > 1:
        parts = sorted({f"{share:g} of the training" if share else evaluated_on(share, on) for share, on in splits})
        raise ConfigError(f"give all the same validation-share: these runs are tested on {' and '.join(parts)} samples")
    if len(metrics := {task(cell.config).metric for cell in cells}) > 1:
        raise ConfigError(f"methods are compared by one metric, but these runs have {' and '.join(sorted(metrics))}")
