"""Make one test of a list of cases, which fails once with a line for each wrong case, and choose which cases are slow ones."""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Ids = Callable[[Any], object] | Iterable[str] | None
PARAM = type(pytest.param())
CHOSEN: list[str] = []
"""The texts given by ``pytest --case TEXT``. Of every list, only cases run that have one of them in their name; empty: all cases."""


def listed(names: str | Sequence[str], cases: Iterable[Any], ids: Ids = None) -> Callable[..., Any]:
    """Return a decorator that makes one test of all cases; its arguments are those of ``pytest.mark.parametrize``.

    With two decorators, the test runs every pair of cases. Each case gets a random generator, a temporary folder and a log of its own.
    A case cannot have marks: they hold for the whole test.
    """
    parameters = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    several = not isinstance(names, str) or "," in names
    table = list(cases)
    named = [called(case, ids) for case in table] if ids is None or callable(ids) else list(ids)
    assert table, "a list without a case tests nothing"
    marked = [called(case, None) for case in table if isinstance(case, PARAM) and case.marks]
    assert not marked, f"a case of a list cannot have marks, give these a test of their own: {', '.join(marked)}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in parameters]

        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            wrong, skipped, tried = [], [], 0
            for index, (case, name) in enumerate(zip(table, named, strict=True)):
                if any(part in name for part in CHOSEN) or not CHOSEN or hasattr(test, "listed"):
                    tried += 1
                    values = case.values if isinstance(case, PARAM) else case if several else (case,)
                    given = {key: own(key, value, index) for key, value in fixtures.items()}
                    try:
                        test(**given, **dict(zip(parameters, values, strict=True)))
                    except pytest.skip.Exception as error:
                        skipped.append(f"[{name}] {error}")
                    except (Exception, pytest.fail.Exception) as error:
                        wrong.append(f"[{name}] {reason(error, test)}")
            if wrong:
                pytest.fail(f"{len(wrong)} of {tried} cases:\n" + "\n".join(wrong), pytrace=False)
            if skipped:
                pytest.skip(f"{len(skipped)} of {tried} cases:\n" + "\n".join(skipped))

        whole.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        whole.listed = True  # type: ignore[attr-defined]
        return whole

    return decorate


def called(case: Any, ids: Callable[[Any], object] | None) -> str:
    """Return a case's name: its id, or the names that ``ids`` gives its values; without ``ids``, the values themselves."""
    if isinstance(case, PARAM):
        if case.id is not None:
            return str(case.id)
        case = case.values if len(case.values) > 1 else case.values[0]
    if ids is not None:
        return "-".join(str(ids(value)) for value in case) if isinstance(case, tuple) else str(ids(case))
    return "-".join(_short(value) for value in case) if isinstance(case, tuple) else _short(case)


def own(name: str, value: Any, index: int) -> Any:
    """Return a copy of a fixture's value for one case: a generator in its first state, a subfolder, or an empty log."""
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value)
    if name == "tmp_path" and isinstance(value, Path):
        folder = value / str(index)
        folder.mkdir()
        return folder
    if isinstance(value, pytest.LogCaptureFixture):
        value.clear()
    return value


def reason(error: BaseException, test: Callable[..., None]) -> str:
    """Return the error's text, and the last line in the test's own file that led to the error."""
    file = inspect.getsourcefile(inspect.unwrap(test))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    kind = "" if isinstance(error, AssertionError | pytest.fail.Exception) else f"{type(error).__name__}: "
    return f"{kind}{str(error) or type(error).__name__}{where}"


def _short(value: Any) -> str:
    text = value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."


COMMON = ("fedavg", "fixbn", "fedbn", "hbn", "fbn", "fedtan", "gn")
"""Methods that differ most. The others are variants of these. If a test takes long for each method, its cases with the others are slow."""


def common_first(methods: Iterable[str]) -> list[Any]:
    """Return the methods as cases of ``parametrize``. Methods that are not in ``COMMON`` become slow tests."""
    return [name if name in COMMON else slow(name) for name in methods]


def slow(*values: Any) -> Any:
    """Return a case of ``parametrize`` that is marked as slow; ``values`` are its parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that a ``sample`` leaves out as slow, and two of three slow cases of a sampled test as nightly.

    A hash chooses those: in a product, each third case can have the same method.
    """
    seen = Counter[str]()
    for item in items:
        if sample := item.get_closest_marker("sample"):
            test = item.nodeid.partition("[")[0]
            every = sample.args[0] if sample.args and isinstance(sample.args[0], int) else 0
            if (every and seen[test] % every) or (sample.args and not every and not any(part in item.nodeid for part in sample.args)):
                item.add_marker("slow")
            if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % 3:
                item.add_marker("nightly")
            seen[test] += 1
