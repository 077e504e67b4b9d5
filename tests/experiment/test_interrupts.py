"""Ctrl-C between two writes of one round waits for the second."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from fl_bn.run.interrupts import held


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_until_the_block_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("written")
    assert done == ["written"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    done.clear()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("written")
    assert done == []


def test_an_error_in_the_block_is_kept_beside_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, held():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise OSError("disk full")
    assert isinstance(caught.value.__context__, OSError)


def test_without_an_interrupt_nothing_happens_in_any_thread() -> None:
    reached: list[str] = []

    def there() -> None:
        with held():
            reached.append("thread")

    with held():
        reached.append("main")
    other = threading.Thread(target=there)
    other.start()
    other.join()
    assert reached == ["main", "thread"]
