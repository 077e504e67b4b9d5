"""A test over a list tries every case, names those that are wrong, and gives each what a test of its own would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import listed as module
from tests.listed import listed

ROOT = Path(__file__).parents[1]


def failure(test: object, **fixtures: object) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        test(**fixtures)  # type: ignore[operator]
    return str(failed.value)


def test_every_case_is_tried_and_those_that_are_wrong_are_named() -> None:
    tried = []

    @listed("number", [1, 2, 3, pytest.param("four", id="fourth")])
    def even(number: int) -> None:
        tried.append(number)
        assert int(number) % 2 == 0, "odd"

    said = failure(even)
    assert tried == [1, 2, 3, "four"]
    assert said.startswith("3 of 4 cases:\n[1] odd")
    assert "[3] odd" in said
    assert "[fourth] ValueError" in said
    assert "[2]" not in said


def test_two_lists_try_every_pair_each_with_a_generator_and_a_folder_of_its_own(tmp_path: Path, rng: np.random.Generator) -> None:
    tried, folders = [], set()

    @listed("left", "ab")
    @listed("right", [1, 2])
    def pair(left: str, right: int, tmp_path: Path, rng: np.random.Generator) -> None:
        tried.append((left, right, rng.random()))
        folders.add(tmp_path)
        assert tmp_path.is_dir()
        assert (left, right) != ("b", 2)

    said = failure(pair, tmp_path=tmp_path, rng=rng)
    assert "[b]" in said
    assert "[2]" in said
    drawn = rng.random()
    assert tried == [("a", 1, drawn), ("a", 2, drawn), ("b", 1, drawn), ("b", 2, drawn)]
    assert len(folders) == 4


def test_one_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(module, "CHOSEN", ["fix"])
    listed("name", ["fbn", "fixbn"])(lambda name: tried.append(name))()
    assert tried == ["fixbn"]


@pytest.mark.parametrize("cases", [[], [1, pytest.param(2, marks=pytest.mark.slow)]], ids=["none", "one with a mark"])
def test_a_list_of_no_case_or_of_a_marked_one_is_refused(cases: list[object]) -> None:
    with pytest.raises(AssertionError):
        listed("number", cases)


def test_a_case_that_is_skipped_leaves_the_others_to_be_tried() -> None:
    tried, wanted = [], 4

    @listed("number", [1, 2, 3])
    def only_even(number: int) -> None:
        if number == 1:
            pytest.skip("too small")
        tried.append(number)
        assert number < wanted

    with pytest.raises(pytest.skip.Exception):
        only_even()  # type: ignore[call-arg]
    assert tried == [2, 3]
    wanted = 3
    assert failure(only_even).startswith("1 of 3 cases:\n[3]")  # control: what is wrong counts for more
