"""The record every data set is checked against, the way from bytes to network input, and one domain set apart."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.data.inner import Dataset, images_to_tensor, only_domain, resize, to_input, without_domain
from tests.listed import listed
from tests.refusals import wrong_data


def small(**changes: object) -> Dataset:
    fields: dict[str, object] = {
        "name": "small",
        "x_train": torch.zeros(4, 3, 8, 8, dtype=torch.uint8),
        "y_train": torch.tensor([0, 1, 2, 1]),
        "x_test": torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
        "y_test": torch.tensor([2, 0]),
        "classes": 3,
    }
    return Dataset(**(fields | changes))  # type: ignore[arg-type]


def test_a_good_record_knows_its_shape() -> None:
    data = small(domain_train=torch.tensor([0, 0, 1, 1]), domain_test=torch.tensor([1, 0]), domains=("a", "b"))
    assert (data.channels, data.image_size, data.domains) == (3, 8, ("a", "b"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.classes = 4  # type: ignore[misc]


@listed(
    ("changes", "part"),
    [
        ({"x_train": torch.zeros(4, 3, 8, 8).double()}, "x_train"),
        ({"x_test": torch.zeros(2, 8, 8, dtype=torch.uint8)}, "x_test"),
        ({"x_test": torch.zeros(0, 3, 8, 8, dtype=torch.uint8), "y_test": torch.zeros(0).long()}, "x_test"),
        ({"x_train": torch.zeros(4, 3, 8, 6, dtype=torch.uint8)}, "x_train"),
        ({"x_test": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}, "x_train and x_test"),
        ({"x_train": torch.zeros(4, 3, 8, 8)}, "x_train and x_test"),
        ({"x_train": torch.tensor([[1.0], [2.0], [torch.nan], [1.0]])}, "x_train"),
        ({"y_train": torch.tensor([0, 1, 2])}, "y_train"),
        ({"y_test": torch.tensor([0, 1], dtype=torch.int32)}, "y_test"),
        ({"y_train": torch.tensor([0, 1, 3, 1])}, "y_train"),
        ({"y_test": torch.tensor([-1, 1])}, "y_test"),
        ({"y_train": torch.tensor([[0.0], [torch.inf], [1.0], [2.0]]), "classes": 1}, "y_train"),
        ({"y_train": torch.tensor([[0, 1], [1, 1], [2, 1], [0, 0]]), "classes": 2}, "y_train"),
        ({"domains": ("a",)}, "domain_train"),
        ({"domain_train": torch.zeros(4).long()}, "domain_train"),
        ({"domain_train": torch.full((4,), 1), "domain_test": torch.zeros(2).long(), "domains": ("a",)}, "domain_train"),
    ],
)
def test_a_wrong_record_is_refused(changes: dict[str, object], part: str) -> None:
    with wrong_data("small", part):
        small(**changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_spans_minus_one_to_one(dtype: torch.dtype) -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x = to_input(images, dtype)
    assert x.dtype == dtype
    assert (x.min().item(), x.max().item()) == (-1, 1)
    torch.testing.assert_close(x.flatten().diff(), torch.full((255,), 2 / 255, dtype=dtype), rtol=0, atol=1e-6)


def stripes(size: int) -> Tensor:
    """Columns alternately black and white."""
    return (torch.arange(size) % 2 * 255).to(torch.uint8).expand(2, 3, size, size)


def test_resize_averages_what_it_drops() -> None:
    inner = resize(stripes(32), 16)[..., 2:-2].float()
    assert (inner - 127.5).abs().max() < 32  # without antialiasing only every other column counts ...
    assert stripes(32)[..., ::2].float().sub(127.5).abs().min() > 127  # ... as this control does, and sees black alone


def test_resize_keeps_flat_images_and_the_native_size() -> None:
    flat = torch.full((3, 1, 7, 7), 200, dtype=torch.uint8)
    assert torch.equal(resize(flat, 20), torch.full((3, 1, 20, 20), 200, dtype=torch.uint8))
    assert resize(flat, 0) is flat
    assert resize(flat, 7) is flat


def test_images_to_tensor_moves_channels_first() -> None:
    colour = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).reshape(2, 4, 4, 3)
    assert torch.equal(images_to_tensor(colour.numpy()), colour.permute(0, 3, 1, 2))
    grey = colour[..., 0]
    assert torch.equal(images_to_tensor(grey.numpy()), grey[:, None])
    assert images_to_tensor(colour.numpy()).is_contiguous()


LETTERS = ("a", "b", "c")


def lettered(train: str = "abcabca", test: str = "ccbbaa") -> Dataset:
    """Every image's pixel is its number; letters are domains."""
    x = torch.arange(len(train) + len(test), dtype=torch.uint8).view(-1, 1, 1, 1)
    y = torch.arange(len(x)) % 2
    places = [torch.tensor([LETTERS.index(letter) for letter in split]) for split in (train, test)]
    n = len(train)
    return Dataset("made-up", x[:n], y[:n], x[n:], y[n:], 2, places[0], places[1], LETTERS)


@pytest.mark.parametrize("name", LETTERS)
def test_the_parts_are_the_whole(name: str) -> None:
    whole = lettered()
    rest, own = without_domain(whole, name), only_domain(whole, name)
    assert rest.domains == tuple(other for other in LETTERS if other != name)
    assert own.domains == ()
    for split in ("train", "test"):
        x, domain = getattr(whole, f"x_{split}").flatten(), getattr(whole, f"domain_{split}")
        numbers, places = getattr(rest, f"x_{split}").flatten(), getattr(rest, f"domain_{split}")
        said = [(int(number), rest.domains[place]) for number, place in zip(numbers, places, strict=True)]
        assert said == [(int(n), LETTERS[d]) for n, d in zip(x, domain, strict=True) if LETTERS[d] != name]
        assert getattr(own, f"x_{split}").flatten().tolist() == [int(n) for n, d in zip(x, domain, strict=True) if LETTERS[d] == name]
        assert torch.equal(getattr(own, f"y_{split}"), getattr(own, f"x_{split}").flatten().long() % 2)
        assert torch.equal(getattr(rest, f"y_{split}"), numbers.long() % 2)


def test_what_is_not_there() -> None:
    for part in (without_domain, only_domain):
        with wrong_data("made-up"):
            part(lettered(), "d")
        with wrong_data("made-up"):
            part(replace(lettered(), domain_train=None, domain_test=None, domains=()), "a")
    with wrong_data("made-up", "x_test"):
        only_domain(lettered(test="aacc"), "b")
    with wrong_data("made-up", "a"):
        without_domain(without_domain(without_domain(lettered(), "b"), "c"), "a")
