"""The data of the ``evidence`` variants: ``python experiments/evidence_data.py SOURCE TARGET``, then ``--data TARGET``.

SOURCE holds archives as docs/data.md describes them (``cifar10.npz``, ``digits_*.npz``) and

    cifar10_full.npz        CIFAR-10 whole, 50,000 + 10,000: x_train, y_train, x_test, y_test
    office_caltech10_64.npz the same arrays, domain_train, domain_test, domain_names
    abide_4sites.npz        the same with vectors, and the subjects' numbers sub_train, sub_test

TARGET gets the archives that a run reads as they are, and

    office-caltech10/SITE.npz       one archive per domain, the split as in the source
    office-caltech10-grid/SITE.npz  the training part alone, divided 4 : 1 anew: for choosing learning rates
    abide/N/SITE.npz                N = 0..9: all subjects of a site in an order of their own, so that the fifth that is tested on differs
    abide-grid/SITE.npz             the training subjects of order 0 alone, for choosing learning rates
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_bn.data.connectomes import held_out

ORDERS = 10
GRID_SHARE = 0.2  # of the training samples, to compare learning rates on
AS_THEY_ARE = ("cifar10.npz", "cifar10_full.npz", "digits_*.npz")
Arrays = dict[str, NDArray[Any]]


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in AS_THEY_ARE:
        for file in sorted(source.glob(pattern)):
            if not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
    if (office := source / "office_caltech10_64.npz").exists():
        by_domain(office, target / "office-caltech10", target / "office-caltech10-grid")
    if (abide := source / "abide_4sites.npz").exists():
        by_site(abide, target)


def by_domain(file: Path, whole: Path, grid: Path) -> None:
    """One archive per domain; ``grid``: the training part divided anew, by class."""
    arrays = read(file)
    for number, name in enumerate(arrays["domain_names"].tolist()):
        mine = {
            f"{letter}_{split}": arrays[f"{letter}_{split}"][arrays[f"domain_{split}"] == number]
            for letter in "xy"
            for split in ("train", "test")
        }
        save(whole / f"{name}.npz", mine)
        rng, y = np.random.default_rng(number), mine["y_train"]
        tested = np.zeros(len(y), bool)
        for label in np.unique(y):
            of = rng.permutation(np.flatnonzero(y == label))
            tested[of[: max(1, round(GRID_SHARE * len(of)))]] = True
        x = mine["x_train"]
        save(grid / f"{name}.npz", {"x_train": x[~tested], "y_train": y[~tested], "x_test": x[tested], "y_test": y[tested]})


def by_site(file: Path, target: Path) -> None:
    """All subjects of every site in ten orders; for ``abide-grid`` those that order 0 trains on."""
    arrays = read(file)
    for number, name in enumerate(arrays["domain_names"].tolist()):
        x, y, subject = (
            np.concatenate([arrays[f"{key}_{split}"][arrays[f"domain_{split}"] == number] for split in ("train", "test")])
            for key in ("x", "y", "sub")
        )
        for order in range(ORDERS):
            rows = np.random.default_rng([order, number]).permutation(len(y))
            save(target / "abide" / str(order) / f"{name}.npz", {"x": x[rows], "y": y[rows], "subject": subject[rows]})
            if order == 0:
                site = sorted(arrays["domain_names"].tolist()).index(name)  # files are read in the order of their names
                kept = np.array([row for n, row in enumerate(rows) if n not in held_out(y[rows].tolist(), site)])
                save(target / "abide-grid" / f"{name}.npz", {"x": x[kept], "y": y[kept], "subject": subject[kept]})


def read(file: Path) -> Arrays:
    with np.load(file, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def save(file: Path, arrays: Arrays) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)  # type: ignore[arg-type]  # its other parameter is no array


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
