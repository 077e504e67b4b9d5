"""Find replies that claim far more activations per sample, or far more local steps, than the rest of the cohort.

The server weights moments by their number of activations (``moments/LAYER.count``). This is the number of samples behind
the moments, times the activations of one sample. The reply gives the number of these samples, which come from the first
batch (``batch``) or from a statistics pass (``measured``). If the moments come from all training batches, the reply gives the
number of local steps instead. For each layer, the activations per sample (or per step) are compared with those of the median
client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_bn.federation.payload import tensor_name
from fl_bn.federation.values import Reply
from fl_bn.methods import StatisticsReport
from fl_bn.support.stated_sizes import FAR, most_believed

MOMENTS = "moments"


def behind(reply: Reply, report: StatisticsReport) -> tuple[int, str]:
    """Return the number of samples or steps from which the moments of ``reply`` come, and its unit: "sample" or "step".

    If the reply does not give this number, return the number of all its samples.
    """
    metrics = reply.metrics
    if report is StatisticsReport.BATCHES:
        return max(reply.steps, 1), "step"
    number = metrics.get("batch" if report is StatisticsReport.FIRST else "measured", reply.samples)
    return max(int(number), 1), "sample"


def far_claims(parts: Sequence[Reply], report: StatisticsReport, steps_are_known: bool = True) -> dict[int, str]:
    """Find the clients that claim far more activations (per sample or step) or far more steps than the median client.

    Steps are compared only if ``report`` is ``BATCHES``.

    Args:
        parts: Checked replies of one cohort.
        report: The kind of statistics that the replies report.
        steps_are_known: Whether the server knows how many local steps a client may make. If so, replies with more steps were
            refused before, and only activations are compared here.

    Returns:
        Client -> the reason to refuse its reply.
    """
    claims = {part.client: _per_unit(part, report) for part in parts}
    reasons: dict[int, str] = {}
    for layer in _layers(claims.values()):
        own = {client: counts[layer] for client, counts in claims.items() if counts.get(layer)}
        limit = most_believed(own.values())
        for part in parts:
            if (number := own.get(part.client, 0.0)) > limit:
                of, unit = behind(part, report)
                count = int(part.sections[MOMENTS][tensor_name(layer, "count")])
                reasons.setdefault(
                    part.client,
                    f"{MOMENTS}/{tensor_name(layer, 'count')}: expected at most {limit:.3g} activations per {unit}, which is {FAR:g} times "
                    f"the median client's, but got {number:.3g} ({count} of {of} {unit}s)",
                )
    return (reasons if steps_are_known or report is not StatisticsReport.BATCHES else _many_steps(parts)) | reasons


def _per_unit(part: Reply, report: StatisticsReport) -> dict[str, float]:
    """Return layer -> activations per local step if ``report`` is ``BATCHES`` (all training batches), else per sample."""
    of, _ = behind(part, report)
    names = {name: name.rpartition(".") for name in part.sections.get(MOMENTS, {})}
    return {layer: int(part.sections[MOMENTS][name]) / of for name, (layer, _, key) in names.items() if key == "count"}


def _layers(claims: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(layer for counts in claims for layer in counts))


def _many_steps(parts: Sequence[Reply]) -> dict[int, str]:
    """Find the clients that claim far more local steps than the median client, both in total and per sample.

    Return client -> the reason. A large total alone is no reason: with local epochs, more samples mean more steps.
    """
    steps = {part.client: float(part.steps) for part in parts}
    each = {part.client: part.steps / max(part.samples, 1) for part in parts}
    most, most_each = most_believed(steps.values()), most_believed(each.values())
    return {
        client: f"metrics/steps: expected at most {most:.3g}, which is {FAR:g} times the median client's, but got {number:.0f}"
        for client, number in steps.items()
        if number > most and each[client] > most_each
    }
