"""Load ABIDE I: correlations between regions of resting brains of people with and without autism, by site.

A sample is the upper triangle of the correlation matrix of R regions' time series, R (R - 1) / 2 numbers:
5,995 for the 110 regions of the Harvard-Oxford atlas. FedBN trains on windows of each scan, which yields
about a hundred samples per subject.

Legend: N samples, S scans, T time points, R regions.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.data.listing import TEST_SHARE, warn_if_large
from experiments.data.public import ROOT
from fl_bn.data.folder import visible
from fl_bn.data.record import DataNotFound, Dataset, expect

SITES = ("NYU", "USM", "UM", "UCLA")  # the sites of the published files that FedBN uses
WINDOW, STRIDE = 32, 1  # time points; a scan shorter than a window is one window
EMPTY_REGION = "#3455"  # the one of the 111 published columns that is no region
CLASSES = {"2": 0, "1": 1}  # DX_GROUP: 2 is a control, 1 autism
_STREAM = 0xAB1DE  # sets these draws apart from others that start from the same seed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """Describe one person.

    Attributes:
        data: time series of scans (S, T, R), or ready vectors (N, R (R - 1) / 2).
        label: 1 for autism, 0 for control.
        ready: whether ``data`` are vectors.
    """

    data: Floats
    label: int
    ready: bool

    def vectors(self) -> NDArray[np.float32]:
        """Compute the samples (N, R (R - 1) / 2) of this subject."""
        if self.ready:
            return self.data.astype(np.float32)
        return np.concatenate([connectome(window)[None] for scan in self.data for window in windows(scan)])

    @property
    def count(self) -> int:
        """Return the number of samples."""
        return len(self.data) if self.ready else sum(len(windows(scan)) for scan in self.data)

    @property
    def features(self) -> int:
        """Return how many numbers a sample has."""
        width: int = self.data.shape[-1]
        return width if self.ready else width * (width - 1) // 2


def connectome(series_TR: Floats) -> NDArray[np.float32]:
    """Compute Pearson's correlations between the columns of a time series.

    Returns:
        The upper triangle row by row, (R (R - 1) / 2,). A region that does not vary has the correlation 0 with all others.
    """
    centred = series_TR - series_TR.mean(0)
    norm = np.sqrt((centred**2).sum(0))
    flat = norm <= 1e-12 * max(float(np.abs(series_TR).max()), 1e-300) * len(series_TR)  # rounding apart, it is constant
    unit = np.where(flat, 0.0, centred / np.where(flat, 1.0, norm))
    rows, columns = np.triu_indices(series_TR.shape[1], 1)
    correlations: NDArray[np.float32] = np.clip(unit.T @ unit, -1.0, 1.0)[rows, columns].astype(np.float32)
    return correlations


def windows(series_TR: Floats) -> list[Floats]:
    """Cut a time series (T, R) into windows of ``WINDOW`` time points, which begin every ``STRIDE`` time points.

    A series that is shorter than one window is returned as the only window.
    """
    last = max(len(series_TR) - WINDOW, 0)
    return [series_TR[start : start + WINDOW] for start in range(0, last + 1, STRIDE)]


def load_abide(path: str, image_size: int) -> Dataset:
    """Load ``abide``: connectomes of ABIDE I, with a domain for each site.

    The files have one of these forms (experiments/data.md):

    * the published ``Phenotypic*.csv`` and ``*_rois_ho.1D``, anywhere below ``path``. Only the four sites of the FedBN paper
      are used; or
    * a file ``SITE.npz`` for each site with labels ``y`` (n,) and either ``series`` (n, T, R) or ready
      vectors ``x`` (n, features). An optional ``subject`` (n,) tells which rows belong to one person; or
    * a file ``SITE.csv`` for each site: a label and the vector's numbers per line, without a header.

    A time series is cut into overlapping windows, and each window is one sample. At each site, a fifth of the subjects of
    each label form the test split. All windows of a subject are in the same split. The accuracy counts windows, not subjects.

    Args:
        path: the folder of the files; ``data`` if empty.
        image_size: 0 or 1, as a vector has no pixels.

    Raises:
        DataNotFound: there are no such files.
        ValueError: a file has another form, or ``image_size`` is neither 0 nor 1.
    """
    expect(image_size in (0, 1), "abide", "image-size", "0 or 1, as vectors have no pixels", image_size)
    sites = read_sites(Path(path or ROOT))
    _check_lengths(sites)
    size = sum(4 * subject.count * subject.features for subjects in sites.values() for subject in subjects)
    warn_if_large("abide", size, "use fewer sites")
    x: dict[str, list[NDArray[np.float32]]] = {"train": [], "test": []}
    y: dict[str, list[int]] = {"train": [], "test": []}
    domain: dict[str, list[int]] = {"train": [], "test": []}
    for i, (site, subjects) in enumerate(sites.items()):
        tested = held_out([subject.label for subject in subjects], i)
        both = "two subjects with the same label, one for training and one for testing"
        expect(0 < len(tested) < len(subjects), "abide", site, both, f"{len(subjects)} subjects")
        for number, subject in enumerate(subjects):
            side, vectors = "test" if number in tested else "train", subject.vectors()
            x[side].append(vectors)
            y[side] += [subject.label] * len(vectors)
            domain[side] += [i] * len(vectors)
    train, test = (torch.from_numpy(np.concatenate(x[side])) for side in ("train", "test"))
    labels, domains = ([torch.tensor(of[side]) for side in ("train", "test")] for of in (y, domain))
    return Dataset("abide", train, labels[0], test, labels[1], 2, domains[0], domains[1], tuple(sites))


def held_out(labels: list[int], site: int) -> set[int]:
    """Choose a site's subjects for the test split: a fifth of the subjects of each label.

    If a label has two or more subjects, at least one of them is chosen. The only subject of a label is not chosen.

    Args:
        labels: the label of each subject of the site, 0 or 1.
        site: the number of the site, from 0. It is the seed of the draw.

    Returns:
        The positions of the chosen subjects in ``labels``.
    """
    rng = np.random.default_rng(np.random.SeedSequence([_STREAM, site]))
    tested: set[int] = set()
    for label in (0, 1):
        group = [i for i, one in enumerate(labels) if one == label]
        size = min(max(1, round(TEST_SHARE * len(group))), max(len(group) - 1, 0))
        tested |= {group[i] for i in rng.permutation(len(group))[:size].tolist()}
    return tested


def read_sites(folder: Path) -> dict[str, list[Subject]]:
    """Read the subjects of each site, in any of the forms that ``load_abide`` describes.

    Raises:
        DataNotFound: there are no such files.
        ValueError: a file has another form.
    """
    if not folder.is_dir():
        raise DataNotFound(f"dataset 'abide': there is no folder {str(folder)!r} with the files of experiments/data.md")
    if phenotypes := sorted(folder.rglob("Phenotypic*.csv")):
        return _published(folder, phenotypes[0])
    files = [file for file in visible(folder) if file.suffix in (".npz", ".csv")]
    if not files:
        raise DataNotFound(f"dataset 'abide': {folder} has no files in a form of experiments/data.md")
    names = [file.stem for file in files]
    expect(len(set(names)) == len(names), folder, "", "a name of its own for the file of each site", ", ".join(names))
    return {file.stem: _npz(file) if file.suffix == ".npz" else _csv(file) for file in files}


def _published(folder: Path, phenotypes: Path) -> dict[str, list[Subject]]:
    with phenotypes.open(newline="", encoding="utf-8-sig") as stream:
        rows = list(csv.DictReader(stream))
    header = list(rows[0]) if rows else []
    expect({"FILE_ID", "SITE_ID", "DX_GROUP"} <= {*header}, phenotypes, "", "the columns FILE_ID, SITE_ID and DX_GROUP", ", ".join(header))
    files = {file.name.removesuffix("_rois_ho.1D"): file for file in sorted(folder.rglob("*_rois_ho.1D"))}
    sites: dict[str, list[Subject]] = {site: [] for site in SITES}
    for row in sorted(rows, key=lambda row: row["FILE_ID"]):
        site = row["SITE_ID"].split("_")[0]  # UM_1 and UM_2 are two samples of one site
        if site in sites and row["FILE_ID"] in files:
            expect(row["DX_GROUP"] in CLASSES, phenotypes, row["FILE_ID"], "1 or 2 as DX_GROUP", row["DX_GROUP"])
            sites[site].append(Subject(read_series(files[row["FILE_ID"]])[None], CLASSES[row["DX_GROUP"]], ready=False))
    if empty := [site for site, subjects in sites.items() if not subjects]:
        raise DataNotFound(f"dataset 'abide': no FILE_ID_rois_ho.1D below {folder} belongs to {', '.join(empty)}")
    return sites


def read_series(file: Path) -> Floats:
    """Read the time series (T, R) of a published text file: a header of region numbers, then one time point per line.

    The column of the atlas's empty region (``EMPTY_REGION``) is left out.

    Raises:
        ValueError: the file has another form, or a number is not finite.
    """
    with file.open(encoding="utf-8-sig") as stream:
        header = stream.readline()
    try:
        series = np.loadtxt(file, ndmin=2)  # the header begins with #, so loadtxt skips it as a comment
    except ValueError as error:
        raise ValueError(f"{file}: expected a header and a line of numbers per time point, but reading failed: {error}") from error
    names = header.split()
    if EMPTY_REGION in names and len(names) == series.shape[1]:
        series = np.delete(series, names.index(EMPTY_REGION), axis=1)
    return _checked(file, series)


def _npz(file: Path) -> list[Subject]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{file}: expected a .npz archive of numbers, but could not read it: {error}") from error
    key = "series" if "series" in arrays else "x"
    expect({key, "y"} <= arrays.keys(), file, "", "y and either series or x", ", ".join(arrays) or "nothing")
    data, y = arrays[key], arrays["y"]
    if data.ndim != (3 if key == "series" else 2) or not np.issubdtype(data.dtype, np.floating) or y.shape != data.shape[:1]:
        form = "n, T, R" if key == "series" else "n, features"
        raise ValueError(f"{file}: expected {key} as floats ({form}) and y (n,), but got {data.dtype} {data.shape} and {y.shape}")
    subject = arrays.get("subject", np.arange(len(y)))
    expect(subject.shape == y.shape, file, "subject", f"an entry for each of the {len(y)} rows", subject.shape)
    return _grouped(file, data, y, subject, ready=key == "x")


def _csv(file: Path) -> list[Subject]:
    try:
        table = np.loadtxt(file, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file}: expected a label and numbers per line, separated by commas, but: {error}") from error
    return _grouped(file, table[:, 1:], table[:, 0], np.arange(len(table)), ready=True)


def _grouped(file: Path, x: Floats, y: NDArray[np.generic], subject: NDArray[np.generic], *, ready: bool) -> list[Subject]:
    """Make one ``Subject`` per person from all rows of the person.

    Args:
        file: the file of the rows, for messages.
        x: the rows: vectors, or time series of scans.
        y: the label of each row.
        subject: the person of each row.
        ready: whether the rows are vectors.

    Raises:
        ValueError: the rows of a person have both labels, a label is not 0 or 1, or a number is not finite.
    """
    subjects = []
    for one in dict.fromkeys(subject.tolist()):
        rows = np.flatnonzero(subject == one)
        labels = {_label(file, label) for label in y[rows]}
        expect(len(labels) == 1, file, f"subject {one}", "one label for all rows of a subject", "both")
        subjects.append(Subject(_checked(file, x[rows]), labels.pop(), ready))
    return subjects


def _label(file: Path, label: np.generic) -> int:
    expect(label in (0, 1), file, "", "labels 0 (control) and 1 (autism)", label)
    return 1 if label == 1 else 0


def _checked(file: Path, values: Floats) -> Floats:
    expect(values.size > 0 and bool(np.isfinite(values).all()), file, "", "finite numbers", "none, or others")
    return values.astype(np.float64)


def _check_lengths(sites: dict[str, list[Subject]]) -> None:
    lengths = {site: sorted({subject.features for subject in subjects}) for site, subjects in sites.items()}
    if len({length for several in lengths.values() for length in several}) != 1 or min(lengths[next(iter(lengths))]) < 1:
        by_site = ", ".join(f"{site}: {' and '.join(map(str, several))}" for site, several in lengths.items())
        raise ValueError(f"dataset 'abide': all vectors must have one length of at least 1, but got {by_site}")
