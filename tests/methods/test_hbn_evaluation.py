"""What HBN is evaluated with: the union's statistics by L passes, or those that training normalises with. Training knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.federation.recalibration import recalibrate
from fl_bn.layers import HybridBatchNorm
from fl_bn.methods import METHODS, NORMALISERS, StatisticsPass
from fl_bn.methods.hbn import hbn
from fl_bn.moments import Moments, pool
from fl_bn.roles import batch_norms
from tests.federation import union
from tests.in_process import Run, run
from tests.networks import seeded_network
from tests.oracles.hbn import hybrid_report

SIZES, EXACT, WRONG = (6, 7, 5), 1e-10, 1e-3
Clients = Callable[..., list[Samples]]


class Exact(nn.BatchNorm2d):
    """Normalises with the unbiased statistics of the batch that it is given, and keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean, self.running_var = x.mean((0, 2, 3)), x.transpose(0, 1).flatten(1).var(1)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


@torch.no_grad()
def of_the_union(weights: dict[str, np.ndarray], clients: list[Samples]) -> dict[str, Tensor]:
    """Plain PyTorch: the running statistics of all layers for these weights, every layer below normalised by its own union's."""
    model = seeded_network("resnet", dtype=torch.float64).eval()
    model.load_state_dict({k: torch.from_numpy(a) for k, a in weights.items() if "running" not in k}, strict=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Exact
    data = union(clients)
    model(data.batch(np.arange(len(data)), torch.zeros((), dtype=torch.float64))[0])
    return {k: t for k, t in model.state_dict().items() if "running" in k}


def largest(found: dict[str, np.ndarray], want: dict[str, Tensor]) -> float:
    return max(float((torch.from_numpy(found[k]) - t).abs().max()) for k, t in want.items())


def trained(clients: list[Samples], rounds: int = 2, **options: object) -> Run:
    return run(hbn(**options), clients, rounds, model=seeded_network("resnet", dtype=torch.float64))  # type: ignore[arg-type]


def test_exact_is_batch_norm_of_the_union_in_all_five_layers(tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    ran = trained(clients, lam=1.0)
    want = of_the_union(ran.trajectory[2], clients)
    assert len(want) == 10
    assert largest(ran.trajectory[2], want) < EXACT
    # controls: one pass from the statistics that clients trained with, and those statistics themselves
    model = convert(seeded_network("resnet", dtype=torch.float64), hbn())
    weights = {k: torch.from_numpy(a) for k, a in ran.trajectory[2].items() if "running" not in k}
    sent = {k: torch.from_numpy(a.copy()) for k, a in ran.grid.train(2)[0]["statistics"].items()}
    model.load_state_dict(weights | sent, strict=False)
    assert largest({k: t.numpy() for k, t in model.state_dict().items()}, want) > WRONG
    recalibrate(model, clients, passes=1)
    assert largest({k: t.numpy() for k, t in model.state_dict().items()}, want) > WRONG
    assert ran.grid.kinds() == ["query.hello 0", "train 1", "query.statistics 1", "train 2", "query.statistics 2"]
    asked = [m for m in ran.grid.sent if m.metadata.message_type == "query.statistics" and m.metadata.group_id == "2"]
    assert len(asked) == len(clients)  # one message, with an exchange per layer in it


def test_the_model_that_an_exact_run_saves_is_not_moved_by_re_calibration(tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    for lam, moves in ((1.0, False), (0.3, True)):  # control: hybrid statistics are not those of the union
        ran = trained(clients, lam=lam)
        model = convert(seeded_network("resnet", dtype=torch.float64), hbn())
        model.load_state_dict({k: torch.from_numpy(a.copy()) for k, a in ran.trajectory[2].items()}, strict=False)
        made = recalibrate(model, clients)
        assert bool(made[0].settled) is not moves
        assert (made[0].largest.mean > WRONG) is moves


def mixed_network() -> nn.Module:
    """A converted network whose logits and shared statistics are not those of its start."""
    model = convert(seeded_network("resnet", dtype=torch.float64), hbn())
    generator = torch.Generator().manual_seed(3)
    for layer in batch_norms(model).values():
        assert isinstance(layer, HybridBatchNorm)
        layer.mixing_logit.data = torch.randn(layer.num_features, generator=generator, dtype=torch.float64)
        layer.running_mean += torch.randn(layer.num_features, generator=generator, dtype=torch.float64)
        layer.running_var *= 1.7
    return model


@torch.no_grad()
def seen_in_training(model: nn.Module, samples: Samples, order: np.ndarray, pieces: int) -> dict[str, list[np.ndarray]]:
    """Every BatchNorm layer's inputs, batch by batch, where these layers alone are in training mode."""
    seen: dict[str, list[np.ndarray]] = {name: [] for name in batch_norms(model)}

    def look(name: str, _: nn.Module, args: tuple[Tensor]) -> None:
        seen[name].append(args[0].numpy().copy())

    handles = [layer.register_forward_pre_hook(partial(look, name)) for name, layer in batch_norms(model).items()]
    model.eval()
    for layer in batch_norms(model).values():
        layer.train()
    for index in np.array_split(order, pieces):
        model(samples.batch(index, torch.zeros((), dtype=torch.float64))[0])
    for handle in handles:
        handle.remove()
    return seen


def test_the_hybrid_report_is_its_transcription(tiny_clients: Clients) -> None:
    (samples,) = tiny_clients((14,))
    model = mixed_network()
    found = statistics_pass(model, samples, StatisticsPass.for_exchange(NORMALISERS), np.random.default_rng(5), batch_size=4)
    order = np.arange(14)
    np.random.default_rng(5).shuffle(order)
    inputs = seen_in_training(model, samples, order, round(14 / 4))
    raw = statistics_pass(model, samples, StatisticsPass(lower_layers="hybrid"), np.random.default_rng(5), batch_size=4)
    for name, layer in batch_norms(model).items():
        assert isinstance(layer, HybridBatchNorm)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        p = layer.mixing_logit.detach().numpy()
        m, mean, var = hybrid_report(inputs[name], layer.running_mean.numpy(), layer.running_var.numpy(), p)
        assert found[name].count == m
        assert np.abs(found[name].mean.numpy() - mean).max() < EXACT
        assert np.abs(found[name].var.numpy() - var).max() < EXACT
        assert np.abs(raw[name].mean.numpy() - mean).max() > WRONG  # control: moments of the inputs


def test_what_is_evaluated_is_the_clients_reports_pooled(tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    ran = trained(clients, lam=0.3)
    parts: list[dict[str, Moments]] = []
    for i, samples in enumerate(clients):
        model = convert(seeded_network("resnet", dtype=torch.float64), hbn())
        kept = {k: torch.from_numpy(a.numpy().copy()) for k, a in ran.grid.states()[i].array_records["fl-bn/local"].items()}
        sent = [m for m in ran.grid.sent if m.metadata.message_type == "query.statistics" and m.metadata.group_id == "2"][i]
        shared = {k: torch.from_numpy(a.numpy().copy()) for record in sent.content.array_records.values() for k, a in record.items()}
        model.load_state_dict(shared | kept, strict=False)
        generator = np.random.default_rng(np.random.SeedSequence((0, i, 2, 2, 1)))
        parts.append(statistics_pass(model, samples, StatisticsPass.for_exchange(NORMALISERS), generator, batch_size=4))
    for name in running_statistics(model):
        merged = pool([part[name] for part in parts])
        assert np.abs(ran.trajectory[2][f"{name}.running_mean"] - merged.mean.numpy()).max() < EXACT
        assert np.abs(ran.trajectory[2][f"{name}.running_var"] - merged.bessel().numpy()).max() < EXACT
    assert sum(m.metadata.group_id == "2" and m.metadata.message_type == "query.statistics" for m in ran.grid.sent) == len(clients)


def test_a_client_of_one_sample_is_not_asked_for_what_needs_two(tiny_clients: Clients) -> None:
    (alone,) = tiny_clients((1,))
    assert statistics_pass(mixed_network(), alone, StatisticsPass.for_exchange(NORMALISERS), np.random.default_rng(0)) == {}


def test_no_state_of_the_client_changes(tiny_clients: Clients) -> None:
    (samples,) = tiny_clients((9,))
    model = mixed_network().train()
    before, state = {k: t.clone() for k, t in model.state_dict().items()}, torch.get_rng_state()
    statistics_pass(model, samples, StatisticsPass.for_exchange(NORMALISERS), np.random.default_rng(0), batch_size=3)
    assert all(torch.equal(before[k], t) for k, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_auto_is_exact_for_statistics_that_follow_at_once() -> None:
    assert [METHODS["hbn"](lam=lam).refresh.value for lam in (1.0, 0.99, 0.01)] == ["exact", "hybrid", "hybrid"]  # type: ignore[call-arg]
    assert hbn(lam=0.5, evaluate="exact").refresh.value == "exact"
    with pytest.raises(ValueError, match="evaluate must be one of auto, exact, hybrid, but got 'one'"):
        hbn(evaluate="one")
