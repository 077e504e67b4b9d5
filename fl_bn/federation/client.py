"""Carry out the client's half of a round, around any training loop: (instruction, state) -> (reply, state).

``fl_bn.federation.own_loop`` uses ``LocalRound`` with a user's own training loop, ``fl_bn.federation.client_round`` with
fl-bn's training loop. These modules do the parts of a round, in this order:

* ``incoming`` loads the tensors of the instruction, and those that the client keeps.
* ``client_pass`` measures statistics before training, or in a statistics-only exchange.
* ``momentum`` carries the optimiser's buffers from the round before to the next one.
* ``recording`` records batches and steps, and ``first_batch`` runs FedTAN's exchange.
* ``contract`` checks the network and the loop at the end of training.
* ``outgoing`` makes the contents of the reply, and the state that the client keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from operator import index
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.bn.layers import freeze_statistics, mixes_samples
from fl_bn.bn.modes import frozen_affine, train_mode
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import in_backward, is_traced, moving_average, observe, pooled, whole
from fl_bn.bn.roles import batch_norms, inputs_like
from fl_bn.federation import outgoing
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.auxiliary import auxiliary as auxiliary_of
from fl_bn.federation.centring import Centring
from fl_bn.federation.client_pass import ClientPass
from fl_bn.federation.composition import rate_for
from fl_bn.federation.contract import ContractBroken, Lent
from fl_bn.federation.first_batch import Batch, Connect, FirstBatch
from fl_bn.federation.incoming import load
from fl_bn.federation.local import Draws
from fl_bn.federation.momentum import Momentum, restart
from fl_bn.federation.network import Copy
from fl_bn.federation.payload import Named, Sections
from fl_bn.federation.recording import Recorder, following, restored
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.methods import MOMENTS, Method, Phase, Place, StatisticsReport
from fl_bn.objectives import CONTROL, PLAIN, Start, Step
from fl_bn.task import CLASSIFICATION, Task

LOGGER = logging.getLogger("flwr")
TAKEN = frozenset({"after", "batch", "before", "kept", "loss", "measured", "steps", "waited"})
"""The names of the numbers that fl-bn itself puts into a reply."""


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
        in_own_loop: Whether a loop of the user's own trains the network, to which docs/contract.md applies.

    Attributes:
        recorder: The batches and steps of this round.

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
        in_own_loop: bool = False,
    ) -> None:
        self._copy = model if isinstance(model, Copy) else Copy.of(model, method)
        self.network = self._copy.network
        self.method, self.instruction, self.kept = method, instruction, kept
        self.settings = settings or LocalTraining(batch_size=2, epochs=1)
        self.phase, self.steps = instruction.phase, 0
        self.corrected = 0  # how many gradients the objective has computed
        self.in_own_loop, self.recorder = in_own_loop, Recorder()
        self._connect, self.first_batch = connect, FirstBatch(self.model, connect)
        self._observing, self._centring = ExitStack(), Centring({}, ())
        self._rates: list[float] = []  # of the steps of a user's own optimisers
        self._lent: Lent | None = None
        self._open = False
        self.statistics_pass = ClientPass(self.model, self.network.locality, instruction, kept, connect)
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
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.model.parameters()))

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
            ValueError: The server expects another objective, or the objective needs ``full_gradient``, which is None.
            ContractBroken: The network or the loop did not keep docs/contract.md.
        """
        expected, mine = self.instruction.objective, self.settings.objective.described
        if expected and expected != mine:
            raise ValueError(
                f"the server expects the objective {expected}, but this client's loop has {mine or 'none'}: give both sides the same "
                "objective=..., or give the server no objective"
            )
        with ExitStack() as stack:
            stack.callback(freeze_statistics, self.model, False)
            self.set_modes(self.model)
            self._lent = Lent(self, stack.enter_context(self._frozen_parameters()))
            control, full = self.instruction.sections.get(CONTROL, {}), full_gradient or _no_full_gradient
            start = Start(self.model, self.parameters, self.shared, self.kept.get("objective"), control, self.kept.counted, full)
            self._objective = self.settings.objective.begin(start)
            stack.callback(self._objective.close)
            centred = self.centred
            self._centring = stack.enter_context(Centring(dict(self.model.named_parameters()) if centred else {}, centred))
            stack.enter_context(self.first_batch)
            self._observe()
            stack.callback(self._observing.close)
            if self.in_own_loop:
                stack.callback(self.model.register_forward_pre_hook(self.recorder).remove)
                stack.enter_context(following(self))
            self._open = True
            try:
                yield self
            finally:
                self._open = False
            self._check()

    def _observe(self) -> None:
        """Let the BatchNorm layers record their inputs, or join FedTAN's exchange with the first of them."""
        if self.observes:
            self.recorder = Recorder(once=self.method.reports(self.phase) is StatisticsReport.FIRST)
            observing = observe(self.model, counts=self.recorder.counts, values=whole)
            self.recorder.observed = self._observing.enter_context(observing)
        elif self.phase is Phase.EXCHANGE and self.in_own_loop:
            self._observing.enter_context(observe(self.model, counts=self._joins))

    def _joins(self, layer: nn.Module, x: Tensor) -> bool:
        """Join the exchange if ``layer`` is the first that runs on the round's first batch. Return False: no moments are recorded."""
        ready = not (self.steps or self.first_batch.samples or self.recorder.pauses)
        if ready and layer.training and not in_backward() and not is_traced():
            self._check_private()
            self.begin_batch(len(x))
        return False

    @contextmanager
    def _frozen_parameters(self) -> Iterator[dict[str, nn.Parameter]]:
        """Let the parameters not learn that a method freezes in this round, so that an optimiser of all parameters does not change them.

        fl-bn's own loop gives its optimiser the other parameters alone. Gradients of an earlier round, or of another client, are cleared.
        """
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad and name not in self.parameters}
        frozen = learning if self.in_own_loop else {}
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        for parameter in self.model.parameters() if self.in_own_loop else ():
            parameter.grad = None
        try:
            yield frozen
        finally:
            for parameter in frozen.values():
                parameter.requires_grad_(True)

    def _check(self) -> None:
        """Check the contract at the end of training."""
        assert self._lent is not None
        if self.in_own_loop and self.steps:
            self.recorder.close()
        self._lent.check()

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

    def adopt(self, steps: int, observed: dict[str, list[Moments]], batch: int) -> None:
        """Store what ``federation.engines.vectorised`` counted and measured while it trained this client together with others.

        Args:
            steps: The number of local steps.
            observed: Layer -> the moments of each training batch.
            batch: The number of samples of the first batch.
        """
        self.steps, self.recorder.observed, self.first_batch.samples = steps, observed, batch

    @property
    def batch(self) -> Batch:
        """Return the number of samples of the first batch; 0 if it is unknown, as where no layer records batches.

        It is the number of rows that the layers got. A loop whose network folds something else into the rows, such as time, sets the
        number before the first forward pass by ``round.batch(32)``: the returned integer can be called.
        """
        return Batch.of(self.first_batch.samples or self.recorder.samples, self.begin_batch)

    def begin_batch(self, samples: int) -> None:
        """Begin the first batch, of ``samples`` samples.

        In phase EXCHANGE the layers exchange their statistics with the cohort from now on.

        Raises:
            ValueError: The number is below 1, the first step is over, or the client has joined the exchange
                already.
        """
        self.first_batch.begin(samples, self.steps)

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
            ValueError: The first step comes before the layer-wise exchange, see ``gradient_ready``.
        """
        self.count_step()

    def count_step(self, parameters: Container[int] | None = None, goes_on: bool = False) -> None:
        """Count one local step.

        Args:
            parameters: The ids of the parameters that the step moved. None: all.
            goes_on: Whether the step belongs to the one before, as no batch came between them. The number of steps then stays the same.

        Raises:
            ValueError: The first step comes before the layer-wise exchange, see ``gradient_ready``.
        """
        self._centring.stepped(parameters)
        if not goes_on:
            self.gradient_ready()
            if self.steps == 0:
                self.first_batch.samples = int(self.batch)
            self.steps += 1
        self.recorder.next_step()
        if self.recorder.all_done:
            self._observing.close()

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note that a step of ``optimizer`` of a user's loop begins, and centre the gradients that autograd did not compute."""
        self.recorder.begins(optimizer)
        if self._centring.active:
            self._centring.complete({id(p) for group in optimizer.param_groups for p in group["params"]})

    def step_ends(self, optimizer: Optimizer) -> None:
        """Count a step of ``optimizer`` of a user's loop, if it has a parameter of the network with a gradient.

        Raises:
            ValueError: The loop did not call ``round.backward``, though the round has an objective. Or the optimiser does
                not suit the objective, or the round does not work with opacus.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None and id(p) in self._ids}
        if not stepped:
            return
        self._check_private()
        if self.settings.objective is not PLAIN and not self.corrected:
            name = self.settings.objective.name
            raise ValueError(
                f"{name} computes or changes the gradients, but the loop did not call round.backward: call "
                "round.backward(lambda: loss_of(x), x) in place of loss.backward()"
            )
        goes_on = self.recorder.continues(optimizer, stepped)
        self.optimizer_stepped(optimizer, goes_on)
        self.count_step(stepped, goes_on)

    def optimizer_stepped(self, optimizer: Optimizer, goes_on: bool = False) -> None:
        """Record the learning rate of a step of ``optimizer``. Call this before ``count_step``.

        If ``method.restarts``, the momentum buffers are cleared after the first step of phase EXCHANGE (see ``momentum.restart``).

        Args:
            optimizer: The optimiser.
            goes_on: Whether the step belongs to the one before.

        Raises:
            ValueError: The objective needs plain SGD with one learning rate, but ``optimizer`` differs.
        """
        rate = rate_for(self.settings.objective, optimizer, self._rates[-1:] if goes_on else [])
        self._rates += [] if rate is None else [rate]
        restart(optimizer, self.method, self.phase, self.steps - goes_on)

    @property
    def mean_rate(self) -> float:
        """Return the mean learning rate of the steps. If none was recorded, return the instruction's."""
        seen = set(self._rates) or {self.instruction.learning_rate}
        return seen.pop() if len(seen) == 1 else sum(self._rates) / len(self._rates)

    def _check_private(self) -> None:
        """Check that the round works with opacus (differential privacy), if that computes the gradient of each single sample.

        opacus itself refuses torch's BatchNorm classes, and trainable layers with buffers. It accepts other layers that mix samples.

        Raises:
            ValueError: A layer mixes samples, so that a single sample has no gradient of its own; or the objective adds a
                part to the gradients, which opacus leaves out.
        """
        if self.steps or not any(hasattr(p, "grad_sample") for p in self.parameters.values()):
            return
        if mixing := [name for name, layer in batch_norms(self.model).items() if mixes_samples(layer)]:
            raise ValueError(
                f"BatchNorm layer {mixing[0]!r} normalises every sample with the statistics of its batch, so with {self.method.name} a "
                "single sample has no gradient of its own, and opacus's epsilon does not hold: choose a method without batch statistics, "
                "such as gn"
            )
        if self.settings.objective is not PLAIN:
            raise ValueError(
                f"opacus replaces the gradients, and so drops the part that {self.settings.objective.name} adds to them: train without an "
                "objective"
            )
        if self.method.reports(self.phase) in MOMENTS:
            LOGGER.warning(
                "%s sends the moments of a training batch, which the noise of opacus does not protect: opacus's epsilon holds only for the "
                "weights",
                self.method.name,
            )

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
        if objective is not PLAIN:
            self._check_private()
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
            with restored(self.model), self.recorder.paused():
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
        self.statistics_pass.run(batches, task)

    def report(self) -> dict[str, Moments]:
        """Return layer -> the moments to report: of the statistics pass if there was one, else of the training batches so far."""
        if self.statistics_pass.moments is not None:
            return self.statistics_pass.moments
        if self.method.reports(self.phase) is not StatisticsReport.MOVING:
            return pooled(self.recorder.observed)
        layers, observed = batch_norms(self.model), self.recorder.observed
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
        if self._open:
            self._check()
        samples, client = whole_number("samples", samples), whole_number("client", client)
        given = self._metrics(metrics or {})
        if self.trains:
            sections, numbers, kept = self._trained(samples, client, tells_drift)
            numbers = {**given, "loss": float(loss), **numbers}
        else:
            sections, numbers, kept = {"moments": outgoing.complete_moments(self, self.report())}, {}, self.kept
        numbers |= outgoing.numbers_of_data(self)
        weight = int(self.batch) if self.phase is Phase.EXCHANGE else samples
        return Reply(client, sections, samples, weight, numbers, self.instruction.round, self.network.signature), kept

    def _trained(self, samples: int, client: int, tells_drift: bool) -> tuple[Sections, dict[str, float], ClientState]:
        """Return the results of training: tensors to send, numbers for the record, and the state to keep.

        The arguments and the errors are those of ``reply``.
        """
        self._check_trained(samples)
        gradients = outgoing.ema_gradients(self) if self.settings.update == "gradients" else {}
        finish = self._objective.finish(self.steps, self.mean_rate)
        if gradients:
            outgoing.step_at_home(self, gradients)
        kept = outgoing.state_to_keep(self, gradients, finish, client)
        sections = outgoing.sections_to_send(self, gradients, finish, self.report())
        return sections, outgoing.numbers_of_training(self, kept, tells_drift), kept

    def _metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Check that there is something to send, and that the reply can carry the user's ``metrics``; return these as floats."""
        if self.trains and not self.loaded.newest:
            raise ValueError(
                f"a later round has loaded other tensors into the network of this round (round {self.instruction.round}), so a reply "
                "would send those: call round.reply before the network's next round begins, or convert a network for each client"
            )
        if self.in_own_loop and (taken := sorted(TAKEN & metrics.keys())):
            raise ValueError(
                f"metrics has {taken[0]!r}, a name that fl-bn gives to a number of its own ({', '.join(sorted(TAKEN))}): choose another; "
                "the training loss is an argument, round.reply(samples, loss)"
            )
        if self.trains and self.in_own_loop and not self.steps:
            raise ContractBroken("moved", self, "no step on round.model was made, so there is nothing to send (a client without a batch "
                                 "makes no reply)")
        return {name: _number(name, value) for name, value in metrics.items()}

    def _check_trained(self, samples: int) -> None:
        """Check that the method and the objective can use the training of this round on ``samples`` different samples."""
        reports, objective, number = self.method.reports(self.phase), self.settings.objective, self.instruction.round
        if self._lent is not None:
            self._lent.check_frozen()
        if (reports is StatisticsReport.FIRST or self.phase is Phase.EXCHANGE) and self.batch > samples:
            raise ValueError(
                f"the first batch had {int(self.batch)} samples, but round.reply got samples={samples}: give the number of different "
                "samples that this round trained on, and make forward passes that lead to no step inside fl_bn.unrecorded(round.model). If "
                "the network sees a sample several times (two views, frames of a clip), give the number of samples of the first batch "
                "before the first forward pass, such as round.batch(32)"
            )
        if objective.travels and self.steps and not self.mean_rate:
            raise ValueError(
                f"{objective.name} divides by the learning rate, but all {self.steps} local steps of round {number} had rate 0: begin a "
                "warm-up above 0"
            )
        if reports is StatisticsReport.PASS and self.statistics_pass.moments is None:
            raise ValueError(
                f"{self.method.name} reports moments that the client measures before training, but round.measure was not called: call "
                "round.measure(batches) before the first step"
            )

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


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an ``int``.

    Raises:
        ValueError: ``value`` is not of an integer type. A float is refused, even if it is whole.
    """
    try:
        return index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a whole number, such as {name}=40, but got {name}={value!r}: convert it by int(...)") from error


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metrics must be numbers by name, such as {{'accuracy': 0.75}}, but {name!r} is {value!r:.100}") from error


def _no_full_gradient() -> dict[str, Tensor]:
    raise ValueError(
        "SCAFFOLD's option 1 needs the gradient over all of a client's data, but your own training loop does not compute it: take option 2"
    )
