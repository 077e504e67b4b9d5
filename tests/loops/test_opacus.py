"""opacus around ``round.model``: which methods have gradients of single samples and train, and which are refused.

The library itself runs. Clipped gradients are compared with those of a plain loop over single samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import convert, local_round, methods, server_state
from fl_bn.methods import METHODS, Method, Phase
from tests.doors.doors import Tensors
from tests.doors.inner import ContractBroken, batch_norms

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # the inputs need no gradient
]
RATE, CLIP = 0.1, 0.5


def net(affine: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4, affine=affine)
        nn.init.normal_(norm.running_mean)
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 8, 8, generator=rng, dtype=torch.float64) * 3 + 1, torch.randint(0, 3, (8,), generator=rng)


def trained(method: Method, model: nn.Module) -> tuple[Tensors, Any]:
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


FREE = [name for name, make in METHODS.items() if not batch_norms(convert(net(), make()))]
CONSTANT: dict[str, Method] = {"fbn": methods.fbn(), "fixbn": methods.fixbn(freeze_after=0), "fedtan2": methods.fedtan2(freeze_after=0)}
"""Methods that normalise with constants: they train where the affine parameters of BatchNorm do not learn."""
MIXING = {name: make() for name, make in METHODS.items() if name not in (*FREE, "fbn")}
"""Methods that normalise with the statistics of the batch, in round 1 of 2."""


@pytest.mark.parametrize("name", FREE)
def test_without_batch_norm_it_trains_along_the_mean_of_clipped_gradients(name: str) -> None:
    method = METHODS[name]()
    found, _ = trained(method, net())
    assert apart(found, by_hand(method, net())) < 1e-9
    assert not apart(found, by_hand(method, net(), together=True)) < 1e-9


@pytest.mark.parametrize("name", CONSTANT)
def test_constants_train_where_their_affine_does_not_learn(name: str, log: pytest.LogCaptureFixture) -> None:
    """It is said that FBN's moments are not protected by the noise."""
    for model in (net(affine=False), still(net())):
        log.clear()
        found, reply = trained(CONSTANT[name], model)
        assert apart(found, by_hand(CONSTANT[name], model)) < 1e-9
        assert ("moments" in reply.sections) == (name == "fbn")
        assert log.text.count("which the noise of opacus does not protect") == (name == "fbn")
    with pytest.raises(NotImplementedError):  # of opacus
        trained(CONSTANT[name], net())


def test_fixbn_that_freezes_its_affine_trains_by_itself() -> None:
    found, _ = trained(methods.fixbn(freeze_after=0, freeze_what="both"), net())
    assert apart(found, by_hand(CONSTANT["fixbn"], still(net()))) < 1e-9


@pytest.mark.parametrize("name", MIXING)
def test_batch_statistics_are_refused(name: str) -> None:
    """By opacus where the affine learns, and by the round where it does not. HBN's mixing logits always learn."""
    with pytest.raises(Exception, match="BatchNorm|buffers"):
        trained(MIXING[name], net())
    if name != "hbn":
        with pytest.raises(ContractBroken) as caught:
            trained(MIXING[name], net(affine=False))
        assert caught.value.rule == "opacus"
