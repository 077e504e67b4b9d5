"""Run the server's half of secure aggregation: Flower's SecAgg+ workflow, stage by stage, over this project's messages.

There are four messages per client and sum: setup (keys, and the client's counts), share keys, collect masked
vectors (the only one with the model), and unmask. If a client is lost in the first two stages, the others begin
again without it. If one is lost after its keys were shared, the shares of the others remove it from the sum.
With fewer than ``threshold`` of them nothing is revealed.

The server gets the sum of the vectors, and each client's counts. The protocol protects against a curious
server. It does not protect against a server that invents clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid

from fl_bn.federation.rounds import unbounded
from fl_bn.flower.compat import GridClientProxy, Stage, parameters_to_arrayrecord
from fl_bn.flower.population import Client
from fl_bn.flower.secagg.instruction_history import to_config
from fl_bn.flower.secagg.masks import bound_to, server_half
from fl_bn.flower.secagg.stages import Stages
from fl_bn.flower.secagg.sums import Plan, Weighting
from fl_bn.flower.wire.codec import Header
from fl_bn.flower.wire.fields import add_to_config
from fl_bn.secure.additive import average_error
from fl_bn.secure.settings import LEAST, MODULUS, SecureAggregation
from fl_bn.support.client_names import UNNAMED, ClientNames

MASKED_STILL = "the masks did not cancel (server and clients with different versions of fl-bn, or a false share)"


class SumFailed(Exception):
    """Report that there is no sum, and that nothing was revealed.

    Args:
        reason: why.
        refused: the known reasons of clients, by index.
    """

    def __init__(self, reason: str, refused: Mapping[int, str]) -> None:
        self.refused = dict(refused)
        super().__init__(reason)


@dataclass(frozen=True)
class Summand:
    """Hold the server's knowledge of one client in a sum: its counts.

    Attributes:
        client: the client.
        plan: its counts for the round.
        activations: its activations per sample, by layer.
        metrics: its number of steps.
    """

    client: Client
    plan: Plan
    activations: dict[str, int]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Sum:
    """Hold a secure sum.

    Attributes:
        mean: (d,), float64, the mean of the weighted vectors of ``parts``.
        parts: the clients in the sum.
        weighting: the counts that weigh 1.
        refused: the reasons of the other clients, by index.
    """

    mean: np.ndarray
    parts: list[Summand]
    weighting: Weighting
    refused: dict[int, str]

    def weight(self, section: str) -> float:
        """Return the sum of the clients' weights in ``section`` over their number, by which ``mean`` is to be divided there."""
        return sum(self.weighting.of(section, part.plan) for part in self.parts) / len(self.parts)

    def error(self, section: str, settings: SecureAggregation) -> float:
        """Return the largest error of the average in ``section`` by quantisation alone, in the units of the vector."""
        weights = [self.weighting.of(section, part.plan) for part in self.parts]
        return average_error(settings.clipping_range, settings.quantization_range, weights, 1.0)


def _workflow(settings: SecureAggregation, clients: int, timeout: float) -> Any:
    """Return Flower's own workflow with the same weight for everyone: a client's weight is in its vector.

    Raises:
        ValueError: the settings do not suit so many clients, see ``check``.
    """
    settings.check(clients)
    shares, threshold = settings.shares_of(clients), settings.threshold_of(clients)
    return server_half.SecAggPlusWorkflow(
        shares,
        1.0 if threshold == shares else threshold,  # Flower takes all of them as a fraction only
        max_weight=1.0,
        clipping_range=float(settings.clipping_range),
        quantization_range=2**settings.quantization_range,
        modulus_range=MODULUS,
        timeout=timeout,
    )


class _Legacy(FedAvg):
    """Serve Flower's workflow as its strategy: name the nodes, and take the average out."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        super().__init__()
        self.grid, self.nodes = grid, nodes
        self.mean, self.results = np.zeros(0), dict[int, FitRes]()

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return [(GridClientProxy(node, self.grid, 0), FitIns(ndarrays_to_parameters([]), {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: Any) -> Any:
        self.results = {proxy.node_id: result for proxy, result in results}
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


def secure_sum(
    grid: Grid,
    messages: Sequence[Message],
    cohort: Sequence[Client],
    header: Header,
    settings: SecureAggregation,
    timeout: float,
    size: int,
    *,
    least: int = LEAST,
    weighted: tuple[bool, bool] = (True, True),
    statistics_by_passes: bool = True,
    layers: Iterable[str] = (),
    most_steps: Callable[[int], int] = unbounded,
    evaluates: bool = False,
    once: bool = False,
    whole: Callable[[np.ndarray], bool] = lambda mean: True,
    called: ClientNames = UNNAMED,
) -> Sum:
    """Sum the cohort's vectors without seeing any.

    Args:
        grid: Flower's grid.
        messages: the plain instruction of each client, with a ``config`` record.
        cohort: the clients.
        header: the instructions' header.
        settings: of secure aggregation.
        timeout: seconds for the replies of a stage.
        size: the length of a vector.
        least: the smallest number of clients in the sum.
        weighted: whether updates, and whether statistics, weigh by samples.
        statistics_by_passes: whether statistics weigh by all samples that passed, repeats included.
        layers: the layers whose activations are counted.
        most_steps: the largest number of steps for a client's number of samples; 0: unknown.
        once: whether statistics are of one batch or pass.
        evaluates: whether this is a sum of evaluations.
        whole: tells whether a mean has no masks.
        called: the names of clients and nodes in the log.

    Raises:
        SumFailed: too few clients came, answered in time, or kept the shares of the others.
    """
    by_node = {client.node: client for client in cohort}
    instructions = {m.metadata.dst_node_id: m for m in messages}
    stages = Stages(
        grid,
        header,
        by_node,
        instructions,
        timeout,
        size,
        frozenset(layers),
        most_steps,
        evaluates,
        2**settings.quantization_range,
        once,
        called=called,
    )
    nodes = sorted(by_node, key=lambda node: by_node[node].index)
    while True:
        if len(nodes) < max(least, LEAST):
            raise SumFailed(f"{len(nodes)} of {len(cohort)} clients are left, but {max(least, LEAST)} are needed", stages.refused)
        try:
            workflow = _workflow(settings, len(nodes), timeout)
        except ValueError as error:
            raise SumFailed(str(error), stages.refused) from error
        legacy, state = _Legacy(grid, nodes), server_half.WorkflowState()
        context = _context(legacy, header.round)
        workflow.setup_stage(stages, context, state)
        stages.refused |= {by_node[n].index: "it sits this round out" for n in state.active_node_ids if not stages.plans[n].samples}
        present = {node for node in state.active_node_ids if stages.plans[node].samples}
        if len(present) == len(nodes):
            workflow.share_keys_stage(stages, context, state)
            present = set(state.active_node_ids)
        if len(present) == len(nodes):
            weighting = _weigh(stages, nodes, state, weighted, statistics_by_passes)
            enough = workflow.collect_masked_vectors_stage(stages, context, state)
            if not stages.complaints:
                break
            present -= stages.leaving()
        nodes = [node for node in nodes if node in present]
    sampled, vectors = len(nodes), len(state.active_node_ids)
    if not enough or vectors < least:
        raise SumFailed(f"only {vectors} of {sampled} masked vectors came (threshold {state.threshold}, needed {least})", stages.refused)
    _unmask(workflow, stages, context, state, legacy, whole)
    parts = [_summand(by_node[n], stages, n) for n in nodes if n in legacy.results]
    there = {part.client.index for part in parts}
    return Sum(legacy.mean, parts, weighting, {index: why for index, why in stages.refused.items() if index not in there})


def _weigh(stages: Stages, nodes: Sequence[int], state: Any, weighted: tuple[bool, bool], by_passes: bool) -> Weighting:
    """Return the counts that weigh 1 in this sum, and add them to everyone's instruction."""
    plans = [stages.plans[node] for node in nodes]
    passes = max(p.passes if by_passes else p.samples for p in plans)
    most = max(p.samples for p in plans)
    weighting = Weighting(most if weighted[0] else 0, passes if weighted[1] else 0, most)
    values = {f"secagg-{key}-weight": value for key, value in asdict(weighting).items()} | to_config(stages.history)
    state.nid_to_fitins = {}
    for node in nodes:
        add_to_config(stages.instructions[node].content, values)
        state.nid_to_fitins[node] = RecordDict(dict(stages.instructions[node].content.items()))
    return weighting


def _unmask(workflow: Any, stages: Stages, context: Any, state: Any, legacy: _Legacy, whole: Callable[[np.ndarray], bool]) -> None:
    """Run the last stage. If the masks do not cancel, try again without each sender of shares: one of them may have lied.

    Raises:
        SumFailed: too few clients sent shares, or several of them sent false ones.
    """
    active, summed = set(state.active_node_ids), list(state.aggregate_ndarrays)
    neighbours = {node: set(of) for node, of in state.nid_to_neighbours.items()}
    problem = ""
    for without in (-1, *sorted(active)):
        stages.without = without
        state.active_node_ids, state.aggregate_ndarrays = set(active), list(summed)
        state.nid_to_neighbours = {node: set(of) for node, of in neighbours.items()}
        try:
            with np.errstate(all="ignore"), bound_to(bytes.fromhex(stages.digest)):
                enough = workflow.unmask_stage(stages, context, state)
            if not enough:
                problem = problem or f"too few clients kept the others' shares to remove the masks (threshold {state.threshold})"
            elif whole(legacy.mean):
                if without in stages.clients:
                    stages.refuse(without, "false shares of the others' secrets: the sum is right without them", Stage.UNMASK)
                return
            else:
                problem = problem or MASKED_STILL
        except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:  # of shares that do not fit
            problem = problem or f"the masks could not be removed: {error!r}"
    raise SumFailed(problem, stages.refused)


def _summand(client: Client, stages: Stages, node: int) -> Summand:
    plan = stages.plans[node]
    return Summand(client, plan, stages.activations[node], {"steps": float(plan.steps)})


def _context(strategy: _Legacy, round: int) -> LegacyContext:
    context = LegacyContext(Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={}), strategy=strategy)
    context.state["config"] = ConfigRecord({"current_round": round})
    context.state["parameters"] = parameters_to_arrayrecord(ndarrays_to_parameters([]), keep_input=True)
    return context
