"""Make the data of the ``evidence`` variants: ``python experiments/evidence_data.py SOURCE TARGET``.

Pass TARGET to ``python -m experiments run`` as ``--data``.

SOURCE holds the archives ``cifar10.npz`` and ``digits_*.npz``, which experiments/data.md describes, and

    cifar10_full.npz        the whole of CIFAR-10, 50,000 + 10,000 images: x_train, y_train, x_test, y_test
    office_caltech10_64.npz the same arrays, and domain_train, domain_test, domain_names
    abide_4sites.npz        the same arrays with vectors for images, and the subjects' numbers sub_train, sub_test

TARGET gets copies of the archives that a run reads unchanged, and

    office-caltech10/SITE.npz       one archive per domain, divided as in the source
    abide/N/SITE.npz                N = 0..9: all subjects of a site in ten orders, so that different fifths are tested
    abide-shift/HOW/N/SITE.npz      as abide/N with the sites' means changed: HOW is "removed" or "4-fold"
    abide-which/LABELS/N/both.npz   the two largest sites in one archive; LABELS: "site" or "shuffled"
    rates/...                       data for trying learning rates: the training part, divided 4 : 1 by class;
                                    for ABIDE the training subjects of order 0
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.data.connectomes import held_out

ORDERS = 10
SHIFTS = {"abide": 1.0, "abide-shift/removed": 0.0, "abide-shift/4-fold": 4.0}  # folder -> factor of a site's distance from the mean
HELD_OUT = 0.2  # the share of the training samples on which learning rates are tried
AS_THEY_ARE = ("cifar10.npz", "cifar10_full.npz", "digits_*.npz")
Arrays = dict[str, NDArray[Any]]


def main(source: Path, target: Path) -> None:
    """Make the data of the ``evidence`` variants. Where a source archive is missing, leave out the files made from it.

    Args:
        source: The folder of the source archives; the module's docstring lists them.
        target: The folder to write.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in AS_THEY_ARE:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, target / file.name)
            save(target / "rates" / file.name, held_out_of_training(read(file), 0))
    if (office := source / "office_caltech10_64.npz").exists():
        by_domain(office, target)
    if (abide := source / "abide_4sites.npz").exists():
        by_site(abide, target)


def by_domain(file: Path, target: Path) -> None:
    """Write two archives for each domain in ``file``: its data, and its data for trying learning rates."""
    arrays = read(file)
    for number, name in enumerate(arrays["domain_names"].tolist()):
        mine = {
            f"{letter}_{split}": arrays[f"{letter}_{split}"][arrays[f"domain_{split}"] == number]
            for letter in "xy"
            for split in ("train", "test")
        }
        save(target / "office-caltech10" / f"{name}.npz", mine)
        save(target / "rates" / "office-caltech10" / f"{name}.npz", held_out_of_training(mine, number))


def held_out_of_training(arrays: Arrays, seed: int) -> Arrays:
    """Divide the training samples anew: a fifth of every class becomes the test part.

    Args:
        arrays: The arrays of an archive. Their test part is not used.
        seed: The seed of the division.
    """
    rng, x, y = np.random.default_rng(seed), arrays["x_train"], arrays["y_train"]
    tested = np.zeros(len(y), bool)
    for label in np.unique(y):
        of = rng.permutation(np.flatnonzero(y == label))
        tested[of[: max(1, round(HELD_OUT * len(of)))]] = True
    return {"x_train": x[~tested], "y_train": y[~tested], "x_test": x[tested], "y_test": y[tested]}


def by_site(file: Path, target: Path) -> None:
    """Write all subjects of every site in ten random orders, once for each factor of ``SHIFTS``.

    The place of a subject in the order decides whether the subject is tested, so each order tests other subjects. A factor
    multiplies the distance of the site's mean from the mean of all subjects. The mean of a site is over all its subjects,
    whatever their labels. The folder ``rates``, for trying learning rates, gets only the training subjects of order 0, with
    the site's mean unchanged. The folder ``abide-which`` is written, too (``which_site``).

    Args:
        file: The archive (npz) with the subjects of all sites.
        target: The folder in which to make the folders that ``SHIFTS`` names, ``rates`` and ``abide-which``.
    """
    arrays = read(file)
    names = arrays["domain_names"].tolist()
    whole = {key: np.concatenate([arrays[f"{key}_train"], arrays[f"{key}_test"]]) for key in ("x", "y", "sub", "domain")}
    sites = [{key: values[whole["domain"] == n] for key, values in whole.items()} for n in range(len(names))]
    centre = np.concatenate([site["x"] for site in sites]).mean(0)
    for number, (name, site) in enumerate(zip(names, sites, strict=True)):
        x, y, subject = site["x"], site["y"], site["sub"]
        moved = {folder: x + np.float32(times - 1) * (x.mean(0) - centre) for folder, times in SHIFTS.items()}
        for order in range(ORDERS):
            rows = np.random.default_rng([order, number]).permutation(len(y))
            for folder, vectors in moved.items():
                save(target / folder / str(order) / f"{name}.npz", {"x": vectors[rows], "y": y[rows], "subject": subject[rows]})
            if order == 0:
                place = sorted(names).index(name)  # files are read in the order of their names
                kept = np.array([row for n, row in enumerate(rows) if n not in held_out(y[rows].tolist(), place)])
                save(target / "rates" / "abide" / f"{name}.npz", {"x": x[kept], "y": y[kept], "subject": subject[kept]})
    which_site(sites, target / "abide-which")


def which_site(sites: list[Arrays], target: Path) -> None:
    """Write the subjects of the two largest sites, once labelled with their site, and once with these labels shuffled.

    The shuffled labels are a control. Each version is written in ten random orders.

    Args:
        sites: The arrays of each site.
        target: The folder in which to make the folders ``site`` and ``shuffled``.
    """
    pair = sorted(sites, key=lambda site: len(site["y"]))[-2:]
    x, y = np.concatenate([site["x"] for site in pair]), np.repeat([0, 1], [len(site["y"]) for site in pair])
    for order in range(ORDERS):
        rng = np.random.default_rng([order, len(sites)])
        rows = rng.permutation(len(y))
        for labels, of in (("site", y), ("shuffled", rng.permutation(y))):
            save(target / labels / str(order) / "both.npz", {"x": x[rows], "y": of[rows]})


def read(file: Path) -> Arrays:
    """Return the arrays of an archive (npz), by name."""
    with np.load(file, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def save(file: Path, arrays: Arrays) -> None:
    """Write arrays to an archive (npz), and make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes ``**arrays`` for the other parameter, which is not an array


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
