"""What a round of a loop of one's own starts from: no gradients of an earlier round, and the state of this network and method alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_bn import convert, local_round, methods, server_state
from fl_bn.federation.values import ClientState
from tests.loops.loops import RATE, plain
from tests.loops.test_frozen import clients, net


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fixbn", "hbn", "fbn", "static-bn", "gn"])
def test_gradients_of_an_earlier_round_are_not_those_of_this_one(method: str) -> None:
    """Accumulation leaves some behind, and so does an error. Before, they travelled in the next client's update."""
    chosen, x, y = methods.METHODS[method](), *clients()[0]
    state, found = server_state(net(), chosen, rounds=2), []
    for left in (False, True):
        model = convert(net(), chosen)
        if left:
            F.cross_entropy(model(3 * x + 1), y).backward()
        with local_round(model, chosen, state.instruction()) as round:
            if method == "hbn":
                round.measure([(x, y)])
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            F.cross_entropy(round.model(x), y).backward()
            optimizer.step()
        found.append(round.reply(len(x))[0].sections["weights"])
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.parametrize("of", ["fedbn", "hbn", "silobn", "another network"])
@pytest.mark.parametrize("to", ["fedavg", "fedbn", "fixbn", "hbn", "fbn", "gn"])
def test_the_state_of_another_network_or_method_is_refused(of: str, to: str) -> None:
    """Before, it was loaded without a word, or ended in torch's error. Control: that of the same method is taken."""

    def round_of(method: str, network: Callable[[], nn.Module], kept: ClientState) -> ClientState:
        chosen = methods.METHODS[method]()
        with local_round(convert(network(), chosen), chosen, server_state(network(), chosen, rounds=2).instruction(), kept) as round:
            if method == "hbn":
                round.measure([clients()[0]])
            plain(round, *clients()[0])
        return round.reply(len(clients()[0][0]))[1]

    larger = lambda: nn.Sequential(*net(), nn.Linear(2, 2).double())  # noqa: E731
    kept = round_of("fedbn" if of == "another network" else of, larger if of == "another network" else net, ClientState())
    if of == to:
        round_of(to, net, kept)
        return
    with pytest.raises(ValueError, match=f"kept is the state of a client with another network or method.*converted for {to} is"):
        round_of(to, net, kept)


def test_micro_batches_of_several_sizes_are_counted_with_their_own() -> None:
    (x, y), method = clients()[0], methods.fedavg()
    with local_round(convert(net(), method), method, server_state(net(), method, rounds=2).instruction()) as round:
        for part, labels in zip(x.split([5, 2, 9]), y.split([5, 2, 9]), strict=True):
            F.cross_entropy(round.model(part), labels).backward()
        torch.optim.SGD(round.model.parameters(), RATE).step()
    assert round.batch == 16
