"""Check a data set's files before a run: the files must exist, be well formed, and be complete. Nothing is downloaded or written."""

from __future__ import annotations

from fl_bn.data.csv_files import TableData
from fl_bn.data.dataset import DATASETS, load
from fl_bn.data.public import CLASSES, load_public
from fl_bn.data.record import DataNotFound, Dataset, describe, untrained_classes
from fl_bn.support.finding import Finding
from fl_bn.support.names import expected


def check_files(name: str, path: str = "") -> list[Finding]:
    """Load data set ``name`` from ``path``, and check it.

    Args:
        name: name of the data set.
        path: the run-config key ``data-path``.

    Returns:
        The findings, at least one. Each has a status (ok, warn or fail), a text, and advice for the user. For ``csv``, the
        last one has the run-config keys for a run in which every site has such a file (``dataset="sites"``).

    Raises:
        ValueError: there is no such data set.
    """
    if name not in DATASETS and ":" not in name:
        raise ValueError(expected("dataset", name, DATASETS, ", or your own function as package.module:function"))
    try:
        data = load_public(name.upper(), path, 0, download=False) if name.upper() in CLASSES else load(name, path)
    except DataNotFound as error:
        return [Finding("fail", "files", str(error), "correct data-path, or put the files there; a run downloads public sets")]
    except (ValueError, OSError) as error:
        return [Finding("fail", "form", str(error), "correct the file")]
    domains = f", domains {', '.join(data.domains)}" if data.domains else ""
    shape = tuple(data.x_train.shape[1:])
    text = f"{len(data.x_train):,} + {len(data.x_test):,} samples {shape} of {describe(data.y_train, data.classes)}{domains}"
    findings = [
        Finding("ok", "files", text),
        *(Finding("warn", "rows", note, "nothing to do, if this is on purpose") for note in data.notes),
    ]
    if missing := untrained_classes(data):
        do = "correct the labels: a run refuses them" if data.counted else "go on if the class is only rare"
        findings.append(Finding("fail" if data.counted else "warn", "labels", f"no training sample has label {missing}", do))
    return [*findings, *_of_sites(data)]


def _of_sites(data: Dataset) -> list[Finding]:
    if not isinstance(data, TableData):
        return []
    keys = f"classes={data.classes} channels={data.channels} image-size=1 columns-digest='{data.columns.digest}'"
    return [Finding("ok", "sites", f"a run of sites with such files has dataset='sites' {keys}")]
