"""Write folders of sweeps with made-up runs, whose results can be recomputed by hand, and read their reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_bn.app.report.cells import read_cells
from fl_bn.app.report.page import Report, report_of
from fl_bn.app.report.settings import read_settings


def read(folder: Path) -> Report:
    """Make the report of a sweep from the files in its folder."""
    return report_of(read_settings(folder), read_cells(folder), folder)


def rounds(accuracy: Sequence[float | None], **others: Sequence[Any]) -> list[dict[str, Any]]:
    """Return one row per round with its accuracy. ``others`` are further columns; ``test_loss`` makes the column test-loss."""
    columns = {"accuracy": accuracy, **{name.replace("_", "-"): values for name, values in others.items()}}
    return [{"round": n + 1, **{name: values[n] for name, values in columns.items()}} for n in range(len(accuracy))]


def run(
    folder: Path,
    axes: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    status: str = "finished",
    error: str = "",
    **config: Any,
) -> Path:
    """Write the files of one run into a folder below ``folder/runs``, named by its values on ``axes``; return that folder."""
    name = "-".join("".join(c if c.isalnum() or c in "+.=" else "_" for c in str(value)) for value in axes.values()) or "run"
    path = folder / "runs" / name
    path.mkdir(parents=True)
    config = {"rounds": len(rows), "local-steps": 5, **{key.replace("_", "-"): value for key, value in config.items()}}
    (path / "cell.json").write_text(json.dumps({"axes": dict(axes), "config": config, "status": status, "error": error}))
    (path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sweep(folder: Path, toml: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.toml").write_text(toml)
    return folder


def comparison(folder: Path, report: str = "") -> Path:
    """Write a sweep of three methods and two splits.

    BN is worst and has a failed run. FixBN is best, and one seed of it is unfinished. GN has no runs on the second split.
    """
    sweep(
        folder,
        f"""
        title = "Made up"
        [axes.method]
        BN = {{ method = "fedavg" }}
        GN = {{ method = "gn" }}
        FixBN = {{ method = "fixbn" }}
        [axes.split]
        IID = {{ partition = "iid" }}
        "1 class" = {{ partition = "classes" }}
        [report]
        {report}
        """,
    )
    values = {("BN", "IID"): (0.5, 0.6), ("GN", "IID"): (0.7, 0.72), ("FixBN", "IID"): (0.8, 0.9), ("FixBN", "1 class"): (0.6, 0.5)}
    for (method, split), last in values.items():
        for seed, value in enumerate(last):
            run(folder, {"method": method, "split": split, "seed": seed}, rounds([0.1, None, value]), method=method.lower())
    run(folder, {"method": "BN", "split": "1 class", "seed": 0}, rounds([0.3, None, 0.3]), method="bn")
    run(folder, {"method": "BN", "split": "1 class", "seed": 1}, rounds([0.9]), "failed", "RunFailed: client 3 sent\nNaN", method="bn")
    run(folder, {"method": "FixBN", "split": "1 class", "seed": 2}, rounds([0.9]), "running", method="fixbn")
    return folder
