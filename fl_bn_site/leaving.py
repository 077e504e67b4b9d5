"""Measure, by section, the content of a site's answers. Sections and bytes are as in the server's disclosure.csv.

The site's own code does the counting, and uses no code of the run. It counts the arrays and numbers in Flower's message
just before the message leaves. Content that the server's report does not list (counts, texts, keys, shares of keys) is
counted in the section ``other``.

This module imports only the standard library and Flower's messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fl_bn_site.audit import LARGEST_NUMBER

OURS = "fl-bn/"
HEADER, METRICS, HELLO = f"{OURS}header", f"{OURS}metrics", f"{OURS}hello"
SECURE = "secaggplus_configs"  # Flower's name for the record of a secure sum
MASKED = "masked_params"
COUNTS = ("fewest", "samples", "num-examples", "num_examples")  # metrics that say how many samples the others summarise
OTHER = "other"  # the section of all content that the server's report does not list
LONGEST, MOST = 80, 50  # limits of the log: the characters of a section's name, and the sections of an answer
NUMBER = 8  # bytes that a number counts
NUMPYS = 192  # the most bytes of the header that NumPy writes before an array of a network
LONGEST_TEXT = 500  # characters of a reason or a name in the log
Sections = dict[str, dict[str, int]]


def sections_of(kind: str, content: Any) -> Sections:
    """Return the size of an answer's content, by section.

    Args:
        kind: Flower's type of the message that is answered.
        content: The records of the answer (Flower's RecordDict).

    Returns:
        Section -> ``tensors`` (their number), ``bytes``, and ``samples``: the smallest number of samples from which a
        number in the section was computed. ``samples`` is missing where the answer does not tell it.
    """
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

    arrays = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    metrics = {name: record for name, record in content.items() if isinstance(record, MetricRecord)}
    configs = {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}
    found: Sections = {}
    if kind.startswith("evaluate"):
        _evaluation(found, metrics)
    elif any(name.startswith(OURS) for name in arrays):
        _metrics(found, arrays, metrics)
    counted = sum(of["bytes"] for of in found.values())
    _add(found, OTHER, 0, max(0, sum(size(value) for record in metrics.values() for value in record.values()) - counted))
    _arrays(found, arrays, metrics.get(METRICS, {}))
    _configs(found, configs)
    full, named = [(name, of) for name, of in found.items() if of["tensors"] or of["bytes"]], dict[str, dict[str, int]]()
    for number, (name, of) in enumerate(full):
        shown = str(text(name))[:LONGEST] if number < MOST else f"{len(full) - MOST} more"
        _add(named, shown, of["tensors"], of["bytes"], of.get("samples", 0))
    return named


def about(message: Any, run_config: Mapping[str, Any], code: str) -> dict[str, Any]:
    """Return the fields of a log line that describe the message and its run. They do not depend on the answer.

    Args:
        message: Flower's message.
        run_config: The run config.
        code: The SHA-256 of the app that the run brings, in hexadecimal digits.
    """
    asks, header, config, flowers = message.metadata, {}, {}, {}
    if message.has_content():
        records = message.content.config_records
        header, config, flowers = (dict(records.get(record, {})) for record in (HEADER, f"{OURS}config", "config"))
    name = str(config.get("run", "")).rpartition("/")[0] or run_config.get("name") or run_config.get("resume") or None
    group = int(asks.group_id[:20]) if asks.group_id.isdecimal() else None
    round = header.get("round", flowers.get("server-round", group))  # Flower's own strategies give the second one
    method = header.get("method") or run_config.get("method")
    return {
        "run": str(asks.run_id),
        "name": text(name),
        "submitter": None,
        "code": code,
        "message": text(asks.message_type),
        "id": text(asks.message_id),
        "round": round if type(round) is int and 0 <= round < LARGEST_NUMBER else None,
        "method": text(method),
    }


def answered(kind: str, reply: Any, refusal: str = "") -> dict[str, Any]:
    """Return the fields of a log line that describe the answer.

    Args:
        kind: Flower's type of the message that is answered.
        reply: The answer: records, or an error.
        refusal: Why the site sends an error in place of an answer: ``refused`` or ``failed``; empty: the app itself
            made ``reply``.
    """
    sections = {} if reply.has_error() else sections_of(kind, reply.content)
    decision = (refusal or "failed") if reply.has_error() else "sent"
    return {
        **totals_of(sections),
        "message-bytes": message_bytes(reply),
        "decision": decision,
        "reason": text(reply.error.reason or "") if reply.has_error() else "",
    }


def exchanged(section: str, nbytes: int, samples: int) -> dict[str, Any]:
    """Return the fields of a log line about one vector that the app sends in a layer-wise exchange (as in FedTAN).

    Such a vector is sent while the app works on a message. It is not part of the app's answer.

    Args:
        section: The section of the vector.
        nbytes: The size of the vector in bytes.
        samples: The number of samples that the client announced when it joined the exchange: those from which each of its
            vectors is computed; 0: unknown.
    """
    totals = totals_of({str(text(section))[:LONGEST]: {"tensors": 1, "bytes": nbytes, "samples": samples}})
    return {"message": "exchange", **totals, "message-bytes": nbytes, "decision": "sent", "reason": ""}


def totals_of(sections: Sections) -> dict[str, Any]:
    """Return the fields ``sections``, ``tensors`` and ``bytes`` (sums over sections) and ``smallest-samples`` of a log line."""
    return {
        "sections": sections,
        "tensors": sum(of["tensors"] for of in sections.values()),
        "bytes": sum(of["bytes"] for of in sections.values()),
        "smallest-samples": min((of["samples"] for of in sections.values() if of.get("samples")), default=None),
    }


def message_bytes(message: Any) -> int:
    """Return the number of bytes that Flower sends for the objects of a message. Equal objects count once.

    The frames of gRPC and TLS are not counted.
    """
    objects, waiting = dict[int, int](), [message]
    while waiting:
        one = waiting.pop()
        data = one.deflate()
        objects[hash(data)] = len(data)
        waiting += (one.children or {}).values()
    return sum(objects.values())


def values_in(data: bytes) -> int:
    """Return the number of bytes of the array in ``data``. If ``data`` is in NumPy's file format, its header does not count."""
    header = 10 + int.from_bytes(data[8:10], "little")
    return len(data) - header if data[:6] == b"\x93NUMPY" and header <= min(len(data), NUMPYS) else len(data)


def size(value: Any) -> int:
    """Return how many bytes a value in a record takes. Text is counted in UTF-8, and each number as eight bytes."""
    if isinstance(value, list | tuple):
        return sum(map(size, value))
    return len(value.encode()) if isinstance(value, str) else len(value) if isinstance(value, bytes) else NUMBER


def _add(found: Sections, section: str, tensors: int, nbytes: int, samples: int = 0) -> None:
    one = found.setdefault(section, {"tensors": 0, "bytes": 0})
    one["tensors"], one["bytes"] = one["tensors"] + tensors, one["bytes"] + nbytes
    if samples:
        one["samples"] = min(samples, one.get("samples", samples))


def _arrays(found: Sections, arrays: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    samples, steps = _whole(metrics.get("samples")), _whole(metrics.get("steps"))
    for name, record in arrays.items():
        section = name.removeprefix(OURS) if name.startswith(OURS) else f"own {name}"
        behind = 0
        if section == "moments":
            behind = _whole(metrics.get("batch")) or _whole(metrics.get("measured")) or samples
            least = _least_count(record)
            behind = min(behind, least) if least else behind
        elif section == "exchange":
            behind = _whole(metrics.get("batch"))
        elif name.startswith(OURS) and section != "steps" and (section == "statistics" or steps == 1):
            behind = samples
        _add(found, section, len(record), sum(values_in(array.data) for array in record.values()), behind)


def _metrics(found: Sections, arrays: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Count the metrics of an answer that has arrays, as the server's report does.

    Where the answer is part of a layer-wise exchange, the report counts no metrics, and neither does this function.
    """
    if f"{OURS}exchange" in arrays:
        return
    ours = metrics.get(METRICS, {})
    for name in metrics.keys() - {METRICS}:
        if not name.startswith(OURS):
            _add(found, "own metrics", 0, NUMBER * len(metrics[name]), fewest({name: metrics[name]}))
    _add(found, "metrics", 0, NUMBER * sum(isinstance(value, int | float) for value in ours.values()))


def _evaluation(found: Sections, metrics: Mapping[str, Any]) -> None:
    own: Iterator[Any] = (record for name, record in metrics.items() if not name.startswith(OURS))
    values = {name: value for record in (*own, metrics.get(METRICS, {})) for name, value in record.items()}
    _add(found, "evaluation", 0, sum(size(value) for name, value in values.items() if name not in COUNTS), fewest(metrics))


def _configs(found: Sections, configs: Mapping[str, Any]) -> None:
    for name, record in configs.items():
        for key, value in record.items():
            if name == HELLO and key == "label-counts":
                if value != "[]":
                    _add(found, "introduction", 1, size(value))
            elif name == SECURE and key == MASKED and value:
                _add(found, "masked", 1, values_in(value[-1]))
                _add(found, OTHER, 0, sum(map(values_in, value[:-1])))
            else:
                _add(found, OTHER, 0, size(value))


def text(value: object) -> str | None:
    """Return ``value`` as text for the log: at most 500 characters, without line breaks; None where ``value`` is None."""
    return None if value is None else "".join(c if c.isprintable() else "?" for c in str(value)[:LONGEST_TEXT])


def _least_count(record: Mapping[str, Any]) -> int:
    """Return the smallest number of values per channel among the layers that ran; 0: unknown."""
    counts = [array.numpy() for name, array in record.items() if name.rpartition(".")[2] == "count"]
    return min((int(count[0]) for count in counts if count.shape == (1,) and int(count[0]) > 0), default=0)


def fewest(metrics: Mapping[str, Any]) -> int:
    """Return the smallest number of samples that the metrics of an answer tell; 0: they tell none."""
    told = [_whole(record.get(name)) for record in metrics.values() for name in COUNTS]
    return min(filter(None, told), default=0)


def _whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) and 1 <= value < LARGEST_NUMBER else 0
