"""Compare several methods over several seeds: make the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_bn.data.record import evaluated_on
from fl_bn.run.assembly import task
from fl_bn.run.config import ConfigError
from fl_bn.run.overrides import parse_overrides
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import Sweep, refuse_decided


@dataclass(frozen=True)
class Variant:
    """Describe one method to compare, with run-config keys of its own.

    Attributes:
        label: The text that the user typed, as ``fbn:rounds=9``.
        method: The run-config key ``method``; or ``centralised`` or ``centralised-METHOD``.
        overrides: The run-config keys of this variant. Each must have an effect in its runs.
    """

    label: str
    method: str
    overrides: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a variant from text: ``fbn`` or ``fbn:learning-rate=0.01;local-steps=1``."""
        method, _, options = text.strip().partition(":")
        overrides = parse_overrides(options.replace(";", " "))
        return cls(text.strip(), method, overrides)


def comparison(variants: Sequence[Variant], seeds: Sequence[int], base: Mapping[str, Any], title: str) -> Sweep:
    """Return the sweep that runs each variant with each seed.

    Args:
        variants: The methods to compare.
        seeds: The seeds. All variants are run with the first seed before the second begins.
        base: Run-config keys of all runs. Each must have an effect in at least one run; other runs leave it out.
        title: The title of the table and the picture.

    Raises:
        ConfigError: Two variants have the same label, or a key is set by the comparison itself.
    """
    for keys in (base, *(variant.overrides for variant in variants)):
        refuse_decided("fl-bn compare", keys, {"method": "the methods are --methods"})
    if any("seed" in variant.overrides for variant in variants):
        raise ConfigError("a variant cannot set seed, since all variants have the same seeds: leave it out (see --seeds)")
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"every variant must be given once, but got {labels}")
    axes = {
        "method": {variant.label: {"method": variant.method, **variant.overrides} for variant in variants},
        "seed": {str(seed): {"seed": seed} for seed in seeds},
    }
    report = {"report": {"rows": "method", "columns": []}}
    own = frozenset(key for keys in (base, *(variant.overrides for variant in variants)) for key in keys)
    return Sweep(title, dict(base), axes, own=own, tables=report)


def check_metric(cells: Sequence[Cell]) -> None:
    """Check that all cells (runs) measure the same metric on the same kind of samples, so that they can be compared.

    Raises:
        ConfigError: The runs have tasks with different metrics, or are tested on test, validation or training samples.
    """
    if len(splits := {(cell.config.validation_share, cell.config.changes.split) for cell in cells}) > 1:
        parts = sorted({f"{share:g} of the training" if share else evaluated_on(share, on) for share, on in splits})
        raise ConfigError(f"give all the same validation-share: these runs are tested on {' and '.join(parts)} samples")
    if len(metrics := {task(cell.config).metric for cell in cells}) > 1:
        raise ConfigError(f"methods are compared by one metric, but these runs have {' and '.join(sorted(metrics))}")
