"""An error is reported as what it is: a user's exception, values that are not finite, or a rate that is too high. In every door."""

from __future__ import annotations

import pytest
from flwr.app import Context, Message

from fl_bn.flower import FedAvgBN, RunFailed
from tests.flower.own_apps import net, own_app, ran, refused
from tests.listed import listed

RATE = "lower the learning rate"


def the_user_s(message: Message, context: Context) -> None:
    raise KeyError("my loss: 3 values are not finite")


@listed("rounds", [1, 5])
def test_a_user_s_exception_is_told_with_its_client_class_and_message(rounds: int, log: pytest.LogCaptureFixture) -> None:
    app = own_app("fedavg", before=the_user_s)
    refused(lambda: ran(FedAvgBN(net(), fraction_evaluate=0), app, rounds), RunFailed, "client 0", "KeyError", "my loss")
    assert RATE not in log.text  # these are the user's words
