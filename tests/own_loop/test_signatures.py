"""Server and client with different networks: the message names the first tensor that differs, or says how to find it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_bn import convert, local_round, methods, server_state
from fl_bn.federation import schema
from fl_bn.federation.payload import signature, to_numpy
from fl_bn.flower.wire.codec import Header, check_header
from fl_bn.methods import METHODS
from fl_bn.support.wire import WireError

FEDAVG = methods.fedavg()


def net(inputs: int = 4, hidden: int = 8, ids: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2)).to(dtype)
    if ids:
        model.register_buffer("ids", torch.arange(ids))
    return model


OTHERS = {
    "shape": (net(inputs=5), r"0\.weight is \(8, 5\) float32 here, and \(8, 4\) float32 there"),
    "dtype": (net(dtype=torch.float64), r"0\.weight is \(8, 4\) float64 here, and \(8, 4\) float32 there"),
    "missing": (net()[:2], r"2\.weight is nothing here, and \(2, 8\) float32 there"),
    "extra": (nn.Sequential(*net(), nn.Linear(2, 2)), r"3\.weight is \(2, 2\) float32 here, and nothing there"),
    "at home": (net(ids=3), "all tensors in messages .*, the method, or an option of the method differs. .*fl-bn layers"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_in_one_process(other: str) -> None:
    model, reason = OTHERS[other]
    asked = server_state(net(), FEDAVG, rounds=1).instruction()
    said = rf"the server's model has signature \w+, but this client's has \w+: {reason}"
    with pytest.raises(ValueError, match=said), local_round(convert(model, FEDAVG), FEDAVG, asked):
        pass
    with local_round(convert(net(), FEDAVG), FEDAVG, asked):  # control
        pass


@pytest.mark.parametrize("other", OTHERS)
def test_a_message_of_flower_s(other: str) -> None:
    model, reason = OTHERS[other]
    payload = {section: to_numpy(tensors) for section, tensors in server_state(net(), FEDAVG, rounds=1).instruction().sections.items()}
    came = Header("fedavg", "train", 1, signature(convert(net(), FEDAVG), FEDAVG))

    def check(mine: nn.Module, method: str = "fedavg") -> None:
        how = METHODS[method]()
        converted = convert(mine, how)
        check_header(Header(method, "train", 1, signature(converted, how)), came, schema.instruction(converted, how), payload)

    with pytest.raises(WireError, match=rf"^header/signature: expected '\w+', but got '\w+': {reason}"):
        check(model)
    with pytest.raises(WireError, match="^header/method: expected 'fbn', but got 'fedavg'"):  # which says all
        check(net(), "fbn")
    check(net())  # control
