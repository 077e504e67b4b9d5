"""The digits that work offline: their shape, their split, their domains and their difficulty."""

from __future__ import annotations

import tomllib

import numpy as np
import torch
from sklearn.datasets import load_digits, load_sample_images
from sklearn.model_selection import train_test_split
from torch import Tensor

from tests.data.inner import SPLIT, load
from tests.refusals import wrong_data


def test_the_split_is_scikit_learns() -> None:
    labels = load_digits().target
    train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=20)
    assert tomllib.loads(SPLIT.read_text()) == {"train": train.tolist(), "test": test.tolist()}


def test_half_of_each_split_lies_in_each_photograph() -> None:
    data = load("digits")
    assert data.domains == ("china", "flower")
    assert data.domain_train is not None
    assert data.domain_test is not None
    assert data.domain_train.bincount().tolist() == [719, 718]
    assert data.domain_test.bincount().tolist() == [180, 180]
    assert load("digits-plain").domain_train is None


def test_blend_is_the_difference_to_a_patch_of_the_samples_own_photograph() -> None:
    blended, plain = load("digits"), load("digits-plain")
    assert blended.domain_train is not None
    assert torch.equal(blended.y_train, plain.y_train)  # one split, so samples correspond
    photographs = [
        torch.from_numpy(image.copy()).permute(2, 0, 1).int().unfold(1, 20, 1).unfold(2, 20, 1)  # every patch there is
        for image in load_sample_images().images
    ]

    def matching(photograph: Tensor, blend: Tensor, digit: Tensor) -> Tensor:
        """All patches (places, 3, 20, 20) whose blend with the digit is the same at some of its inkless pixels."""
        rows, columns = (pixels[:: len(pixels) // 15] for pixels in (digit[0] == 0).nonzero(as_tuple=True))
        seen = blend[:, rows, columns][:, None, None]
        places = (photograph[..., rows, columns] == seen).all(-1).all(0)
        return photograph.permute(1, 2, 0, 3, 4)[places]

    for i in range(3):
        blend, digit, domain = blended.x_train[i].int(), plain.x_train[i].int(), int(blended.domain_train[i])
        candidates = matching(photographs[domain], blend, digit)
        assert ((candidates - digit).abs() == blend).flatten(1).all(1).any()
        assert len(matching(photographs[1 - domain], blend, digit)) == 0  # control: the other holds no such patch


def test_a_path_is_refused_rather_than_ignored() -> None:
    for name in ("digits", "digits-plain"):
        with wrong_data(name, "data-path"):
            load(name, "elsewhere")
