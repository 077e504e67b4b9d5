"""``fl_bn`` has few names; each says what it is in ten lines, with an example that runs and then a list of its arguments."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch

import fl_bn
from fl_bn import task
from fl_bn.federation import client, federation, server
from tests.listed import listed

NAMES = sorted(set(fl_bn.__all__) - {"__version__"})


def run(text: str, globs: dict[str, object], name: str) -> int:
    """The number of examples in ``text``, all of which must pass."""
    test = doctest.DocTestParser().get_doctest(text, globs, name, None, 0)
    said: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert not failed, "".join(said)
    return tried


@listed("name", NAMES)
def test_a_short_docstring_with_an_example(name: str) -> None:
    text = inspect.cleandoc(getattr(fl_bn, name).__doc__)
    introduction = re.split(r"^(?:Args|Attributes|Returns|Raises):$", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
    assert len(introduction.splitlines()) <= 10
    assert run(text, {"torch": torch, "nn": torch.nn, "Tensor": torch.Tensor}, name) >= 1


@pytest.mark.parametrize("module", [fl_bn, task, federation, client, server], ids=lambda module: module.__name__)
def test_the_module_s_examples(module: object) -> None:
    failed, _ = doctest.testmod(module)  # type: ignore[arg-type]
    assert not failed


def test_all_names_are_there_and_few() -> None:
    assert len(NAMES) <= 21
    assert [name for name in NAMES if getattr(fl_bn, name) is None] == []
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fl_bn.nothing
