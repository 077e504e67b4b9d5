"""Run rounds and evaluations in which the server sees only sums over clients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fl_bn.bn.moments import Moments, Running
from fl_bn.exchange.session import LARGEST_COUNT
from fl_bn.federation.aggregation import Defence, Drift
from fl_bn.federation.composition import say_unmeasured
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.record import with_clients
from fl_bn.federation.server import Server
from fl_bn.federation.shared_model import NotFinite, ServerStep, median_steps
from fl_bn.federation.values import Reply, RoundReplies, Sections, tensor_name, to_tensors
from fl_bn.flower.compat import log
from fl_bn.flower.population import Client, round_half_up
from fl_bn.flower.secagg import sums
from fl_bn.flower.secagg.sums import LOSS, LOSS_RANGE, REFERENCE, Layout, from_vector, moments_of, references, update_of
from fl_bn.flower.secagg.workflow import SecureSum, Sum, SumFailed
from fl_bn.flower.wire.codec import OURS, add_to_config, payload_of, tensors_of, to_record
from fl_bn.flower.wire.messages import EVALUATION, SUM_OF
from fl_bn.flower.wire.messaging import copy_of
from fl_bn.methods import LayerReports, Method, Phase, Refresh, StatisticsReport, replace_by_pooled
from fl_bn.options import refuse
from fl_bn.secure.additive import average_error, lost
from fl_bn.secure.privacy import Accountant, noise_reach
from fl_bn.secure.settings import LEAST, SecureAggregation
from fl_bn.support.wire import WireError, excerpt
from fl_bn.task import Task

Note = Callable[[Sequence[Reply], bool], None]
"""Records the clients in a sum, and whether it is a sum of evaluations."""
NO_BUDGET = "dp-noise limits what updates and statistics disclose, but evaluations would disclose more: clients do not evaluate"
REPEATS = 6  # the most exchanges for one measurement, if the reference is far from the data


def check_secure(settings: SecureAggregation, method: Method, rounds: ServerPolicy, defence: Defence) -> None:
    """Raise ``ValueError`` unless the arguments work with secure sums."""
    settings.check(max(rounds.min_cohort, round_half_up(rounds.fraction * rounds.clients)))
    settings.check(rounds.clients)
    masked = "secure aggregation hides each client's values"
    one_by_one, layerwise = defence.active or method.adversary is not None, Phase.EXCHANGE in (method.phase(1, 2), method.phase(2, 2))
    own = method.refresh is Refresh.REPORTED or method.renew is not replace_by_pooled
    others = ", ".join(c.section for c in rounds.auxiliary)
    privacy, few = settings.privacy, 0 < rounds.evaluate_clients < LEAST
    clip = max(privacy.clip, privacy.statistics_clip if method.has_statistics else 0.0) if privacy else 0.0
    least = noise_reach(privacy.noise, clip, settings.threshold_of(rounds.least_cohort)) if privacy else 0.0
    refuse(
        (one_by_one, f"{masked}, and a defence against Byzantine clients compares them: choose one of the two"),
        (layerwise, f"{masked}, and {method.name} exchanges moments layer by layer in the clear: take another method"),
        (own, f"{masked}, and {method.name} needs them here: leave out its ablations (hbn-separate, hbn-merge)"),
        (others, f"{masked}, but {others} would be sent in the clear: leave out maintain-momentum or the objective"),
        (few, f"{masked}, and needs {LEAST} clients in a sum: set evaluate-clients to 0, or to {LEAST} or more"),
        (least > settings.clipping_range,
         f"dp-noise would be cut off at secagg-clipping-range: set that to {least:.3g} or more, or dp-clip and dp-statistics-clip lower"),
        (privacy and rounds.client_weights != "uniform",
         "differential privacy (dp-noise) needs the same weight for every client: set client-weights to 'uniform'"),
    )  # fmt: skip


class SecureRounds:
    """Run secure sums for one run, if method, settings and defence work with them (``check_secure``).

    ``accountant`` counts the privacy budget. ``note`` records the clients in a sum.
    """

    def __init__(self, settings: SecureAggregation, server: Server, note: Note = lambda parts, evaluates: None) -> None:
        self.settings, self.server, self.shared, self.rounds = settings, server, server.shared, server.policy
        check_secure(settings, server.method, server.policy, server.defence)
        self._note = note
        self.accountant = None if settings.privacy is None else Accountant(settings.privacy)

    def measure(
        self, grid: Grid, messages: Iterable[Message], clients: Sequence[Client], timeout: float
    ) -> tuple[list[Reply], dict[int, str]]:
        """Measure the statistics of all clients together in a statistics-only exchange, and store them.

        Clients report deviations from a reference, the shared statistics. If it is
        too far from the data, the exchange is repeated with the measured statistics
        as reference, up to ``REPEATS`` times; not under differential privacy, where
        each exchange costs budget. Clients always normalise with the statistics in
        ``messages``.

        Return each client's reply with its counts alone, and why clients are not in
        the sum.
        """
        shared, before, messages = self.shared, self.shared.statistics(), list(messages)
        reference, limit = references(shared.sections().get("statistics", {})), self.settings.clipping_range
        try:
            for left in reversed(range(REPEATS)):
                total, average = self._sum(grid, [copy_of(message) for message in messages], clients, timeout, Phase.MEASURE)
                moments = self._moments(total, average, reference)
                if self.settings.privacy is not None or not (problem := self._imprecise(total, average, moments, reference)):
                    break
                again = "they are measured again, with the new statistics as reference"
                again = again if left else "measure them again, or raise secagg-clipping-range"
                log(logging.INFO if left else logging.WARNING, "the measured statistics are imprecise (%s): %s", problem, again)
                if _clients(total, average, "statistics", limit):
                    moments = _widened(moments, reference, limit)
                arrays = _arrays(moments, reference)
                reference = references(tensors_of(arrays))
                for message in messages:
                    message.content[OURS + REFERENCE] = arrays
            new = {name: replace_by_pooled(LayerReports(before[name], [m], 1.0, 1.0)) for name, m in moments.items() if m.count >= 2}
            shared.store(before | new)
        except (SumFailed, WireError, NotFinite) as error:
            log(logging.WARNING, "the statistics stay as they are, since %s", error)
            return [], _reasons(error, clients)
        return _entries(total), total.refused

    def train(self, grid: Grid, messages: Iterable[Message], cohort: Sequence[Client], timeout: float) -> tuple[bool, list[Reply]]:
        """Train for one round. Return whether the model changed, and each client's counts as a reply.

        The server knows the mean loss alone, which is recorded for every client.
        Under differential privacy it is NaN, because the budget does not include
        it.
        """
        shared, server, record, messages = self.shared, self.server, self.server.record, list(messages)
        phase, who, parts = Phase(record.phase), [client.index for client in cohort], list[Reply]()
        try:
            total, average = self._sum(grid, messages, cohort, timeout, phase)
            reports = bool(shared.statistics()) and shared.method.reports(phase) is not StatisticsReport.NOTHING
            moments = self._moments(total, average, references(shared.sections().get("statistics", {})) if reports else {})
            limit = self.settings.clipping_range
            loss = float(average["loss"]["loss"][0]) * LOSS_RANGE / limit if "loss" in average else float("nan")
            if "loss" in average and (beyond := _clients(total, average, LOSS, limit)):
                loss = float("nan")
                line = "round %s: the mean loss is not known, since the loss of %d of %d clients is not from -%g to %g"
                log(logging.WARNING, line, record.round, beyond, len(total.plans), LOSS_RANGE, LOSS_RANGE)
            parts = _entries(total, loss)
            record = with_clients(record, RoundReplies(who, parts, total.refused), parts, total.refused, called=self.rounds.called)
            server.record = record
            for key in ("statistics", "update"):
                if "cut" in average and (cut := _clients(total, average, key, limit)):
                    line = f"round %s: %d of %d clients had to cut their {key} to the quantiser's range (secagg-clipping-range %g)"
                    log(logging.WARNING, line, record.round, cut, len(parts), limit)
            before, after = shared.statistics(), self._combined(total, moments, server.policy.pace(record.learning_rate, server.rounds))
            weights = to_tensors(payload_of(messages[0].content).get("weights", {}))
            sections = update_of(average, weights) or {"weights": {}}
            if "weights" in sections:  # the noise of differential privacy moves nothing that no client trains
                sections["weights"] |= {name: weights[name] for name in shared.held(phase) if name in sections["weights"]}
            steps = {"steps": float(median_steps(plan.steps for plan in total.plans.values()))}
            together = Reply(who[0], sections, sum(plan.samples for plan in total.plans.values()), 1, steps)
            shared.change(ServerStep([together], [1.0], server.optimizer, record.learning_rate, phase=phase), after)
        except (SumFailed, WireError, NotFinite) as error:
            if not parts:
                reasons = _reasons(error, cohort)
                server.record = with_clients(record, RoundReplies(who, [], reasons), [], reasons, called=self.rounds.called)
                for index, why in sorted(getattr(error, "refused", {}).items()):
                    log(logging.WARNING, "%s is not in the sum: %s", self.rounds.called.client(index), why)
            log(logging.WARNING, "round %s: nothing changes, since %s", record.round, error)
            return False, parts
        server.record = replace(record, aggregated=True, drift=Drift.between(before, after))
        shared.unseen = [layer for layer, n in total.activations.items() if not n]
        say_unmeasured(shared, record.round, server.rounds)
        return True, parts

    def evaluate(
        self, grid: Grid, messages: Iterable[Message], clients: Sequence[Client], timeout: float, task: Task
    ) -> tuple[dict[str, float], dict[int, str]]:
        """Return the mean loss and task metric over the clients, and why clients are not in the means.

        Each client counts once. There are no means if the sum fails, or under
        differential privacy, whose budget includes no evaluations.
        """
        messages, shapes = list(messages), sums.evaluation_layout(task)
        if self.settings.privacy is not None:
            return {}, {client.index: NO_BUDGET for client in clients}
        for message in messages:
            add_to_config(message.content, {SUM_OF: EVALUATION})
        try:
            total = SecureSum(grid, messages, clients, self.settings, self.rounds, timeout, shapes).result()
        except SumFailed as error:
            return {}, _reasons(error, clients)
        self._note(_entries(total), True)
        average, limit = from_vector(total.mean, shapes), self.settings.clipping_range
        for name in shapes[EVALUATION]:
            if beyond := _clients(total, average, name, limit):
                line = "the mean %s is not known: that of %d of %d clients is not from %g to %g"
                log(logging.WARNING, line, name, beyond, len(total.plans), *sums.range_of(name, task))
                average[EVALUATION][name] = torch.full((1,), torch.nan)
        return sums.evaluation_means(average, task, limit), total.refused

    def _sum(self, grid: Grid, messages: Sequence[Message], cohort: Sequence[Client], timeout: float, phase: Phase) -> tuple[Sum, Sections]:
        """Compute a secure sum, and its weighted averages by section and name."""
        rounds, privacy = self.rounds, self.settings.privacy
        loss = phase is not Phase.MEASURE and privacy is None
        shapes: Layout = sums.layout(self.shared.expected(phase, rounds.update), loss=loss, cut=privacy is None)
        if privacy is not None:
            noise = {"dp-clip": privacy.clip, "dp-statistics-clip": privacy.statistics_clip, "dp-noise": privacy.noise}
            for message in messages:
                add_to_config(message.content, noise)
        # the cost is stored first: a sum that fails late may have revealed something, and the server may die
        if self.accountant is not None:
            try:
                self.accountant.spend(sums.releases(shapes))
            except OSError as error:
                raise SumFailed(f"the privacy cost of this round cannot be stored: {error}", {}) from error
            log(logging.INFO, "%s", self.accountant.statement())
        once = self.shared.method.report in (StatisticsReport.FIRST, StatisticsReport.PASS)
        total = SecureSum(grid, messages, cohort, self.settings, rounds, timeout, shapes, phase, once).result()
        self._note(_entries(total), False)
        average = from_vector(total.mean, shapes)
        means = {section: sum(weights := total.weights(section)) / len(weights) for section in average}
        return total, {s: {k: t / means[s] for k, t in part.items()} for s, part in average.items()}

    def _moments(self, total: Sum, average: Sections, reference: Mapping[str, Running]) -> dict[str, Moments]:
        passes = sum(plan.passes for plan in total.plans.values())
        counts = {layer: n * passes for layer, n in total.activations.items()}
        if (most := max(counts.values(), default=0)) > LARGEST_COUNT:
            raise WireError("moments", "count", f"expected at most {LARGEST_COUNT} activations in all, but got {excerpt(most)}")
        samples = sum(plan.samples for plan in total.plans.values())
        moments, negative = moments_of(average, reference, samples, counts, self.settings.clipping_range)
        if negative:
            line = "the summed variance of %d channels is negative, and is set to 0: the shared statistics are too far from the data"
            log(logging.WARNING, line, negative)
        return moments

    def _imprecise(self, total: Sum, average: Sections, moments: Mapping[str, Moments], reference: Mapping[str, Running]) -> str:
        """Return why the statistics should be measured again, if they should."""
        if cut := _clients(total, average, "statistics", self.settings.clipping_range):
            return f"{cut} of {len(total.plans)} clients had to cut their statistics to the quantiser's range"
        limit = self.settings.clipping_range
        error = average_error(limit, self.settings.quantization_range, total.weights("moments"))
        firsts = {layer: average["moments"][tensor_name(layer, "mean")] for layer in moments}
        far = sum(lost(m, firsts[layer], reference[layer], error, limit) for layer, m in moments.items() if m.count)
        return f"the variance of {far} channels is inexact, since the reference is far from the data" if far else ""

    def _combined(self, total: Sum, moments: Mapping[str, Moments], pace: float) -> dict[str, Running]:
        """Return the shared statistics after the round, by layer, as if one client had reported ``moments``."""
        by_passes = self.shared.method.report is not StatisticsReport.RUNNING
        weights = [float(plan.passes if by_passes else plan.samples) for plan in total.plans.values()]
        steps = sum(w * plan.steps for w, plan in zip(weights, total.plans.values(), strict=True)) / max(sum(weights), 1.0)
        return self.shared.by_rule([moments], [steps], pace)


def _reasons(error: Exception, clients: Sequence[Client]) -> dict[int, str]:
    """Return why each client is not in the failed sum: its own reason, or the error's."""
    refused = getattr(error, "refused", {})
    return {client.index: refused.get(client.index, str(error)) for client in clients}


def _entries(total: Sum, loss: float = math.nan) -> list[Reply]:
    """Return the clients' entries for the record: counts, and a masked vector's size (int64)."""
    masked = {"masked": {"vector": torch.zeros((), dtype=torch.int64).expand(total.mean.size)}}
    plans = total.plans.items()
    return [Reply(i, masked, plan.samples, plan.samples, {"steps": float(plan.steps), "loss": loss}) for i, plan in plans]


def _clients(total: Sum, average: Sections, key: str, limit: float) -> int:
    """Return how many clients cut off values of ``key``, from the sum of flags."""
    return round(float(average["cut"][key][0]) / limit * len(total.plans))


def _widened(moments: Mapping[str, Moments], reference: Mapping[str, Running], limit: float) -> dict[str, Moments]:
    """Return ``moments`` as the next reference, with larger variances where channels were cut off.

    A mean that was cut off shows the direction of the data, but not their distance.
    So the new standard deviation is at least ``limit ** 2`` times the old one; the
    next measurement corrects it.
    """
    wide = {}
    for layer, m in moments.items():
        old = reference[layer]
        near = ((m.mean - old.mean).abs() > limit / 4 * old.var.sqrt()) | (m.var > limit**2 / 8 * old.var)
        wide[layer] = Moments(m.count, m.mean, torch.where(near, torch.maximum(m.var, old.var * limit**4), m.var))
    return wide


def _arrays(moments: Mapping[str, Moments], reference: Mapping[str, Running]) -> ArrayRecord:
    """Return ``moments`` as a reference, in float32. A layer that did not run keeps its own."""
    running = {layer: Running(m.mean, m.var) if m.count else reference[layer] for layer, m in moments.items()}
    named = {
        tensor_name(k, key): getattr(r, key.removeprefix("running_")) for k, r in running.items() for key in ("running_mean", "running_var")
    }
    return to_record({name: tensor.float().numpy() for name, tensor in named.items()})
