"""Carry out the client's half of a round, around any training loop: (instruction, state) -> (reply, state).

``fl_bn.federation.own_loop`` uses ``LocalRound`` with a user's own training loop, ``fl_bn.federation.client_round`` with
fl-bn's training loop. These modules do the parts of a round, in this order:

* ``incoming`` loads the tensors of the instruction, and those that the client keeps.
* ``client_pass`` measures statistics before training, or in a statistics-only exchange.
* ``momentum`` carries the optimiser's buffers from the round before to the next one.
* ``first_batch`` knows the size of the first batch, and runs FedTAN's exchange.
* ``training_passes`` decides which forward passes count as batches, and ``step_rates`` records the rates of steps.
* ``client_checks`` checks the layers after training, and whether a reply can be made.
* ``outgoing`` makes the contents of the reply, and the state that the client keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.bn.layers import freeze_statistics
from fl_bn.bn.modes import frozen_affine, train_mode
from fl_bn.bn.moments import Moments, Running
from fl_bn.bn.observation import moving_average, observe, pooled, whole
from fl_bn.bn.roles import batch_norms, inputs_like
from fl_bn.federation import outgoing
from fl_bn.federation.aggregation import store_statistics
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.auxiliary import auxiliary as auxiliary_of
from fl_bn.federation.centring import Centring
from fl_bn.federation.client_checks import (
    check_dtypes,
    check_layers,
    check_objective,
    check_reply,
    check_shapes,
    check_trained,
    frozen_statistics,
    whole_number,
)
from fl_bn.federation.client_pass import ClientPass
from fl_bn.federation.finite_inputs import InputWatch
from fl_bn.federation.first_batch import Batch, Connect, FirstBatch
from fl_bn.federation.incoming import load
from fl_bn.federation.layer_calls import watching_calls
from fl_bn.federation.made_of import same_layers
from fl_bn.federation.momentum import Momentum, restart
from fl_bn.federation.network import Copy
from fl_bn.federation.payload import Named, Sections
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.step_rates import StepRates
from fl_bn.federation.training_passes import TrainingPasses
from fl_bn.federation.unrecorded import Draws, unrecorded
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.methods import Method, Phase, Place, StatisticsReport
from fl_bn.objectives import CONTROL, PLAIN, Start, Step
from fl_bn.task import CLASSIFICATION, Task


class LocalRound:
    """Carry out one client's half of one round: train inside ``open``, then call ``reply``.

    Args:
        model: The network, converted for ``method``. It is loaded with the tensors that the server sent and
            with those that the client keeps.
        method: The method of the run.
        instruction: The server's instruction.
        kept: The state that the client kept after its last round. Default: nothing, as before its first
            round.
        settings: The settings of fl-bn's training loop. Default: those for a user's own loop.
        connect: Joins the layer-wise exchange with the cohort, see ``Connect``. Phase EXCHANGE (FedTAN) needs
            this function. If it is given in phase MEASURE, the client measures one layer after the other.

    Raises:
        ValueError: The server's model differs from ``model``, only one side has an objective with control variates, or
            ``connect`` does not fit the phase.
        WireError: A tensor of the instruction is missing, unexpected, or of a wrong shape or dtype.
    """

    def __init__(
        self,
        model: nn.Module | Copy,
        method: Method,
        instruction: Instruction,
        kept: ClientState = NOTHING,
        settings: LocalTraining | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._copy = model if isinstance(model, Copy) else Copy.of(model, method)
        self.network = self._copy.network
        self.method, self.instruction, self.kept = method, instruction, kept
        self.settings = settings or LocalTraining(batch_size=2, epochs=1)
        self.phase, self.steps = instruction.phase, 0
        self.stepped = False  # whether a step was made; a compiled forward pass reads this, as it would be compiled anew for each number
        self.corrected = 0  # how many gradients the objective has computed
        self.rates = StepRates(self.settings.objective, instruction.learning_rate)  # of a user's own optimisers
        self.tested: tuple[float | None, float | None] = (None, None)  # the metric on the client's own test data, before and after training
        self._connect, self.first_batch = connect, FirstBatch(self.model, connect)
        self._observing, self.passes = ExitStack(), TrainingPasses({})
        self._centring = Centring({}, ())
        self._values: dict[str, Tensor] = {}
        self._fixed: dict[str, Running] = {}  # layer -> statistics that do not change in this round
        self._check: Callable[[], None] = _checked  # inside the block: what its end checks
        self.in_own_loop = False  # set by own_loop: a user's loop may make passes that lead to no step
        self.input_watch = InputWatch()
        self.statistics_pass = ClientPass(self.model, self.network.locality, instruction, kept, self.input_watch, connect)
        self.loaded = load(self._copy, instruction, kept, self.auxiliary)
        if self.trains and (self.phase is Phase.EXCHANGE) != (connect is not None):
            raise ValueError(
                f"connect (the layer-wise exchange) must be given in phase exchange, and must be None in other training phases, but got "
                f"phase {self.phase} and connect={connect}"
            )

    @property
    def model(self) -> nn.Module:
        """Return the network that this round trains."""
        return self._copy.model

    @model.setter
    def model(self, other: nn.Module) -> None:
        raise AttributeError("round.model cannot be set: give a wrapped or compiled network its own name, net = torch.compile(round.model)")

    @property
    def trains(self) -> bool:
        """Tell whether the client trains in this round; otherwise it only measures statistics."""
        return self.instruction.trains

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an optimiser updates in this round, by name."""
        return self._copy.trainable(self.phase)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Return the names of those of ``parameters`` that the clients share."""
        return frozenset(name for name in self.parameters if self.network.locality.place[name] is Place.SHARED)

    @cached_property
    def momentum(self) -> Momentum:
        """Return the buffers of the client's optimiser, before and after training."""
        return Momentum(self.settings, self.parameters, self.shared, self.instruction.sections, self.kept.get("optimizer"))

    @property
    def auxiliary(self) -> tuple[Auxiliary, ...]:
        """Return the kinds of auxiliary tensors that are sent with the weights; empty if the client only measures."""
        return auxiliary_of(self.settings) if self.trains else ()

    @contextmanager
    def open(self, full_gradient: Callable[[], dict[str, Tensor]] | None = None) -> Iterator[LocalRound]:
        """Prepare the model for training inside the ``with`` block, and yield this round.

        The model is in training mode, and layers that this round freezes are frozen. If the method reports
        statistics of training batches, the moments of the BatchNorm layers are recorded.

        Args:
            full_gradient: Computes the gradient of the loss over all of the client's samples. SCAFFOLD's
                option 1 needs it.

        Raises:
            ValueError: The server expects another objective, or the objective needs ``full_gradient``, which is None. Or the
                training loop changed frozen statistics, or trained a copy of the model.
        """
        check_objective(self)
        self.set_modes(self.model)
        frozen = self._fixed = frozen_statistics(self.model)
        dtypes, shapes = {name: p.dtype for name, p in self.model.named_parameters()}, {n: b.shape for n, b in self.model.named_buffers()}
        control, full = self.instruction.sections.get(CONTROL, {}), full_gradient or _no_full_gradient
        start = Start(self.model, self.parameters, self.shared, self.kept.get("objective"), control, self.kept.counted, full)
        self._objective = self.settings.objective.begin(start)
        centred = self.centred
        self._centring = Centring(dict(self.model.named_parameters()) if centred else {}, centred)

        def check() -> None:
            if self.in_own_loop and self.steps:
                self.passes.close()
            check_dtypes(self, dtypes)
            check_shapes(self, shapes)
            check_layers(self, frozen)

        try:
            self._check = check
            if self.observes:
                first = self.method.reports(self.phase) is StatisticsReport.FIRST
                self.passes = TrainingPasses(self.parameters, first, batch_norms(self.model) if self.in_own_loop else None)
                self._observing.enter_context(self.passes.watching())
                leaves = self.passes.follow if self.in_own_loop else None
                observing = observe(self.model, counts=self.passes.counts, values=whole, leaves=leaves)
                self.passes.observed = self._observing.enter_context(observing)
            with self.first_batch, self._centring, self.input_watch.watching(self.model), watching_calls(self), same_layers(self):
                yield self
        finally:
            self._check = _checked
            self._observing.close()
            self._objective.close()
            freeze_statistics(self.model, False)
        check()

    @property
    def centred(self) -> list[str]:
        """Return the names of the weights whose gradients are centred in this round (see ``centring``)."""
        return self.network.centred if self.method.centres(self.phase) else []

    @property
    def freezes(self) -> bool:
        """Tell whether the running statistics are frozen in this round."""
        return self.method.freezes_statistics(self.phase)

    @property
    def observes(self) -> bool:
        """Tell whether the client reports the moments of training batches to the server in this round."""
        return self.method.reports(self.phase) in (StatisticsReport.BATCHES, StatisticsReport.FIRST, StatisticsReport.MOVING)

    def set_modes(self, model: nn.Module) -> None:
        """Put ``model`` into training mode, and freeze the layers that are frozen in this round.

        Parts that the model's owner holds in evaluation mode stay in evaluation mode.
        """
        freeze_statistics(model, layers=None if self.freezes else frozen_affine(model))
        train_mode(model)

    def adopt_observations(self, observed: dict[str, list[Moments]], batch: int) -> None:
        """Store the moments that ``federation.engines.vectorised`` measured while it trained this client together with others.

        Args:
            observed: Layer -> the moments of each training batch.
            batch: The number of samples of the first batch.
        """
        self.passes.observed, self.first_batch.samples = observed, batch

    @property
    def begun(self) -> bool:
        """Tell whether the round's first batch has begun, so that its number of samples is known."""
        return self.first_batch.samples > 0

    @property
    def batch(self) -> Batch:
        """Return the number of samples of the first batch; 0 as long as it is unknown.

        fl-bn usually finds this number by itself. If it cannot, set the number before the first forward pass by
        ``round.batch(32)``: the returned integer can be called.
        """
        return Batch.of(self.first_batch.samples or self.passes.samples or self.first_batch.inputs, self.begin_batch)

    def begin_batch(self, samples: int) -> None:
        """Begin the first batch, of ``samples`` samples.

        In phase EXCHANGE the layers exchange their statistics with the cohort from now on.

        Raises:
            ValueError: The number is below 1, the first step is over, or the client has joined the exchange
                already.
        """
        self.first_batch.begin(samples, self.steps)

    def inputs_seen(self, samples: int) -> None:
        """Count ``samples`` more input samples that the loop has used before its first step.

        ``batch`` falls back on this count if no other number is known.
        """
        self.first_batch.inputs += samples

    def gradient_ready(self) -> None:
        """End the layer-wise exchange before the first step. Call this when the gradient of a batch is complete.

        Raises:
            ValueError: There is an exchange, but the network made no training forward pass before the first step.
        """
        if self.steps == 0:
            self.first_batch.end(self.method.name)

    def step_done(self) -> None:
        """Count one local step.

        A loop that makes its steps without a torch optimiser (``p -= lr * p.grad``) calls this method after
        each step.

        Raises:
            ValueError: The method centres gradients, and the step was made along a gradient that is not centred. Or the first
                step comes before the layer-wise exchange, see ``gradient_ready``.
        """
        if wrong := self._centring.stepped(self._values):
            raise ValueError(
                f"{self.method.name} centres gradients that autograd computes for round.model, but {wrong[0]} moved along another gradient "
                "(of torch.func, say): write that gradient to p.grad and step by a torch.optim optimiser. Or switch centring off, at the "
                "server and at all clients, by the method dataclasses.replace(method, centre=False)"
            )
        self.count_step()

    def watch_values(self, values: Mapping[str, Tensor]) -> None:
        """Let ``step_done`` find steps through ``p.data``, which torch does not count. ``values`` has copies of the parameters by name."""
        self._values = dict(values)

    def count_step(self, goes_on: bool = False, parameters: Container[int] | None = None) -> None:
        """Count one local step, without the check of ``step_done`` that gradients are centred.

        Args:
            goes_on: Whether a second optimiser made this step after the same backward pass. If so, it belongs to
                the local step before, and the number of steps stays the same.
            parameters: The ids of the parameters that the step changed. None: all.

        Raises:
            ValueError: The first step comes before the layer-wise exchange, see ``gradient_ready``.
        """
        self._centring.stepped()
        if goes_on:
            self.passes.settle(parameters)
            self.passes.next_step()
            return
        self.gradient_ready()
        self.passes.settle(parameters)
        if self.steps == 0:
            self.first_batch.samples = int(self.batch)
        self.steps, self.stepped = self.steps + 1, True
        self.passes.next_step()
        if self.passes.all_done:
            self._observing.close()

    def optimizer_steps(self, parameters: Container[int]) -> None:
        """Prepare the step of a user's own optimiser: centre the gradients that autograd did not compute.

        Args:
            parameters: The ids of the optimiser's parameters.
        """
        self._centring.complete(parameters)

    def optimizer_stepped(self, optimizer: Optimizer, goes_on: bool = False) -> None:
        """Record the learning rate of a step that a user's own ``optimizer`` made. Call this before ``count_step``.

        If ``method.restarts``, the momentum buffers are cleared after the first step of phase EXCHANGE (see ``momentum.restart``).

        Args:
            optimizer: The optimiser.
            goes_on: Whether a second optimiser made this step after the same backward pass. If so, it belongs to the local step before.

        Raises:
            ValueError: The objective needs plain SGD with one learning rate, but ``optimizer`` differs, see ``StepRates.record``.
        """
        self.rates.record(optimizer, goes_on)
        restart(optimizer, self.method, self.phase, self.steps - goes_on)

    def backward(self, forward: Callable[[], Tensor], x: Any, call: Callable[[nn.Module, Any], Any] | None = None) -> Tensor:
        """Compute the gradient of one batch, including the objective's terms, and add it to the parameters' ``grad``.

        Call this method in place of ``loss.backward()``, once per optimiser step.

        Args:
            forward: Computes the loss of the batch.
            x: The inputs of the batch.
            call: Calls a network on inputs, as ``Task.forward`` does. None: the inputs are its only argument.

        Returns:
            The loss, without the objective's own terms.

        Raises:
            ValueError: The objective corrects the gradient of a whole step, but this is the second call before the optimiser's step.
                Or a parameter learns that did not learn at the start of the round, and the round has an objective. Or no parameter
                got a gradient.
        """
        objective, draws = self.settings.objective, None
        if objective is not PLAIN and self.corrected > self.steps:
            raise ValueError(
                f"{objective.name} corrects the gradient of a whole step: call the optimiser after every round.backward, without gradient "
                "accumulation and without a GradScaler (bfloat16 needs none)"
            )
        if objective.repeats:
            draws = Draws.now(inputs_like(self.model).device)

        def again() -> Tensor:
            if draws is not None:
                draws.again()
            with unrecorded(self.model), self.passes.ignored():
                return forward()

        if objective is not PLAIN and (new := self._copy.trainable(self.phase).keys() - self.parameters.keys()):
            raise ValueError(
                f"{objective.name} treats the parameters that learn at the start of the round, but {min(new)} began to learn later: "
                "call requires_grad_(True) before local_round or training"
            )
        self.corrected += 1
        loss = self._objective.gradient(Step(x, forward, again, call))
        if self.steps == 0 and all(p.grad is None for p in self.parameters.values()):
            raise ValueError(
                "the loss gave no parameter of the converted network a gradient: the network's forward seems to call another network, such "
                "as the one before convert. Let it use only layers of its own (self.layer)"
            )
        return loss

    def measure(self, batches: Iterable[Any], task: Task = CLASSIFICATION) -> None:
        """Measure the moments of every BatchNorm layer over ``batches``; the model's parameters and statistics stay unchanged.

        HBN needs this pass before training. In a statistics-only exchange, the pass is all that a client does.

        Args:
            batches: Batches, in a form that ``task`` reads. In a training round an iterator is refused, since it
                would be empty afterwards.
            task: Reads the inputs of a batch.

        Raises:
            ValueError: A local step was made already, or ``batches`` is an iterator in a training round.
        """
        if self.steps:
            raise ValueError(
                f"round.measure measures with the weights that the server sent, but this round has made {self.steps} local steps: "
                "measure before the first step"
            )
        with same_layers(self):
            self.statistics_pass.run(batches, task)

    def report(self) -> dict[str, Moments]:
        """Return layer -> the moments to report: of the statistics pass if there was one, else of the training batches so far."""
        if self.statistics_pass.moments is not None:
            return self.statistics_pass.moments
        if self.method.reports(self.phase) is not StatisticsReport.MOVING:
            return pooled(self.passes.observed)
        layers, observed = batch_norms(self.model), self.passes.observed
        ran = [name for name in self.network.locality.shared_statistics if observed.get(name)]
        return {name: moving_average(layers[name], observed[name]) for name in ran}

    def reply(
        self,
        samples: int,
        loss: float = float("nan"),
        *,
        client: int = 0,
        metrics: Mapping[str, float] | None = None,
        tells_drift: bool = False,
    ) -> tuple[Reply, ClientState]:
        """Make the reply to the server, and the state that the client keeps for its next round.

        Args:
            samples: The number of different samples that the client trained on. It is the client's weight in
                averages. In phase EXCHANGE, the weight is the size of the first batch instead.
            loss: The mean loss over the training batches.
            client: The client's number.
            metrics: Further numbers for the record, by name. In a loop of your own, ``client_metrics`` of the record has them, and
                ``own_metrics`` their means, weighted by samples.
            tells_drift: Whether the reply says how far the client's own running statistics moved (FedBN).

        Returns:
            The reply, and the state.

        Raises:
            ValueError: A loop of the user's own made no step, or a later round has loaded the network. Or ``samples`` or ``client`` is
                not a whole number, a name in ``metrics`` is taken, or the first batch has more than ``samples`` samples. Or the
                objective divides by the learning rate, and this was 0 in all steps. Or the method needs ``round.measure`` before training,
                and it was not called.
        """
        self._check()
        samples, client = whole_number("samples", samples), whole_number("client", client)
        given = check_reply(self, metrics or {})
        if self.trains:
            sections, numbers, kept = self._trained(samples, client, tells_drift)
            numbers = {**given, "loss": float(loss), **numbers}
        else:
            sections, numbers, kept = {"moments": outgoing.complete_moments(self, self.report())}, {}, self.kept
        numbers |= outgoing.numbers_of_data(self, sections)
        weight = int(self.batch) if self.phase is Phase.EXCHANGE else samples
        return Reply(client, sections, samples, weight, numbers, self.instruction.round, self.network.signature), kept

    def _trained(self, samples: int, client: int, tells_drift: bool) -> tuple[Sections, dict[str, float], ClientState]:
        """Return the results of training: tensors to send, numbers for the record, and the state to keep.

        The arguments and the errors are those of ``reply``.
        """
        check_trained(self, samples)
        store_statistics(self.model, self._fixed)  # the network may have moved them by running after the training block
        gradients = outgoing.ema_gradients(self) if self.settings.update == "gradients" else {}
        finish = self._objective.finish(self.steps, self.rates.mean)
        if gradients:
            outgoing.step_at_home(self, gradients)
        kept = outgoing.state_to_keep(self, gradients, finish, client)
        sections = outgoing.sections_to_send(self, gradients, finish, self.report())
        return sections, outgoing.numbers_of_training(self, kept, tells_drift), kept

    def sit_out(self, client: int, metrics: Mapping[str, float]) -> tuple[Reply, ClientState]:
        """Leave the round, and the cohort's layer-wise exchange if there is one, without training.

        Args:
            client: The client's number.
            metrics: Numbers for the record, by name.

        Returns:
            A reply without tensors, and the state as it was before.
        """
        if self._connect is not None:
            self._connect(0).close()
        return Reply(client, {}, 0, 0, dict(metrics), self.instruction.round, self.network.signature), self.kept

    @property
    def state(self) -> Named:
        """Return the tensors of the model, by name."""
        return self._copy.state


def _checked() -> None:
    """Check nothing, as the end of the block has checked everything."""


def _no_full_gradient() -> dict[str, Tensor]:
    raise ValueError(
        "SCAFFOLD's option 1 needs the gradient over all of a client's data, but your own training loop does not compute it: take option 2"
    )
