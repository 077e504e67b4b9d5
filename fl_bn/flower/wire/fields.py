"""Name fl-bn's records in a message and in a client's state, find them by type, and read one by a ``Form``.

The records that Flower's examples use, ``config``, ``arrays`` and ``metrics``, belong to the user. They may have any
fields. The names of fl-bn's records begin with ``OURS``, so they never clash with the user's. Errors name a record
without this prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_bn.federation import fields
from fl_bn.federation.fields import Values

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
OURS = "fl-bn/"
"""The prefix of the names of fl-bn's records, in messages and in Flower's ``context.state``."""


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return all records of the type ``kind`` (such as ``ArrayRecord``), by name.

    Flower's own properties (``array_records`` ...) create reference cycles. These keep a reply's arrays in
    memory until the garbage collector runs.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def our_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return name -> record for fl-bn's records of the type ``kind``. The names lack the prefix ``OURS``."""
    return {name.removeprefix(OURS): record for name, record in records_of(content, kind).items() if name.startswith(OURS)}


def their_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return the user's records of the type ``kind``, by name."""
    return {name: record for name, record in records_of(content, kind).items() if not name.startswith(OURS)}


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the fields of fl-bn's config in a message; empty if the message has no config."""
    return dict(our_records(content, ConfigRecord).get("config", ConfigRecord()))


def add_to_config(content: RecordDict, values: Mapping[str, Any]) -> None:
    """Put ``values`` into fl-bn's config of a message. Other messages with the same config stay as they are."""
    content[f"{OURS}config"] = ConfigRecord({**config_of(content), **values})


@dataclass(frozen=True)
class Form(fields.Form):
    """Declare the fields of one record in a message, find the record by its name, and read it.

    Attributes:
        prefix: the beginning of the record's name in a message. Empty: the name is Flower's or the user's.
    """

    prefix: str = OURS

    @property
    def name(self) -> str:
        """Return the record's name in a message."""
        return self.prefix + self.record

    def of_configs(self, content: RecordDict) -> Values:
        """Read the ``ConfigRecord`` that is called ``name`` in a message's ``content``.

        Raises:
            WireError: the record is missing, or one of its fields is missing or not as declared.
        """
        return self.read(records_of(content, ConfigRecord).get(self.name))

    def of_metrics(self, content: RecordDict) -> Values:
        """Read the ``MetricRecord`` that is called ``name`` in a message's ``content``.

        Raises:
            WireError: the record is missing, or one of its fields is missing or not as declared.
        """
        return self.read(records_of(content, MetricRecord).get(self.name))
