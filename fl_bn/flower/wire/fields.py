"""Records of a message: find them by kind and name, and read one by a ``Form``."""

from __future__ import annotations

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_bn.federation import fields
from fl_bn.federation.fields import Values

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return a message's records of one kind, by name.

    Flower's own properties (``array_records`` ...) create reference cycles. These keep a reply's arrays in
    memory until the garbage collector runs.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def metrics_of(content: RecordDict) -> MetricRecord | None:
    """Return a message's metric record ``metrics``, if it has one."""
    return records_of(content, MetricRecord).get("metrics")


class Form(fields.Form):
    """Declare the fields of a record in a message, find the record, and read it."""

    def of_configs(self, content: RecordDict) -> Values:
        """Read the config record of this form's name."""
        return self.read(records_of(content, ConfigRecord).get(self.record))

    def of_metrics(self, content: RecordDict) -> Values:
        """Read the metric record of this form's name."""
        return self.read(records_of(content, MetricRecord).get(self.record))
