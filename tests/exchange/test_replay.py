"""Replay: answers from a transcript in order, the first unanswered request carried out, and both in Flower's messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.flower.layerwise.transcript import ReplayExchange, Unanswered, attach, detach, question, read_request
from fl_bn.flower.wire.codec import Header, payload_of, to_records
from tests.exchange.cohorts import Answer, ExchangeFailed, Key, Local, Quantity, to_numpy

HEADER = Header("fedtan", "exchange", 3, "0123")
KEYS = [Key("stem.bn", Quantity.MOMENTS), Key("", Quantity.MEAN, 1), Key("a/b.c", Quantity.GRADIENTS, 2)]


def same(a: Answer, b: Answer) -> bool:
    """Same numbers, dtype and bits."""
    alike = (a.count, a.batch, a.values.dtype) == (b.count, b.batch, b.values.dtype)
    return alike and a.values.numpy().tobytes() == b.values.numpy().tobytes()


def test_an_answer_to_something_else_is_refused() -> None:
    own = torch.zeros(2, dtype=torch.float64)
    good = Answer(torch.ones(2, dtype=torch.float64), 1, 1)
    others = [KEYS[1], KEYS[0]._replace(quantity=Quantity.STATISTICS), KEYS[0]._replace(call=1)]
    misfits = [(KEYS[0], Answer(torch.zeros(3, dtype=torch.float64), 1, 1)), (KEYS[0], Answer(own, 0, 1))]
    for key, answer in (*((other, good) for other in others), *misfits):
        with pytest.raises(ExchangeFailed):
            ReplayExchange([(key, answer)], 4)(KEYS[0], own, 1)
    assert ReplayExchange([(KEYS[0], good)], 4)(KEYS[0], own, 1) is good  # control


# the transcript in Flower's messages

VALUES = st.builds(
    lambda values, dtype: torch.tensor(values, dtype=dtype),
    st.lists(st.floats(width=32), max_size=4),
    st.sampled_from([torch.float32, torch.float64]),
)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(["", "a/b", "/", "mean/0/x"])
REQUESTS = st.builds(Key, NAMES, st.sampled_from(Quantity), st.integers(0, 2**32 - 1))
COUNTS = st.integers(0, 2**60)
TRANSCRIPTS = st.lists(st.tuples(REQUESTS, st.builds(Answer, VALUES, COUNTS, COUNTS)), max_size=14)  # more than ten: "10" is before "2"


def delivered(content: RecordDict) -> RecordDict:
    """As the other side sees it: through protobuf."""
    return recorddict_from_proto(recorddict_to_proto(content))


@given(TRANSCRIPTS)
def test_a_transcript_travels_in_a_train_message_and_is_taken_out_again(transcript: list[tuple[Key, Answer]]) -> None:
    content = to_records({"weights": {"w": np.ones(3, "float32")}}, HEADER)
    content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.1})
    nbytes = attach(content, transcript)
    assert nbytes == sum(answer.values.numel() * answer.values.dtype.itemsize for _, answer in transcript)
    told = delivered(content)
    payload, config = payload_of(told), dict(told.config_records["fl-bn/config"])
    came = detach(payload, config)
    assert [key for key, _ in came] == [key for key, _ in transcript]
    assert all(same(a, b) for (_, a), (_, b) in zip(came, transcript, strict=True))
    assert list(payload) == ["weights"]
    assert (config["exchange"], config["learning-rate"]) == ("replay", 0.1)


@given(st.builds(Local, REQUESTS, VALUES, COUNTS))
def test_a_request_travels_in_a_reply(request: Local) -> None:
    asked = question(Unanswered(request, 5, 2.5))
    content = to_records({section: to_numpy(tensors) for section, tensors in asked.sections.items()}, HEADER)
    content["fl-bn/metrics"] = MetricRecord(asked.metrics)
    came = read_request(Message(delivered(content), 1, "train"), HEADER)
    assert came is not None
    batch, read, passed = came
    assert (batch, read.key, read.count, passed) == (5, request.key, request.count, 2.5)
    assert same(Answer(read.values, 0, 0), Answer(request.values, 0, 0))
