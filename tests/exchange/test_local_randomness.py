"""Clients that take turns draw the random numbers that they draw alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fl_bn.exchange.call import Key, Quantity
from fl_bn.exchange.local import LocalExchange, Turns
from fl_bn.federation.local import torch_seed
from tests.exchange.in_turns import CPU, Round, Task

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def draws(exchange: Callable[[int], None], exchanges: int, numbers: list[Tensor]) -> None:
    """Uniform numbers and dropout masks, around ``exchanges`` exchanges."""
    for call in range(exchanges):
        numbers += [torch.rand(3), torch.nn.functional.dropout(torch.ones(16))]
        exchange(call)
    numbers.append(torch.randn(3))


def random_round(clients: int, exchanges: int, *, seeded: bool = True) -> dict[int, list[Tensor]]:
    """What each client draws in its turns."""
    round = Round(clients)
    numbers: dict[int, list[Tensor]] = {client: [] for client in range(clients)}

    def task(client: int) -> Task:
        def run() -> list[float]:
            channel = LocalExchange(round.tokens[client], 1)

            def exchange(call: int) -> None:
                channel(Key("bn", Quantity.MEAN, call), torch.ones(2, dtype=torch.float64), 1)

            if seeded:
                with torch_seed(100 + client, CPU):
                    draws(exchange, exchanges, numbers[client])
            else:
                draws(exchange, exchanges, numbers[client])
            channel.close()
            return []

        return run

    assert round.run([task(client) for client in range(clients)]) == [[]] * clients
    return numbers


def alone(client: int, exchanges: int) -> list[Tensor]:
    """What it draws when nobody else is there."""
    numbers: list[Tensor] = []
    with torch_seed(100 + client, CPU):
        draws(lambda call: None, exchanges, numbers)
    return numbers


@pytest.mark.parametrize("exchanges", [0, 1, 2, 5])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_each_client_draws_what_it_draws_on_its_own(clients: int, exchanges: int) -> None:
    for client, numbers in random_round(clients, exchanges).items():
        assert all(torch.equal(a, b) for a, b in zip(numbers, alone(client, exchanges), strict=True))
        assert not torch.equal(numbers[-1], alone(client + 1, exchanges)[-1])  # control: another seed


def test_without_handing_the_generator_on_clients_would_draw_each_others_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    with torch.random.fork_rng(devices=[]):
        numbers = random_round(2, 2)
    assert not all(torch.equal(a, b) for client in range(2) for a, b in zip(numbers[client], alone(client, 2), strict=True))


@pytest.mark.parametrize("exchanges", [0, 1, 2, 3])
@pytest.mark.parametrize("clients", [1, 2, 3, 4])
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
def test_after_a_round_torchs_generator_is_as_it_was(clients: int, exchanges: int, seeded: bool) -> None:
    before = torch.get_rng_state()
    random_round(clients, exchanges, seeded=seeded)
    assert torch.equal(torch.get_rng_state(), before)


def test_drawing_outside_of_turns_moves_torchs_generator() -> None:
    """The control of the test above."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        draws(lambda call: None, 1, [])
        assert not torch.equal(torch.get_rng_state(), before)


def test_every_task_starts_with_torchs_generator_as_it_was() -> None:
    """Unseeded, all draw the same. Control: one after the other without turns, they do not."""
    tasks = [lambda: torch.rand(3).tolist() for _ in range(3)]
    with torch.random.fork_rng(devices=[]):
        first, *others = Turns(3).run(tasks)
        assert others == [first, first]
        assert tasks[0]() == first
        assert tasks[1]() != first
