"""opacus around ``round.model``: which methods have gradients of single samples and train, and which are refused.

The library itself runs. Clipped gradients are compared with those of a plain loop over single samples.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import convert, local_round, methods, server_state
from fl_bn.methods import Method
from fl_bn.objectives import PLAIN, FedProx, Objective
from tests.loops.loops import batch_norms

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


def trained(method: Method, model: nn.Module, objective: Objective = PLAIN, mode: str = "hooks") -> tuple[dict[str, Tensor], Any]:
    """The weights after a step that opacus clips to norm ``CLIP`` and adds no noise to, and the client's reply."""
    from opacus import PrivacyEngine

    x, y = batch()
    asked = server_state(model, method, rounds=2, objective=objective).instruction()
    with local_round(convert(model, method), method, asked, objective=objective, connect=_nobody(method)) as round:
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
            if objective is PLAIN:
                loss.backward()
            else:
                round.backward(lambda inputs=inputs, targets=targets: F.cross_entropy(private(inputs), targets), inputs)
            optimizer.step()
        private.cleanup()
    assert round.steps == 1
    reply, _ = round.reply(8)
    return dict(reply.sections["weights"]), reply


def _nobody(method: Method) -> Any:
    """A cohort that is never reached."""

    def connect(samples: int) -> Any:
        raise AssertionError("the layers have joined the cohort")

    return connect if method.phase(1, 2).value == "exchange" else None


def by_hand(method: Method, model: nn.Module, together: bool = False) -> dict[str, Tensor]:
    """The same by a loop over single samples; ``together``: the batch's gradient is clipped, and no sample's (control)."""
    own, (x, y) = convert(model, method).train(), batch()
    for layer in batch_norms(own).values():
        layer.eval()
    if together:
        F.cross_entropy(own(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in own.parameters() if p.grad is not None]).norm()
        step = {n: p.grad * min(1.0, CLIP / float(norm)) for n, p in own.named_parameters() if p.grad is not None}
    else:
        step = {n: torch.zeros_like(p) for n, p in own.named_parameters() if p.requires_grad}
        for one in range(len(y)):
            own.zero_grad()
            F.cross_entropy(own(x[one : one + 1]), y[one : one + 1]).backward()
            norm = torch.stack([p.grad.norm() for p in own.parameters() if p.grad is not None]).norm()
            for n, p in own.named_parameters():
                if p.grad is not None:
                    step[n] += p.grad * min(1.0, CLIP / (float(norm) + 1e-6)) / len(y)
    return {n: p.detach() - RATE * step.get(n, torch.zeros_like(p)) for n, p in own.named_parameters()}


def apart(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((found[name] - want[name]).abs().max()) for name in found if name in want)


def still(model: nn.Module) -> nn.Module:
    """With BatchNorm layers whose affine parameters do not learn."""
    for layer in batch_norms(model).values():
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", FREE)
def test_a_method_without_statistics_trains(name: str) -> None:
    from opacus.validators import ModuleValidator

    method, model = methods.METHODS[name](), net()
    assert ModuleValidator.is_valid(convert(model, method).train())
    for mode in ("hooks", "functorch")[: 2 if name == "gn" else 1]:
        found, _ = trained(method, model, mode=mode)
        assert apart(found, by_hand(method, model)) < 1e-9
    assert not apart(found, by_hand(method, model, together=True)) < 1e-9


@pytest.mark.parametrize("build", [lambda: net(affine=False), lambda: still(net())], ids=["affine=False", "requires_grad_(False)"])
@pytest.mark.parametrize("name", CONSTANT)
def test_a_method_with_constants_trains_where_the_affine_does_not_learn(name: str, build: Any) -> None:
    found, reply = trained(CONSTANT[name], build())
    assert apart(found, by_hand(CONSTANT[name], build())) < 1e-9
    assert not apart(found, by_hand(CONSTANT[name], build(), together=True)) < 1e-9
    if name != "fbn":
        assert "moments" not in reply.sections


@pytest.mark.parametrize("name", CONSTANT)
def test_opacus_refuses_constants_whose_affine_learns(name: str) -> None:
    if "both" in name:  # freezes the affine, too
        found, _ = trained(CONSTANT[name], net())
        assert apart(found, by_hand(CONSTANT["fixbn"], still(net()))) < 1e-9
        return
    with pytest.raises(NotImplementedError, match="BatchNorm"):
        trained(CONSTANT[name], net())


@pytest.mark.parametrize("name", [*MIXING, "hbn"])
def test_batch_statistics_are_refused(name: str) -> None:
    """By opacus where the affine learns, and by the round where it does not."""
    method = MIXING.get(name, methods.hbn())
    with pytest.raises(Exception, match="BatchNorm|buffers"):
        trained(method, net())
    if name == "hbn":  # the mixing logits always learn
        return
    with pytest.raises(ValueError, match="layer '1'"):
        trained(method, net(affine=False))


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

    method, (x, y) = methods.fedavg(), batch()
    model, asked = convert(net(affine=False), method), server_state(net(affine=False), method, rounds=2).instruction()

    def train() -> None:
        with local_round(model, method, asked):
            GradSampleModule(model)
            out = x
            for part in model:
                out = part(out)
            F.cross_entropy(out, y).backward()
            torch.optim.SGD(model.parameters(), RATE).step()

    with pytest.raises(ValueError, match="layer '1'"):
        train()


def test_an_objective_is_refused() -> None:
    """opacus would step along its own gradients, without FedProx's part: it refuses the step itself."""
    with pytest.raises(ValueError, match="(?i)per sample gradient"):
        trained(methods.gn(), net(), FedProx(0.1))


def test_what_the_noise_does_not_protect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flwr"):
        trained(methods.gn(), net())
        trained(CONSTANT["fixbn"], net(affine=False))
        assert not caplog.records  # control
        trained(methods.fbn(), net(affine=False))
    (record,) = caplog.records
    assert "fbn sends the moments of a training batch, which the noise of opacus does not protect" in record.getMessage()
