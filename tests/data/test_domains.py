"""One domain set apart: the two parts are the whole, and the others' places close up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_bn.data.dataset import Dataset
from fl_bn.data.domains import only_domain, without_domain

NAMES = ("a", "b", "c")


def data(train: str = "abcabca", test: str = "ccbbaa") -> Dataset:
    """Every image's pixel is its number; letters are domains."""
    x = torch.arange(len(train) + len(test), dtype=torch.uint8).view(-1, 1, 1, 1)
    y = torch.arange(len(x)) % 2
    places = [torch.tensor([NAMES.index(letter) for letter in split]) for split in (train, test)]
    n = len(train)
    return Dataset("made-up", x[:n], y[:n], x[n:], y[n:], 2, places[0], places[1], NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_the_whole(name: str) -> None:
    whole = data()
    rest, own = without_domain(whole, name), only_domain(whole, name)
    assert rest.domains == tuple(other for other in NAMES if other != name)
    assert own.domains == ()
    for split in ("train", "test"):
        x, domain = getattr(whole, f"x_{split}").flatten(), getattr(whole, f"domain_{split}")
        numbers, places = getattr(rest, f"x_{split}").flatten(), getattr(rest, f"domain_{split}")
        said = [(int(number), rest.domains[place]) for number, place in zip(numbers, places, strict=True)]
        assert said == [(int(n), NAMES[d]) for n, d in zip(x, domain, strict=True) if NAMES[d] != name]
        assert getattr(own, f"x_{split}").flatten().tolist() == [int(n) for n, d in zip(x, domain, strict=True) if NAMES[d] == name]
        assert torch.equal(getattr(own, f"y_{split}"), getattr(own, f"x_{split}").flatten().long() % 2)
        assert torch.equal(getattr(rest, f"y_{split}"), numbers.long() % 2)


def test_what_is_not_there() -> None:
    for part in (without_domain, only_domain):
        with pytest.raises(ValueError, match="dataset 'made-up' has no domain 'd'; it has: a, b, c"):
            part(data(), "d")
        with pytest.raises(ValueError, match="has no domains, so there is no domain 'a': give several npz or CSV files"):
            part(replace(data(), domain_train=None, domain_test=None, domains=()), "a")
    with pytest.raises(ValueError, match="domain b has no test samples"):
        only_domain(data(test="aacc"), "b")
    with pytest.raises(ValueError, match="a is its only domain"):
        without_domain(without_domain(without_domain(data(), "b"), "c"), "a")
