"""Which replies claim more activations, or more steps, than their samples can have, by what the others of the cohort claim.

Moments weigh by their number of activations (``moments/LAYER.count``). That is the number of samples behind them times the activations of
a sample. The samples are in the reply: those of the first batch (``batch``), of a pass (``measured``), or of the steps. Activations are
compared with the median client's (``claims``), layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_bn.federation.payload import tensor_name
from fl_bn.federation.values import Reply
from fl_bn.methods import Report
from fl_bn.support.stated_sizes import FAR, most_believed

MOMENTS = "moments"


def behind(reply: Reply, report: Report) -> tuple[int, str]:
    """Return how many samples, or steps, the moments of ``reply`` are of, and the word for one of them.

    A reply that does not say it counts as of all its samples.
    """
    told = reply.metrics
    if report is Report.BATCHES:
        return max(reply.steps, 1), "step"
    number = told.get("batch" if report is Report.FIRST else "measured", reply.samples)
    return max(int(number), 1), "sample"


def far_claims(parts: Sequence[Reply], report: Report, steps_are_known: bool = True) -> dict[int, str]:
    """Return why the replies of some clients are not used, by client: they claim too much.

    Args:
        parts: checked replies of one cohort.
        report: what their moments are of.
        steps_are_known: the server has asked for a number of steps, and nobody claims more.
    """
    claims = {part.client: _per_unit(part, report) for part in parts}
    found: dict[int, str] = {}
    for layer in _layers(claims.values()):
        own = {client: counts[layer] for client, counts in claims.items() if counts.get(layer)}
        limit = most_believed(own.values())
        for part in parts:
            if (number := own.get(part.client, 0.0)) > limit:
                of, unit = behind(part, report)
                count = int(part.sections[MOMENTS][tensor_name(layer, "count")])
                found.setdefault(
                    part.client,
                    f"{MOMENTS}/{tensor_name(layer, 'count')}: expected at most {limit:.3g} activations per {unit}, which is {FAR:g} times "
                    f"the median client's, but got {number:.3g} ({count} of {of} {unit}s)",
                )
    return (found if steps_are_known or report is not Report.BATCHES else _many_steps(parts)) | found


def _per_unit(part: Reply, report: Report) -> dict[str, float]:
    """Activations per sample, or step, by layer."""
    of, _ = behind(part, report)
    names = {name: name.rpartition(".") for name in part.sections.get(MOMENTS, {})}
    return {layer: int(part.sections[MOMENTS][name]) / of for name, (layer, _, key) in names.items() if key == "count"}


def _layers(claims: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(layer for counts in claims for layer in counts))


def _many_steps(parts: Sequence[Reply]) -> dict[int, str]:
    """Who claims too many steps, both in all and for its samples: who trains for epochs has as many more steps as samples."""
    steps = {part.client: float(part.steps) for part in parts}
    each = {part.client: part.steps / max(part.samples, 1) for part in parts}
    most, most_each = most_believed(steps.values()), most_believed(each.values())
    return {
        client: f"metrics/steps: expected at most {most:.3g}, which is {FAR:g} times the median client's, but got {number:.0f}"
        for client, number in steps.items()
        if number > most and each[client] > most_each
    }
