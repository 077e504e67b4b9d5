"""The pilot: successive halving of made-up curves; and real short runs, which never see the test data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fl_bn.advise.pilot import LEAST, Rung, final_cell, pilot_cells, result, successive_halving
from fl_bn.run.assembly import forget
from fl_bn.run.config import ConfigError
from fl_bn.sweep.cells import Cell, run_cell
from fl_bn.task import CLASSIFICATION
from tests.experiment.small_data import small_config, small_npz


def scored(
    curves: dict[str, Callable[[int], float]], calls: list[tuple[tuple[str, ...], int]]
) -> Callable[[Sequence[str], int], dict[str, float]]:
    def score(candidates: Sequence[str], rounds: int) -> dict[str, float]:
        calls.append((tuple(candidates), rounds))
        return {name: curves[name](rounds) for name in candidates}

    return score


def test_the_best_of_made_up_curves_is_chosen_in_few_rounds() -> None:
    curves = {f"m{n}": lambda rounds, n=n: 100 - 50 / rounds - abs(n - 3) for n in range(6)}  # m3 is best from the start
    calls: list[tuple[tuple[str, ...], int]] = []
    rungs = successive_halving(list(curves), 200, scored(curves, calls))
    assert [rung.rounds for rung in rungs] == [20, 40, 80]
    assert [len(names) for names, _ in calls] == [6, 3, 2]
    assert rungs[-1].kept == ("m3",)


def test_a_late_one_is_seen_where_it_is_kept() -> None:
    curves: dict[str, Callable[[int], float]] = {"early": lambda r: 60.0, "late": lambda r: 55 + r / 4, "never": lambda r: 10.0}
    rungs = successive_halving(list(curves), 100, scored(curves, []))
    assert rungs[0].kept == ("early", "late")
    assert rungs[1] == Rung(20, {"early": 60.0, "late": 60.0}, ("early",))  # of equals the first
    curves["late"] = lambda r: 55 + r / 2
    assert successive_halving(list(curves), 100, scored(curves, []))[-1].kept == ("late",)


def test_a_metric_that_should_be_low() -> None:
    curves: dict[str, Callable[[int], float]] = {"a": lambda r: 3.0, "b": lambda r: 1.0}
    assert successive_halving(["a", "b"], 100, scored(curves, []), higher_is_better=False)[-1].kept == ("b",)
    assert successive_halving(["a", "b"], 100, scored(curves, []))[-1].kept == ("a",)  # control


@pytest.mark.parametrize("higher", [True, False])
def test_a_run_that_failed_does_not_go_on(higher: bool) -> None:
    curves: dict[str, Callable[[int], float]] = {"a": lambda r: math.nan, "b": lambda r: 1.0}
    assert successive_halving(["a", "b"], 100, scored(curves, []), higher_is_better=higher)[-1].kept == ("b",)
    curves["b"] = curves["a"]
    with pytest.raises(ConfigError, match="the pilot runs of a, b all failed"):
        successive_halving(["a", "b"], 100, scored(curves, []), higher_is_better=higher)


def test_short_runs_have_a_few_rounds_and_no_more_than_the_run() -> None:
    curves: dict[str, Callable[[int], float]] = {"a": lambda r: 2.0, "b": lambda r: 1.0, "c": lambda r: 0.0}
    assert [rung.rounds for rung in successive_halving(list(curves), 20, scored(curves, []))] == [LEAST, 2 * LEAST]
    assert [rung.rounds for rung in successive_halving(list(curves), 3, scored(curves, []))] == [3, 3]
    assert successive_halving(["a"], 20, scored(curves, [])) == []


def test_short_runs_are_the_users_own_but_shorter(tmp_path: Path) -> None:
    base = {**small_config(tmp_path), "rounds": 40, "freeze-after": 20, "learning-rate": 0.3, "seed": 7}
    (one, other) = pilot_cells(["fedavg", "fbn:learning-rate=0.1"], 4, base, tmp_path)
    assert (one.config.rounds, one.config.evaluate_every, one.config.freeze_after) == (4, 4, 2)
    assert (one.config.learning_rate, other.config.learning_rate, one.config.seed) == (0.3, 0.1, 7)
    assert (one.config.validation_share, one.config.clients) == (0.2, 5)
    assert pilot_cells(["fbn"], 4, {**base, "validation-share": 0.4}, tmp_path)[0].config.validation_share == 0.4
    final = final_cell("fbn", base, tmp_path, 5).config
    assert (final.rounds, final.freeze_after, final.validation_share, final.checkpoint_every) == (40, 20, 0.0, 5)
    with pytest.raises(ConfigError, match="join-rounds='1:9' may name rounds after the end of a short pilot run"):
        pilot_cells(["fbn"], 4, {**base, "join-rounds": "1:9"}, tmp_path)


def spoilt(folder: Path) -> Path:
    """Return the same training data with other test data: other images, and every label wrong."""
    folder.mkdir()
    file = small_npz(folder)
    arrays = dict(np.load(file))
    arrays["x_test"] = 255 - arrays["x_test"]
    arrays["y_test"] = (arrays["y_test"] + 1) % 4
    np.savez(file, **arrays)
    return file


def test_the_pilot_never_sees_the_test_data(tmp_path: Path) -> None:
    """Its runs have the same numbers to the last bit whatever the test data are; the whole run has not."""
    values = {"rounds": 3, "local-steps": 3, "partition": "iid"}
    (tmp_path / "plain").mkdir()
    plain = {**small_config(tmp_path / "plain"), **values}
    other = {**plain, "data-path": str(spoilt(tmp_path / "spoilt"))}

    def rows(cell: Cell) -> list[tuple[float, float]]:
        forget()
        run_cell(cell)
        assert not math.isnan(result(cell, CLASSIFICATION))
        return [(row["loss"], row["accuracy"]) for row in cell.rows()]

    for method in ("fedavg", "fedbn"):  # tested by the server, and by the clients
        pilots = [rows(pilot_cells([method], 3, base, tmp_path / name)[0]) for name, base in (("a", plain), ("b", other))]
        assert pilots[0] == pilots[1]
        finals = [rows(final_cell(method, base, tmp_path / name, 0)) for name, base in (("a", plain), ("b", other))]
        assert [loss for loss, _ in finals[0]] == [loss for loss, _ in finals[1]]
        assert finals[0] != finals[1]  # control: the whole run is tested on them
