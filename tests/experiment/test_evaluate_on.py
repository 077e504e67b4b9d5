"""``evaluate-on``: the test samples, or those that the clients train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fl_bn.run import assembly
from fl_bn.run.assembly import OwnData, client_samples, site_dataset
from fl_bn.run.config import ConfigError, RunConfig

DOMAINS = {"dataset": "digits-plain", "shifts": "none,invert", "partition": "domain", "clients": 2}


def test_a_client_of_a_domain_is_evaluated_on_its_own_training_samples() -> None:
    """Control: by default on its domain's test samples."""
    tested, trained = (RunConfig.from_mapping({**DOMAINS, "evaluate-on": split}) for split in ("test", "training"))
    for client in range(2):
        train, test, _ = client_samples(trained, client)
        assert torch.equal(test.x, train.x)
        assert torch.equal(test.y, train.y)
        before = client_samples(tested, client)
        assert torch.equal(before[0].x, train.x)
        assert not torch.equal(before[1].x, train.x[: len(before[1].x)])
    data = assembly.dataset(trained)
    assert data.domain_test is data.domain_train


def test_so_is_a_site_with_data_of_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 6), ("test", 4)):
        arrays[f"x_{split}"] = rng.integers(0, 255, (n, 20, 20, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(n, dtype=np.int64)
    np.savez(tmp_path / "site.npz", **arrays)
    own = OwnData("npz", str(tmp_path / "site.npz"))
    assert len(site_dataset(RunConfig.from_mapping({"evaluate-on": "training"}), own).x_test) == 6
    assert len(site_dataset(RunConfig(), own).x_test) == 4  # control


def test_another_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="evaluate-on must be one of test, training, but got 'validation'"):
        RunConfig.from_mapping({"evaluate-on": "validation"})
