"""A server that tells clients of one secure sum different things, so that one client's vector stands out: it gets noise.

The server is this project's, but for what a liar does otherwise: it does not compare the instructions,
it removes each client's private mask by that client's own instruction, which it knows, and takes the sum whether or not the masks came off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fl_bn.flower.secagg import masks
from fl_bn.flower.secagg.sums import Weighting
from fl_bn.flower.secagg.workflow import SecureSum
from fl_bn.methods import METHODS
from tests.hostile.liars import OURS, Privacy, SecureAggregation, people, secure_client, secure_workflow, to_record, what
from tests.in_process import TWO_STEPS, WatchedGrid, client_app, run
from tests.listed import listed, slow

VICTIM, NODES = 2, (1, 2, 3, 4, 5)
Tell = Callable[[Message], None]
"""Changes an instruction, in place."""


def record(name: str, **fields: Any) -> Tell:
    def tell(message: Message) -> None:
        new = {key.replace("_", "-") if name == "config" else key: value for key, value in fields.items()}
        whole = OURS + name if name in ("config", "header") else name
        message.content[whole] = ConfigRecord({**message.content.config_records[whole], **new})

    return tell


def array(section: str, change: Callable[[np.ndarray], np.ndarray]) -> Tell:
    def tell(message: Message) -> None:
        arrays = {name: one.numpy() for name, one in message.content.array_records[OURS + section].items()}
        first = next(iter(arrays))
        message.content[OURS + section] = to_record({**arrays, first: change(arrays[first])})

    return tell


SET_UP: dict[str, Tell] = {
    "the number of clients": record(RECORD_KEY_CONFIGS, sample_num=6, cohort=[*NODES, 6]),
    "the threshold": record(RECORD_KEY_CONFIGS, threshold=4),
    "the clipping range": record(RECORD_KEY_CONFIGS, clipping_range=1e3),
    "the levels": record(RECORD_KEY_CONFIGS, target_range=2**4),
    "the cohort": record(RECORD_KEY_CONFIGS, sample_num=6, cohort=[*NODES, 7]),
}
HEAVY = 4 * 2**21  # beside which statistics of 4 samples fill one of 2**22 levels, the most that a client accepts
INSTRUCTION: dict[str, Tell] = {
    "the weight of updates": record("config", secagg_update_weight=HEAVY),
    "the weight of statistics": record("config", secagg_statistics_weight=HEAVY),
    "the weight of losses": record("config", secagg_samples_weight=HEAVY),
    "all weights": record("config", secagg_update_weight=HEAVY, secagg_statistics_weight=HEAVY, secagg_samples_weight=HEAVY),
    "no weights": record("config", secagg_update_weight=0, secagg_statistics_weight=0, secagg_samples_weight=0),
    "the learning rate": record("config", learning_rate=0.0),
    "the rate's share": record("config", rate_share=0.5),
    "the run": record("config", run="another/state-00000000"),
    "the resumes": record("config", resumes="00000000:0"),
    "what is durable": record("config", durable=7),
    "a field of no form": record("config", surprise=1),
    "the round": record("header", round=2),
    "the weights": array("weights", lambda a: a + 1e-3),
    "one bit of the weights": array("weights", lambda a: np.nextafter(a, np.float32(9))),
    "the statistics": array("statistics", lambda a: a + 1e-3),
}
PRIVATE: dict[str, Tell] = {
    "the clip": record("config", dp_clip=1e-9),
    "the statistics' clip": record("config", dp_statistics_clip=1e-9),
    "the noise": record("config", dp_noise=1e-9),
    "clips and noise": record("config", dp_clip=1e-9, dp_statistics_clip=1e-9, dp_noise=1e-9),
}
COLLECT = "train collect_masked_vectors"
STAGES = {"train setup": SET_UP, COLLECT: INSTRUCTION}
CASES = {name: (stage, tell) for stage, cases in STAGES.items() for name, tell in cases.items()}


class TwoFaced(WatchedGrid):
    """In ``stage`` the nodes ``told`` get an instruction that ``tell`` changes."""

    def __init__(self, stage: str = "", tell: Tell = lambda message: None, told: tuple[int, ...] = (), run_config: Any = None) -> None:
        clients = people()
        super().__init__(client_app(METHODS["fbn"](), clients, TWO_STEPS), len(clients))
        self.stage, self.tell, self.told = stage, tell, told
        for node in told if run_config else ():
            self._contexts[node].run_config = dict(run_config)

    def _answer(self, message: Message) -> Message:
        if what(message) == self.stage and message.metadata.dst_node_id in self.told:
            self.tell(message)
        return super()._answer(message)


def spying(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What passes inside: each client's plain vector, in client order, and the mean that the server got, masked still or not."""
    seen: dict[str, Any] = {"plain": [], "mean": None}
    honest, masked, unmask, digests = secure_client.to_vector, SecureSum._masked, SecureSum._unmask, dict[bytes, bytes]()

    def plain(parts: Any, shapes: Any) -> np.ndarray:
        seen["plain"].append(honest(parts, shapes))
        return seen["plain"][-1]

    def alike(self: SecureSum, node: int, content: RecordDict) -> Any:
        return replace(masked(self, node, content), digest="00" * 32)

    def keep(self: SecureSum, *of: Any) -> np.ndarray:
        seen["mean"] = unmask(self, *of)
        return seen["mean"]

    def masking(seed: bytes, *of: Any) -> list[np.ndarray]:
        digests[seed] = masks._digest.get()
        return masks.key_stream(seed, *of)

    def unmasking(seed: bytes, *of: Any) -> list[np.ndarray]:
        with masks.bound_to(digests[seed]):
            return masks.key_stream(seed, *of)

    monkeypatch.setattr(masks.client_half, "pseudo_rand_gen", masking)
    monkeypatch.setattr(secure_workflow, "key_stream", unmasking)
    monkeypatch.setattr(secure_client, "to_vector", plain)
    monkeypatch.setattr(SecureSum, "_unmasked", lambda self, whole, clients: True)
    monkeypatch.setattr(SecureSum, "_masked", alike)
    monkeypatch.setattr(SecureSum, "_unmask", keep)
    return seen


def distance(grid: TwoFaced, seen: dict[str, Any], privacy: Privacy | None = None) -> float:
    """Of the sum that the server got to the victim's own vector (L2)."""
    policy = {"max_failed": 1, "client_weights": "samples" if privacy is None else "uniform"}
    run(METHODS["fbn"](), people(), 1, grid=grid, secure=SecureAggregation(privacy=privacy), may_fail=True, policy=policy)
    assert len(seen["plain"]) == 5, "a client refused what it was told"
    return float(np.linalg.norm(len(NODES) * seen["mean"] - seen["plain"][VICTIM - 1]))


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return spying(monkeypatch)


@pytest.fixture(scope="module")
def control() -> float:
    """The distance of a sum whose masks have nothing to do with each other."""
    fresh = iter(range(1, 100))
    with pytest.MonkeyPatch.context() as patched:
        seen = spying(patched)
        patched.setattr(secure_client, "instruction_digest", lambda *told: next(fresh).to_bytes(32, "big"))
        return distance(TwoFaced(), seen)


OTHERS = tuple(node for node in NODES if node != VICTIM)


BOTH_WAYS = pytest.mark.parametrize("told", [(VICTIM,), slow(OTHERS)], ids=["to the victim", "to the others"])


def is_noise(found: float, control: float, vectors: dict[str, Any]) -> bool:
    return 0.8 * control < found < 1.25 * control and found > 100 * np.linalg.norm(vectors["plain"][VICTIM - 1])


@pytest.mark.sample("[the threshold", "[all weights", "[one bit")
@BOTH_WAYS
@pytest.mark.parametrize("case", [*CASES, *PRIVATE, "another run config"])
def test_told_otherwise_the_sum_is_noise(case: str, told: tuple[int, ...], control: float, vectors: dict[str, Any]) -> None:
    if case in PRIVATE:
        found = distance(TwoFaced(COLLECT, PRIVATE[case], told), vectors, Privacy(1.0, 1.0, 0.01))
    elif case in CASES:
        found = distance(TwoFaced(*CASES[case], told), vectors)
    else:
        found = distance(TwoFaced(told=told, run_config={"local-steps": 0}), vectors)
    assert is_noise(found, control, vectors)


@pytest.mark.parametrize("case", ["all weights", "the clipping range"])
def test_control_masks_that_are_bound_to_nothing_show_the_victim(
    case: str, vectors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 2**53, or a range of 1e6, to everyone else: as before the masks were bound, and clients bounded both."""
    monkeypatch.setattr(secure_client, "instruction_digest", lambda *told: bytes(32))
    monkeypatch.setattr(secure_client, "weight_refusals", lambda *told: iter(()))
    stage, tell = CASES[case]
    if case == "all weights":
        tell = record("config", secagg_update_weight=2**53, secagg_statistics_weight=2**53, secagg_samples_weight=2**53)
    distance(TwoFaced(stage, tell, OTHERS), vectors)
    shown, mine = ((v[:-3]) for v in (vectors["mean"] * len(NODES), vectors["plain"][VICTIM - 1]))  # without loss and flags
    assert np.linalg.norm(shown - mine) < 0.02 * np.linalg.norm(mine)


def test_control_told_the_same_the_sum_is_right(vectors: dict[str, Any]) -> None:
    distance(TwoFaced(), vectors)
    assert np.abs(vectors["mean"] - np.mean(vectors["plain"], axis=0)).max() < 1e-4


def test_a_client_that_was_told_something_else_is_left_out_by_name(log: pytest.LogCaptureFixture) -> None:
    """An honest server, and a client with another run config, say: its secrets' shares take its masks out of the sum."""
    grid = WatchedGrid(client_app(METHODS["fbn"](), people(), TWO_STEPS), 5)
    grid._contexts[VICTIM].run_config = {"local-steps": 7}
    ran = run(METHODS["fbn"](), people(), 1, grid=grid, secure=SecureAggregation())
    (record,) = ran.records
    assert record.aggregated
    assert [c.client for c in record.clients if c.refused] == [VICTIM - 1]
    assert "another instruction" in record.clients[VICTIM - 1].refused


@listed("weights", [(6, 8, 6), (0, 0, 6), (2**53, 8, 6), (6, 2**53, 6), (6, 8, 2**53), (5, 8, 6), (6, 7, 6)], ids=str)
def test_a_client_bounds_the_weights_by_itself(weights: tuple[int, int, int]) -> None:
    """The first two fit the plan: its own counts, or no weight at all."""
    fits = weights in ((6, 8, 6), (0, 0, 6))
    sections, plan = ("weights", "moments", "loss"), secure_client.Plan(6, 8, 2)
    assert bool([*secure_client.weight_refusals(Weighting(*weights), sections, plan, 2**22)]) != fits
