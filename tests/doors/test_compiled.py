"""Networks in wrappers, given to ``Federation``: ``torch.compile`` and DataParallel change no number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from fl_bn import Federation, methods


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()


def batch(seed: int, samples: int = 16) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=made, dtype=torch.float64) * 3 + 5, torch.randint(0, 2, (samples,), generator=made)


def compiled(network: nn.Module) -> nn.Module:
    return torch.compile(network, backend="eager")  # type: ignore[return-value]


def part_compiled(network: nn.Sequential) -> nn.Module:
    return nn.Sequential(compiled(network[:2]), network[2:])  # the names differ from those of the plain network


def warm(network: nn.Sequential) -> nn.Module:
    """Before, a statistics pass in such a network saw nothing, since dynamo does not look at hooks of layers that it has compiled."""
    made = compiled(network).eval()
    made(batch(1)[0])
    return made.train()


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "compiled": compiled, "a compiled part": part_compiled, "compiled and run": warm, "DataParallel": DataParallel
}  # fmt: skip


def trained(network: nn.Module, method: str) -> tuple[list[float], list[Tensor]]:
    chosen = methods.fixbn(freeze_after=0) if method == "fixbn" else methods.METHODS[method]()
    fed = Federation(network, chosen, [[batch(1), batch(4)], [batch(2)]], progress=False)
    return [record.loss for record in fed.run(3)], [*fed.model.state_dict().values()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("method", ["fixbn", "fbn", "hbn"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_changes_no_number(wrapper: str, method: str) -> None:
    """Before, a network in a wrapper was not brought to unit scale, and the warning called the network untraceable."""
    losses, tensors = trained(net(), method)
    found = trained(WRAPPERS[wrapper](net()), method)
    assert found[0] == pytest.approx(losses, rel=1e-12)  # HBN's compiled layers sum in another order
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in zip(found[1], tensors, strict=True))


def test_control_unit_scale_counts_here() -> None:
    plain = Federation(net(), methods.fbn(), [[batch(1), batch(4)], [batch(2)]], unit_scale=False, progress=False)
    assert [record.loss for record in plain.run(3)] != trained(net(), "fbn")[0]
