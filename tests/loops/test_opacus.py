"""opacus around ``round.model``: which methods have gradients of single samples and train, and which are refused.

The library itself runs. Clipped gradients are compared with those of a plain loop over single samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import convert, local_round, methods, server_state
from fl_bn.methods import Method, Phase
from tests.doors.doors import Tensors
from tests.doors.inner import ContractBroken, batch_norms
from tests.loops.loops import opened, step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # the inputs need no gradient
]
RATE, CLIP = 0.1, 0.5
FREE = ["gn", "ln", "in", "gn-ws", "fixup", "fedfn", "fedwon"]
"""Methods without statistics: they train with any BatchNorm layer."""
CONSTANT: dict[str, Method] = {
    "fbn": methods.fbn(),
    "fixbn": methods.fixbn(freeze_after=0),
    "fedtan2": methods.fedtan2(freeze_after=0),
    "fixbn, both": methods.fixbn(freeze_after=0, freeze_what="both"),
}
"""Methods that normalise with constants: they train where the affine parameters of BatchNorm do not learn."""
MIXING: dict[str, Method] = {
    name: methods.METHODS[name]() for name in ("fedavg", "fedbn", "silobn", "single", "static-bn", "fedtan", "fedavg-alg2")
} | {"fixbn": methods.fixbn(freeze_after=1), "fedtan2": methods.fedtan2(freeze_after=1)}
"""Methods that normalise with the statistics of the batch; HBN does, too."""


def net(affine: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4, affine=affine)
        nn.init.normal_(norm.running_mean)
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 8, 8, generator=rng, dtype=torch.float64) * 3 + 1, torch.randint(0, 3, (8,), generator=rng)


def trained(method: Method, model: nn.Module, mode: str = "hooks") -> tuple[Tensors, Any]:
    """The weights after a step that opacus clips to norm ``CLIP`` and adds no noise to, and the client's reply."""
    from opacus import PrivacyEngine

    x, y = batch()
    asked = server_state(model, method, rounds=2).instruction()
    connect = nobody if asked.phase is Phase.EXCHANGE else None
    with local_round(convert(model, method), method, asked, connect=connect) as round:
        engine, loader = PrivacyEngine(accountant="rdp"), DataLoader(TensorDataset(x, y), batch_size=8)
        private, optimizer, loader = engine.make_private(
            module=round.model,
            optimizer=torch.optim.SGD(round.model.parameters(), lr=RATE),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(private(inputs), targets)
            loss.backward()
            optimizer.step()
        private.cleanup()
    assert round.steps == 1
    reply, _ = round.reply(8)
    return dict(reply.sections["weights"]), reply


def nobody(samples: int) -> Any:
    """Join a cohort that is never reached."""
    raise AssertionError("the layers have joined the cohort")


def by_hand(method: Method, model: nn.Module, together: bool = False) -> Tensors:
    """The same by a loop over single samples; ``together``: the batch's gradient is clipped, and no sample's (control)."""
    own, (x, y) = convert(model, method).train(), batch()
    for layer in batch_norms(own).values():
        layer.eval()
    parts = [(x, y)] if together else [*zip(x.split(1), y.split(1), strict=True)]
    step = {n: torch.zeros_like(p) for n, p in own.named_parameters()}
    for inputs, targets in parts:
        own.zero_grad()
        F.cross_entropy(own(inputs), targets).backward()
        gradients = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        for n, gradient in gradients.items():
            step[n] += gradient * min(1.0, CLIP / (norm + 1e-6)) / len(parts)
    return {n: p.detach() - RATE * step[n] for n, p in own.named_parameters()}


def apart(found: Tensors, want: Tensors) -> float:
    return max(float((found[name] - want[name]).abs().max()) for name in found if name in want)


def still(model: nn.Module) -> nn.Module:
    """With BatchNorm layers whose affine parameters do not learn."""
    for layer in batch_norms(model).values():
        layer.requires_grad_(False)
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "as it is": net,
    "affine=False": lambda: net(affine=False),
    "requires_grad_(False)": lambda: still(net()),
}
TRAINS = [(name, "as it is", "hooks") for name in FREE] + [("gn", "as it is", "functorch")]
TRAINS += [(name, build, "hooks") for name in CONSTANT for build in [*BUILDS][1:]]


@pytest.mark.parametrize(("name", "build", "mode"), TRAINS)
def test_it_trains_along_the_mean_of_clipped_gradients(name: str, build: str, mode: str) -> None:
    """Of any network without statistics, and with constants where the affine does not learn."""
    from opacus.validators import ModuleValidator

    method, model = CONSTANT.get(name) or methods.METHODS[name](), BUILDS[build]()
    assert name in CONSTANT or ModuleValidator.is_valid(convert(model, method).train())
    found, reply = trained(method, model, mode=mode)
    assert apart(found, by_hand(method, model)) < 1e-9
    assert not apart(found, by_hand(method, model, together=True)) < 1e-9
    assert ("moments" in reply.sections) == (name == "fbn")


@pytest.mark.parametrize("name", CONSTANT)
def test_opacus_refuses_constants_whose_affine_learns(name: str) -> None:
    if "both" in name:  # freezes the affine, too
        found, _ = trained(CONSTANT[name], net())
        assert apart(found, by_hand(CONSTANT["fixbn"], still(net()))) < 1e-9
        return
    with pytest.raises(NotImplementedError):
        trained(CONSTANT[name], net())


def refused(method: Method, model: nn.Module) -> str:
    """Return the rule of the contract by which a round with opacus is refused."""
    with pytest.raises(ContractBroken) as caught:
        trained(method, model)
    return caught.value.rule


@pytest.mark.parametrize("name", [*MIXING, "hbn"])
def test_batch_statistics_are_refused(name: str) -> None:
    """By opacus where the affine learns, and by the round where it does not. HBN's mixing logits always learn."""
    with pytest.raises(Exception, match="BatchNorm|buffers"):
        trained(MIXING.get(name, methods.hbn()), net())
    assert name == "hbn" or refused(MIXING[name], net(affine=False)) == "opacus"


@pytest.mark.parametrize("name", ["fedavg", "static-bn"])
def test_the_round_refuses_what_opacus_lets_through(name: str) -> None:
    """Control: outside a round the same network trains, and a sample's gradient depends on the others of its batch."""
    from opacus import GradSampleModule

    model, (x, y) = convert(net(affine=False), MIXING[name]).train(), batch()
    found = []
    for others in (slice(0, 8), slice(0, 4)):
        private = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
        F.cross_entropy(private(x[others]), y[others], reduction="sum").backward()
        found.append(next(private.parameters()).grad_sample[0])
    assert not torch.allclose(*found)


def test_parts_that_are_called_one_by_one_are_refused_too() -> None:
    from opacus import GradSampleModule

    def train(round: Any) -> None:
        GradSampleModule(round.model)
        step(lambda x: reduce(lambda out, part: part(out), round.model, x), round.model, *batch())

    with pytest.raises(ContractBroken) as caught, opened(methods.fedavg(), network=lambda: net(affine=False)) as round:
        train(round)
    assert (caught.value.rule, caught.value.name) == ("opacus", "1")


def test_what_the_noise_does_not_protect_is_said(log: pytest.LogCaptureFixture) -> None:
    trained(methods.gn(), net())
    trained(CONSTANT["fixbn"], net(affine=False))
    assert "opacus" not in log.text  # control
    trained(methods.fbn(), net(affine=False))
    assert log.text.count("which the noise of opacus does not protect") == 1
