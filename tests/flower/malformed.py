"""Take replies apart, so that tests can change their parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from tests.flower.inside import Header, Payload, from_records, to_records


@dataclass
class Reply:
    """Hold the parts of a reply, so that a test can change them.

    ``raw`` maps a section and a name to an array that is not a NumPy array.
    """

    payload: Payload
    header: dict[str, object]
    metrics: dict[str, object]
    raw: dict[tuple[str, str], Array]

    def content(self) -> RecordDict:
        content = to_records(self.payload, Header("", "", 0, ""))
        content["fl-bn/header"] = ConfigRecord(self.header)  # type: ignore[arg-type]
        for (section, name), array in self.raw.items():
            content[f"fl-bn/{section}"][name] = array  # type: ignore[index]
        if self.metrics:
            content["fl-bn/metrics"] = MetricRecord(self.metrics)  # type: ignore[arg-type]
        return content


def taken_apart(message: Message) -> Reply:
    payload, header = from_records(message.content)
    own = {s: {n: a.copy() for n, a in arrays.items()} for s, arrays in payload.items()}
    return Reply(own, dict(asdict(header)), dict(message.content.metric_records["fl-bn/metrics"]), {})
