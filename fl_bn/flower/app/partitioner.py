"""flwr-datasets' partitioners for our data, and ours for theirs.

An option: ``pip install flwr-datasets==0.6.0`` (with pandas, pyarrow and datasets, so nothing here imports it before it is used).
``data.partition`` needs none of this; a partitioner of theirs serves where that has no counterpart (Pathological, ShardPartitioner, ...).

    >>> parts = with_partitioner(PathologicalPartitioner(5, "label", 2, seed=0), labels)     # doctest: +SKIP
    >>> FederatedDataset(dataset="mnist", partitioners={"train": similarity_partitioner(5, "label", 0.1)})  # doctest: +SKIP
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_bn.data.partition import Indices, Labels, similarity
from fl_bn.support.extras import need

if TYPE_CHECKING:
    SimilarityPartitioner = Any  # the class itself is made when it is first asked for


def with_partitioner(partitioner: Any, labels: Labels, domains: Labels | None = None) -> list[Indices]:
    """The partition that ``partitioner`` (any of flwr-datasets, fresh) makes of our samples: one sorted index array per client.

    It sees a data set with the columns ``label`` and, where there are ``domains``, ``domain``: name these as its ``partition_by``.
    """
    from datasets import Dataset as Table  # type: ignore[import-not-found,import-untyped,attr-defined,unused-ignore]

    columns: dict[str, Any] = {"index": np.arange(len(labels)), "label": np.asarray(labels)}
    partitioner.dataset = Table.from_dict(columns if domains is None else columns | {"domain": np.asarray(domains)})
    parts = [partitioner.load_partition(client)["index"] for client in range(partitioner.num_partitions)]
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def similarity_partitioner(num_partitions: int, partition_by: str, similarity: float, seed: int = 42) -> Any:
    """A ``SimilarityPartitioner``; see ``data.partition.similarity``."""
    return _similarity_class()(num_partitions, partition_by, similarity, seed)


def __getattr__(name: str) -> Any:
    if name == "SimilarityPartitioner":
        return _similarity_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=1)
def _similarity_class() -> Any:
    need("SimilarityPartitioner", "flwr_datasets")
    from flwr_datasets.partitioner import Partitioner  # type: ignore[import-not-found,import-untyped,unused-ignore]

    class SimilarityPartitioner(Partitioner):  # type: ignore[misc,unused-ignore]
        """FBN's partition by similarity, with the interface of flwr-datasets.

        A share ``similarity`` of each partition is drawn from a homogeneous pool, the rest is a label-sorted chunk.

        Reference: FBN (seed 003), section 4. Symbols: γ → similarity.
        """

        def __init__(self, num_partitions: int, partition_by: str, similarity: float, seed: int = 42) -> None:
            super().__init__()
            self._num_partitions, self._partition_by, self._similarity, self._seed = num_partitions, partition_by, similarity, seed
            self._parts: list[Indices] | None = None

        @property
        def num_partitions(self) -> int:
            return self._num_partitions

        def load_partition(self, partition_id: int) -> Any:
            if self._parts is None:
                labels = np.unique(np.asarray(self.dataset[self._partition_by]), return_inverse=True)[1]  # names, too
                self._parts = similarity(labels, self._num_partitions, self._similarity, self._seed)
            return self.dataset.select(self._parts[partition_id])

    return SimilarityPartitioner
