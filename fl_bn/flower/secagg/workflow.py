"""Run the server's half of secure aggregation: Flower's SecAgg+ workflow, over fl-bn's messages.

A sum takes four messages per client, one in each stage. ``setup`` collects keys and the client's counts. ``share keys``
gives shares of each client's secrets to other clients. ``collect masked vectors`` sends the model and collects the
vectors. ``unmask`` removes the masks from the sum. If a client is lost in the first two stages, the others begin
again without it. If a client is lost later, the others' shares remove its masks from the sum. With shares from fewer
than ``threshold`` clients, nothing is revealed.

The server learns the sum of the vectors, and each client's counts. The protocol protects against a server
that is curious. It does not protect against a server that invents clients.
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
    """Signal that a secure sum failed, so that the server has no result.

    Args:
        reason: why the sum failed.
        refused: the known reasons why clients are not in the sum, by client index.
    """

    def __init__(self, reason: str, refused: Mapping[int, str]) -> None:
        self.refused = dict(refused)
        super().__init__(reason)


@dataclass(frozen=True)
class Summand:
    """Hold what the server knows about one client whose vector is in a secure sum.

    Attributes:
        client: the client.
        plan: the client's numbers of samples and steps in the round, which it sent unmasked.
        activations: the client's number of activations per sample, by layer.
        metrics: the client's metrics by name. The only one is its number of steps.
    """

    client: Client
    plan: Plan
    activations: dict[str, int]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Sum:
    """Hold the result of a secure sum.

    Attributes:
        mean: the mean of the clients' weighted vectors, (d,), float64.
        parts: the clients in the sum.
        weighting: the counts (of samples) at which a client's weight in the sum is 1.
        refused: the reasons why other clients are not in the sum, by client index.
    """

    mean: np.ndarray
    parts: list[Summand]
    weighting: Weighting
    refused: dict[int, str]

    def weight(self, section: str) -> float:
        """Return the mean of the clients' weights in ``section``. ``mean``, divided by this number, is the weighted average."""
        return sum(self.weighting.of(section, part.plan) for part in self.parts) / len(self.parts)

    def error(self, section: str, settings: SecureAggregation) -> float:
        """Return the largest absolute error that quantisation can cause in a value of the average of ``section``.

        The unit is that of the section's values in the clients' vectors (``sums``). Weights and gradients have their own
        unit. The unit of statistics is the standard deviation of the reference.
        """
        weights = [self.weighting.of(section, part.plan) for part in self.parts]
        return average_error(settings.clipping_range, settings.quantization_range, weights, 1.0)


def _workflow(settings: SecureAggregation, clients: int, timeout: float) -> Any:
    """Return Flower's workflow, with equal weights: each client multiplies its vector by its weight itself.

    Raises:
        ValueError: the settings do not suit this number of clients, see ``SecureAggregation.check``.
    """
    settings.check(clients)
    shares, threshold = settings.shares_of(clients), settings.threshold_of(clients)
    return server_half.SecAggPlusWorkflow(
        shares,
        1.0 if threshold == shares else threshold,  # Flower accepts "all shares" only as the fraction 1.0
        max_weight=1.0,
        clipping_range=float(settings.clipping_range),
        quantization_range=2**settings.quantization_range,
        modulus_range=MODULUS,
        timeout=timeout,
    )


class _Legacy(FedAvg):
    """Serve Flower's workflow as its strategy: give it the nodes of the cohort, and store the mean of the vectors."""

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
    """Sum the cohort's vectors without seeing any single one.

    Args:
        grid: Flower's grid.
        messages: the plain instruction to each client, with a ``config`` record.
        cohort: the clients.
        header: the instructions' header.
        settings: the settings of secure aggregation.
        timeout: how many seconds to wait for the replies of a stage.
        size: the length d of a vector.
        least: the smallest number of clients in the sum.
        weighted: two values: whether updates are weighted by samples, and whether statistics are.
        statistics_by_passes: whether a sample that a client uses twice counts twice in the weight of its statistics.
        layers: the layers in which clients count activations.
        most_steps: maps a client's number of samples to the largest possible number of steps. 0: unknown.
        evaluates: whether this is a sum of evaluations.
        once: whether a client's statistics come from a single batch or pass, which limits its count ``passes``.
        whole: checks a mean. It returns False if masks are left in the mean.
        called: the names of clients and nodes in the log.

    Returns:
        The sum.

    Raises:
        SumFailed: too few clients joined, answered in time, or sent shares; ``settings`` do not suit the number of clients;
            or the masks did not cancel.
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
            raise SumFailed(
                f"a secure sum needs at least {max(least, LEAST)} clients, but only {len(nodes)} of {len(cohort)} can take part",
                stages.refused,
            )
        try:
            workflow = _workflow(settings, len(nodes), timeout)
        except ValueError as error:
            raise SumFailed(str(error), stages.refused) from error
        legacy, state = _Legacy(grid, nodes), server_half.WorkflowState()
        context = _context(legacy, header.round)
        workflow.setup_stage(stages, context, state)
        stages.refused |= {by_node[n].index: "it takes no part in this round" for n in state.active_node_ids if not stages.plans[n].samples}
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
        raise SumFailed(
            f"only {vectors} of {sampled} clients sent a masked vector, but removing the masks needs {state.threshold} clients "
            f"(secagg-threshold), and the sum needs {least}",
            stages.refused,
        )
    _unmask(workflow, stages, context, state, legacy, whole)
    parts = [_summand(by_node[n], stages, n) for n in nodes if n in legacy.results]
    there = {part.client.index for part in parts}
    return Sum(legacy.mean, parts, weighting, {index: why for index, why in stages.refused.items() if index not in there})


def _weigh(stages: Stages, nodes: Sequence[int], state: Any, weighted: tuple[bool, bool], by_passes: bool) -> Weighting:
    """Choose the weights of this sum, and add them and the combined history to all clients' instructions.

    The client with the largest count in the cohort has weight 1, see ``Weighting``.

    Args:
        stages: the stages of the sum, with the clients' counts and instructions.
        nodes: the nodes in the sum.
        state: Flower's state of the workflow. It gets the instructions.
        weighted: two values: whether updates are weighted by counts, and whether statistics are. If not, all weights are 1.
        by_passes: whether a sample that a client uses twice counts twice in the weight of its statistics.
    """
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
    """Run the last stage, which removes the masks. ``legacy`` gets the mean of the vectors.

    If the masks do not cancel (``whole`` returns False), a client may have sent false shares. The stage is then repeated,
    each time without the shares of another client.

    Raises:
        SumFailed: too few clients sent shares, or several sent false ones.
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
                problem = (
                    problem or f"too few clients sent their shares to remove the masks: {state.threshold} are needed (secagg-threshold)"
                )
            elif whole(legacy.mean):
                if without in stages.clients:
                    stages.refuse(without, "false shares of the others' secrets: the sum is right without them", Stage.UNMASK)
                return
            else:
                problem = problem or MASKED_STILL
        except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:  # raised by Flower if shares do not fit together
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
