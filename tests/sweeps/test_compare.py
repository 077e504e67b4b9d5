"""Comparisons: variants from text, the cells that they make, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_bn.sweep.compare import check_metric, comparison
from fl_bn.sweep.file import Sweep, parse
from tests.experiment.inside import kebab, parse_overrides, refusing
from tests.listed import listed

DECIDED = ("output='x'", "name='mine'", "resume='latest'", "pictures=true", "method='gn'", "early-stop=2")
"""Keys that the comparison sets itself."""


def compared(*variants: str, seeds: Sequence[int] = (0,), **base: Any) -> Sweep:
    return comparison(variants, seeds, kebab(base), "a comparison")


def test_a_variants_config_is_the_base_with_its_own_keys(tmp_path: Path) -> None:
    (cell,) = compared(" fbn:rounds=7;model='resnet18';deterministic=false", seeds=[4], rounds=3, clients=2).cells(tmp_path)
    config = cell.config
    assert (config.method, config.rounds, config.clients, config.seed) == ("fbn", 7, 2, 4)
    assert (config.model, config.deterministic) == ("resnet18", False)
    assert (config.output, config.pictures) == (str(tmp_path / "runs"), False)
    assert "/" not in config.name
    (cell,) = compared("centralised").cells(tmp_path)
    assert (cell.config.method, cell.centralised) == ("fedavg", True)
    cells = compared("fbn", "gn", seeds=[3, 4], rounds=2).cells(tmp_path)
    assert [(cell.config.method, cell.config.seed) for cell in cells] == [("fbn", 3), ("gn", 3), ("fbn", 4), ("gn", 4)]
    assert len({cell.path for cell in cells}) == 4


@listed(
    ("variants", "base", "about"),
    [
        (["fbn:round=7"], {}, "'round'"),
        (["fbn", "fbn"], {}, "fbn"),
        (["fbn:rounds=1;clients=2", "fbn:rounds=1 clients=2"], {}, "folder"),  # they differ in punctuation alone
        (["fbn:seed=3"], {}, "seed"),
        (["fedavg", "gn:validation-share=0.3"], {"clients": 2}, "validation"),  # they would be tested on other samples
        (["fedavg", "gn:evaluate-on='training'"], {"clients": 2}, "training"),
        *((["fbn"], parse_overrides(key), key.partition("=")[0]) for key in DECIDED),
        *(([f"fbn:{key}"], {}, key.partition("=")[0]) for key in DECIDED),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(variants: list[str], base: dict[str, Any], about: str, tmp_path: Path) -> None:
    with refusing(about):
        check_metric(compared(*variants, **base).cells(tmp_path))


def test_control_other_keys_are_taken(tmp_path: Path) -> None:
    assert compared("fbn", rounds=3).keys == {"rounds": 3}
    check_metric(compared("fedavg", "gn", clients=2, validation_share=0.3).cells(tmp_path))
    assert [cell.centralised for cell in compared("fedavg", "centralised", client_weights="uniform").cells(tmp_path)] == [False, True]


def test_a_report_has_a_metric_that_its_runs_measure_or_may_measure() -> None:
    def reported(metric: str, **run: Any) -> Sweep:
        return parse({"run": {"rounds": 1, **run}, "report": {"metric": metric}}, "a sweep", "", "", {})

    with refusing("'acuracy'", "accuracy"):
        reported("acuracy")
    for metric in ("accuracy", "test-loss", "gigabytes", "accuracy-std", "mean-iou", "drift"):
        assert reported(metric)
    assert reported("acuracy", task="package.module:function"), "a task of one's own may have any metric"
