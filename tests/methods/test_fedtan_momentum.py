"""FedTAN's optimiser after the exchanged step, by a cohort of one, beside plain PyTorch; and BatchNorm's scales before round 1."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, methods
from fl_bn.federation.local import Samples
from fl_bn.flower import run_in_process
from fl_bn.run.assembly import dataset, partitions, source_model
from fl_bn.run.config import ConfigError, RunConfig

MOMENTUM, RATE, STEPS, ROUNDS, BATCH = 0.9, 0.1, 3, 2, 8


def network(classes: int, channels: int, image_size: int) -> nn.Module:
    layers = {
        "flatten": nn.Flatten(),
        "hidden": nn.Linear(channels * image_size**2, 6),
        "norm": nn.BatchNorm1d(6),
        "relu": nn.ReLU(),
        "head": nn.Linear(6, classes),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def config(folder: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "model": f"{__name__}:network",
        "dataset": "digits-plain",
        "method": "fedtan",
        "clients": 1,
        "partition": "iid",
        "rounds": ROUNDS,
        "local-steps": STEPS,
        "batch-size": BATCH,
        "learning-rate": RATE,
        "learning-rate-schedule": "constant",
        "momentum": MOMENTUM,
        "weight-decay": 0.0,
        "output": str(folder),
        "name": "run",
        "pictures": False,
        **{key.replace("_", "-"): value for key, value in overrides.items()},
    }


def by_hand(of: dict[str, Any], restarted: bool) -> dict[str, Tensor]:
    """Momentum SGD whose buffers begin anew every round and, where ``restarted``, after its first step."""
    of = {**of, "name": ""}
    run = RunConfig.from_mapping(of)
    data, (part,) = dataset(run), partitions(run)
    model = copy.deepcopy(source_model(run))
    for round in range(1, ROUNDS + 1):
        order = np.random.default_rng(np.random.SeedSequence([0, 0, round, 0])).permutation(len(part))
        buffers: dict[str, Tensor] = {}
        for step in range(STEPS):
            index = part[torch.from_numpy(order[step * BATCH : (step + 1) * BATCH])]
            loss = F.cross_entropy(model(data.x_train[index].double() / 127.5 - 1), data.y_train[index])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                    buffers[name] = g if name not in buffers else MOMENTUM * buffers[name] + g
                    p.sub_(RATE * buffers[name])
            if restarted and step == 0:
                buffers = {}
    return dict(model.state_dict())


def trained(folder: Path, **overrides: Any) -> dict[str, Tensor]:
    run_in_process(config(folder, **overrides))
    return load_file(folder / "run" / "model.safetensors")


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-10) for name in wanted if "num_batches" not in name)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", ["fedtan", "fedtan2", "fedavg-alg2"])
def test_momentum_restarts_after_the_exchanged_step_or_is_kept(method: str, engine: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"method": method, "engine": engine} | ({"freeze_after": ROUNDS} if method == "fedtan2" else {})
    plain = config(tmp_path)
    restarted = trained(tmp_path / "restarted", fedtan_momentum="restarted", **more)
    kept = trained(tmp_path / "kept", **more)
    assert close(restarted, by_hand(plain, restarted=True))
    assert close(kept, by_hand(plain, restarted=False))
    assert not close(kept, by_hand(plain, restarted=True))  # control


def test_so_do_optimisers_of_ones_own(tmp_path: Path) -> None:
    run = RunConfig.from_mapping({**config(tmp_path), "name": ""})
    data, (part,) = dataset(run), partitions(run)
    own = Samples(data.x_train[part][: STEPS * BATCH].double() / 127.5 - 1, data.y_train[part][: STEPS * BATCH])
    found = []
    for momentum in ("kept", "restarted"):
        batches = [(own.x[i : i + BATCH], own.y[i : i + BATCH]) for i in range(0, STEPS * BATCH, BATCH)]
        net = copy.deepcopy(source_model(run))
        optimizer = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
        federation = Federation(net, methods.fedtan(momentum=momentum), [batches], optimizer=optimizer, progress=False)
        list(federation.run(1))
        found.append(federation.model.state_dict())
    wanted = []
    for restarts in (False, True):
        model = copy.deepcopy(source_model(run))
        plain = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        for step, (x, y) in enumerate(batches):
            plain.zero_grad()
            F.cross_entropy(model(x), y).backward()
            plain.step()
            if restarts and step == 0:
                plain.state.clear()
        wanted.append(dict(model.state_dict()))
    assert [close(dict(state), want) for state in found for want in wanted] == [True, False, False, True]


def test_scales_start_at_one_or_uniform() -> None:
    one, uniform, other = (
        source_model(RunConfig.from_mapping({**config(Path("none")), "name": "", **keys})).state_dict()
        for keys in ({}, {"scale-start": "uniform"}, {"scale-start": "uniform", "seed": 1})
    )
    assert torch.equal(one["norm.weight"], torch.ones(6).double())
    assert all(0 < value < 1 for value in uniform["norm.weight"].tolist())
    assert len(set(uniform["norm.weight"].tolist())) == 6
    assert all(torch.equal(one[name], uniform[name]) for name in one if name != "norm.weight")
    assert not torch.equal(uniform["norm.weight"], other["norm.weight"])
    with pytest.raises(ConfigError, match="scale-start='uniform' would overwrite the scales in model-weights"):
        RunConfig.from_mapping({**config(Path("none")), "scale-start": "uniform", "model-weights": "there.pt"})
