"""A test over a list tries every case, names those that are wrong, and gives each what a test of its own would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.listed import listed


def test_every_pair_is_tried_with_a_generator_and_a_folder_of_its_own_and_those_that_are_wrong_are_named(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    tried, folders = [], set()

    @listed("left", ["a", pytest.param("b", id="second")])
    @listed("right", [1, 2])
    def pair(left: str, right: int, tmp_path: Path, rng: np.random.Generator) -> None:
        tried.append((left, right, rng.random()))
        folders.add(tmp_path)
        if left == "a" and right == 1:
            pytest.skip("what is wrong counts for more")
        assert (left, right) != ("b", 2)

    with pytest.raises(pytest.fail.Exception) as failed:
        pair(tmp_path=tmp_path, rng=rng)
    said, drawn = str(failed.value), rng.random()
    assert said.startswith("1 of 2 cases:\n[second]")
    assert "[2]" in said
    assert tried == [("a", 1, drawn), ("a", 2, drawn), ("b", 1, drawn), ("b", 2, drawn)]
    assert len(folders) == 4
