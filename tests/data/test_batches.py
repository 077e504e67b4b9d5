"""Batches: every sample once per pass, and never a batch of one."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.inner import ClientTooSmall, distinct, draw_batches, epoch_batches
from tests.refusals import naming

laws = settings(deadline=None, derandomize=True)
counts = st.integers(2, 200)
batch_sizes = st.integers(2, 70)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@laws
@given(n=counts, batch_size=batch_sizes)
def test_a_pass_covers_every_sample_once_in_batches_of_two_or_more(n: int, batch_size: int) -> None:
    batches = epoch_batches(n, batch_size, rng())
    assert sorted(np.concatenate(batches)) == list(range(n))
    sizes = [len(batch) for batch in batches]
    assert min(sizes) >= 2
    assert all(size == batch_size for size in sizes[:-1])
    assert sizes[-1] <= batch_size + 1
    if n < batch_size:
        assert sizes == [n]


@laws
@given(n=counts, batch_size=batch_sizes, epochs=st.integers(1, 4))
def test_epochs_are_passes_each_shuffled_afresh(n: int, batch_size: int, epochs: int) -> None:
    drawn = np.concatenate(list(draw_batches(n, batch_size, rng(), epochs=epochs)))
    passes = drawn.reshape(epochs, n)
    assert all(sorted(samples) == list(range(n)) for samples in passes)
    if n >= 20:
        assert all((passes[0] != samples).any() for samples in passes[1:])


@laws
@given(n=counts, batch_size=batch_sizes, steps=st.integers(1, 30))
def test_steps_run_on_over_passes(n: int, batch_size: int, steps: int) -> None:
    drawn = list(draw_batches(n, batch_size, rng(), steps=steps))
    assert len(drawn) == steps
    passes = draw_batches(n, batch_size, rng(), epochs=steps)  # a pass is at least one step
    assert all((a == b).all() for a, b in zip(drawn, islice(passes, steps), strict=True))


@pytest.mark.parametrize("n", [0, 1])
def test_a_client_without_variance_is_refused_at_the_call(n: int) -> None:
    with naming(str(n), ClientTooSmall):
        draw_batches(n, 8, rng(), epochs=1)
    with pytest.raises(ClientTooSmall):
        epoch_batches(n, 8, rng())


def test_wrong_arguments_are_refused_at_the_call() -> None:
    with naming("batch_size"):
        epoch_batches(10, 1, rng())
    for epochs, steps in ((0, 0), (1, 1), (-1, 2), (2, -1), (-1, 0)):
        with naming(f"steps={steps}"):
            draw_batches(10, 4, rng(), epochs=epochs, steps=steps)
    with naming("drop-last", ClientTooSmall):
        draw_batches(3, 4, rng(), epochs=1, drop_last=True)
    assert len(list(draw_batches(3, 4, rng(), epochs=1))) == 1  # control: a smaller batch is not left out


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (9, 4), (8, 4), (4, 4)])
def test_a_smaller_last_batch_is_left_out_where_asked(n: int, batch_size: int) -> None:
    drawn = list(draw_batches(n, batch_size, rng(), epochs=2, drop_last=True))
    assert [len(batch) for batch in drawn] == [batch_size] * (2 * (n // batch_size))
    first = {int(i) for batch in drawn[: n // batch_size] for i in batch}
    assert distinct(n, batch_size, epochs=1, drop_last=True) == len(first)
    kept = list(draw_batches(n, batch_size, rng(), epochs=1))
    assert sum(map(len, kept)) == distinct(n, batch_size, epochs=1) == n  # control: as it is by default


@pytest.mark.parametrize(("epochs", "steps"), [(1, 0), (3, 0), (0, 1), (0, 2), (0, 5), (0, 40)])
def test_the_number_of_distinct_samples_is_that_of_those_drawn(epochs: int, steps: int) -> None:
    for n in range(2, 40):
        for batch in (2, 3, 16, 64):
            drawn = draw_batches(n, batch, rng(), epochs=epochs, steps=steps)
            assert distinct(n, batch, epochs=epochs, steps=steps) == len(np.unique(np.concatenate(list(drawn)))), (n, batch)
    assert distinct(1, 4, epochs=epochs, steps=steps) == 0
