"""A client that claims local steps: what it says of them buys nothing, for its variances or otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_bn.federation.defence import Defence
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import BatchNormStrategy, InProcessGrid
from fl_bn.run.assembly import source_model
from fl_bn.run.config import RunConfig
from fl_bn.secure.settings import SecureAggregation
from tests.doors.doors import apart
from tests.hostile.liars import Spoil
from tests.hostile.own_app import lied
from tests.kept import Kept

MANY = 10**6
ROBUST = Defence(1, "median", "median")


def without_variance(steps: int | None, var: float = 0.0) -> Spoil:
    """Running variances of ``var``, after so many steps as the client says; None: as it took."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == "train":
            arrays = {name: array.numpy() for name, array in content.array_records["fl-bn/statistics"].items()}
            low = {name: np.full_like(array, var) if name.endswith("var") else array for name, array in arrays.items()}
            content["fl-bn/statistics"] = ArrayRecord({name: Array(array) for name, array in low.items()})
            told = content.metric_records["fl-bn/metrics"]
            content["fl-bn/metrics"] = MetricRecord({**told, "steps": told["steps"] if steps is None else steps})

    return spoil


def nothing(message: Message, asked: str, content: RecordDict) -> None:
    """Nobody lies."""


@pytest.mark.parametrize("defence", [Defence(), ROBUST], ids=["undefended", "defended"])
def test_a_variance_of_0_is_the_same_lie_whatever_steps_the_client_claims(defence: Defence) -> None:
    """Before, it was refused after 2 steps, and believed after 10**6."""
    claimed, told = (lied(5, without_variance(steps), "fedavg", 2, defence=defence, fraction_evaluate=0) for steps in (MANY, None))
    assert apart(claimed.trajectory, told.trajectory) == 0
    assert [len(record.accepted) for ran in (claimed, told) for record in ran.records] == [5] * 4


def test_a_robust_rule_keeps_the_shared_variance_among_the_honest() -> None:
    """Control: undefended, the lie shows."""

    def least(defence: Defence, spoil: Spoil) -> float:
        return float(lied(5, spoil, "fedavg", 1, defence=defence, fraction_evaluate=0).trajectory[-1]["1.running_var"].min())

    honest, defended, undefended = least(ROBUST, nothing), least(ROBUST, without_variance(MANY)), least(Defence(), without_variance(MANY))
    assert abs(defended / honest - 1) < 0.05
    assert undefended < 0.85 * honest


class OneClaims(InProcessGrid):
    """Client 1 says that it took ``steps`` local steps; in a secure sum, that it plans them, too."""

    def __init__(self, config: dict[str, Any], steps: int) -> None:
        super().__init__("fl_bn.apps.client:app", config["clients"], config)
        self.steps = steps

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.dst_node_id == 2 and message.metadata.message_type == "train":
            for record in {"fl-bn/metrics", "fl-bn/plan"} & {*reply.content.metric_records}:
                reply.content[record] = MetricRecord({**reply.content.metric_records[record], "steps": self.steps})
            if "fitres.metrics" in reply.content.config_records:
                reply.content.config_records["fitres.metrics"]["steps"] = self.steps
        return reply


def steps_of(claim: int, clients: int = 3, secure: SecureAggregation | None = None) -> RoundRecord:
    """A round of two epochs of the application; each client has 479 samples (of 3), in batches of 64."""
    config = {"clients": clients, "method": "fedavg", "dataset": "digits-plain", "model": "mlp", "output": "", "batch-size": 64}
    config |= {"local-epochs": 2, "local-steps": 0, "partition": "iid", "calibrate": 0}
    checked, records = RunConfig.from_mapping(config), list[RoundRecord]()
    model, method, policy = source_model(checked), checked.build_method(), checked.round_policy()
    strategy = BatchNormStrategy(model, method, policy, callbacks=[Kept(records)], secure=secure)
    strategy.start(OneClaims(config, claim), num_rounds=1, train_config=ConfigRecord())
    return records[0]


def test_with_local_epochs_too_nobody_may_claim_more_steps_than_its_samples_make() -> None:
    honest = steps_of(1).clients[0].steps
    assert honest > 2
    assert steps_of(honest).clients[1].refused == ""
    more = steps_of(honest + 1).clients[1].refused
    assert more == f"metrics/steps: expected at most {honest}, as the server asked for, but got {honest + 1}"
    assert steps_of(MANY).clients[1].refused.startswith("metrics/steps: expected at most ")


def test_in_a_secure_sum_too() -> None:
    """Before, the claim was in the record of the round."""
    honest = steps_of(1, 4, SecureAggregation()).clients[0].steps
    assert honest > 2
    refused = steps_of(MANY, 4, SecureAggregation()).clients[1].refused
    assert refused.startswith("plan/steps: expected at most ")
    assert refused.endswith(f"as the server asked for, but got {MANY}")
