"""flwr-datasets' partitioners over our labels, and our similarity with their interface; skipped where the package is missing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fl_bn.data.partition import label_counts, similarity

LABELS = np.repeat(np.arange(5), 40)[np.random.default_rng(0).permutation(200)]


def test_the_adapter_can_be_imported_without_flwr_datasets() -> None:
    code = (
        "import sys; sys.modules['flwr_datasets'] = sys.modules['datasets'] = None\n"
        "import fl_bn.flower.app.partitioner as p\n"
        "try: p.SimilarityPartitioner\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs flwr-datasets, which is not installed: pip install 'fl-bn[partitioners]'" in done.stdout


@pytest.fixture
def theirs() -> object:
    pytest.importorskip("datasets", reason="pip install flwr-datasets==0.6.0")
    return pytest.importorskip("flwr_datasets.partitioner", reason="pip install flwr-datasets==0.6.0")


def test_their_partitioners_divide_our_samples(theirs: object) -> None:
    from fl_bn.flower.app.partitioner import with_partitioner

    parts = with_partitioner(theirs.PathologicalPartitioner(5, "label", 2, class_assignment_mode="deterministic"), LABELS)  # type: ignore[attr-defined]
    assert sorted(np.concatenate(parts)) == list(range(200))
    assert ((label_counts(LABELS, parts, 5) > 0).sum(axis=1) == 2).all()
    groups = np.repeat([4, 7], [150, 50])
    natural = with_partitioner(theirs.NaturalIdPartitioner("domain"), LABELS, groups)  # type: ignore[attr-defined]
    assert sorted(map(len, natural)) == [50, 150]
    assert any((np.diff(part) > 0).all() for part in natural)


def test_ours_has_their_interface_and_the_partition_of_the_run(theirs: object) -> None:
    from datasets import Dataset

    from fl_bn.flower.app.partitioner import SimilarityPartitioner, similarity_partitioner, with_partitioner

    partitioner = similarity_partitioner(4, "label", 0.3, seed=7)
    assert isinstance(partitioner, SimilarityPartitioner)
    assert isinstance(partitioner, theirs.Partitioner)  # type: ignore[attr-defined]
    want = similarity(LABELS, 4, 0.3, 7)
    assert [part.tolist() for part in with_partitioner(partitioner, LABELS)] == [part.tolist() for part in want]
    named = similarity_partitioner(4, "kind", 0.3, seed=7)
    named.dataset = Dataset.from_dict({"kind": [f"class {label}" for label in LABELS], "index": range(200)})
    assert [named.load_partition(i)["index"] for i in range(named.num_partitions)] == [part.tolist() for part in want]
    other = similarity_partitioner(4, "label", 0.3, seed=8)  # control
    assert [part.tolist() for part in with_partitioner(other, LABELS)] != [part.tolist() for part in want]
