"""Combine n rows of which f may be Byzantine, by robust rules; make attacks to test the rules with."""

from __future__ import annotations

from fl_bn.robust.rules import (
    PREAGGREGATIONS,
    RULES,
    Outcome,
    Report,
    Rule,
    bucketing,
    centered_clipping,
    geometric_median,
    krum,
    mean,
    median,
    multi_krum,
    nnm,
    rule_named,
    trimmed_mean,
)

__all__ = [
    "PREAGGREGATIONS",
    "RULES",
    "Outcome",
    "Report",
    "Rule",
    "bucketing",
    "centered_clipping",
    "geometric_median",
    "krum",
    "mean",
    "median",
    "multi_krum",
    "nnm",
    "rule_named",
    "trimmed_mean",
]
