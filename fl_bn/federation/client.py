"""Carry out the client's half of a round, around any training loop: (instruction, state) -> (reply, state).

``fl_bn.federation.own_loop`` uses it with a user's own training loop, ``fl_bn.federation.client_round`` with
fl-bn's training loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import count
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_bn.federation import schema
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.auxiliary import auxiliary as auxiliary_of
from fl_bn.federation.blocks import all_finite
from fl_bn.federation.centring import Centring
from fl_bn.federation.divergence import BAD_INPUTS
from fl_bn.federation.finite_inputs import InputWatch
from fl_bn.federation.first_batch import Batch, Connect, FirstBatch
from fl_bn.federation.layer_by_layer import Forward, Inputs, LayerOrder, called, layer_by_layer
from fl_bn.federation.layer_checks import check_layers, watching_calls
from fl_bn.federation.measuring import measured
from fl_bn.federation.momentum import SECTIONS, Buffers, buffers_of, from_kept, load_buffers, restart
from fl_bn.federation.network import Copy
from fl_bn.federation.outgoing import (
    complete_moments,
    ema_gradients,
    home_drift,
    sections_to_send,
    state_to_keep,
    step_at_home,
)
from fl_bn.federation.payload import Named, Sections, to_numpy
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training_passes import TrainingPasses
from fl_bn.federation.unrecorded import Draws, unrecorded
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.layers import CONSTANT, OwnBatchNorm, freeze_statistics
from fl_bn.methods import Method, Phase, StatisticsPass, StatisticsReport
from fl_bn.modes import frozen_affine, train_mode
from fl_bn.moments import Moments
from fl_bn.objectives import CONTROL, PLAIN, Objective, Start, Step
from fl_bn.observation import moving_average, observe, pooled, whole
from fl_bn.roles import Role, batch_norms, inputs_like, roles
from fl_bn.task import CLASSIFICATION, Task, batch_size, to_device

LOGGER = logging.getLogger("flwr")
_LOADED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Network -> the number of the ``LocalRound`` that has loaded it last. A network may serve several clients in turn."""
_NUMBERS = count()
TAKEN = frozenset({"after", "batch", "before", "kept", "loss", "measured", "steps", "waited", BAD_INPUTS})
"""The names of the numbers that fl-bn itself puts into a reply."""


def trainable(model: nn.Module, method: Method, phase: Phase, role: Mapping[str, Role] | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimiser updates in ``phase``, by name.

    Parameters with ``requires_grad=False``, and those that the method freezes in ``phase``, are left out.

    Args:
        model: The converted network.
        method: The method.
        phase: The phase of the round.
        role: Name -> role of each tensor. Default: ``roles(model)``.
    """
    role = roles(model) if role is None else role
    fixed = method.frozen if phase is Phase.FROZEN else frozenset()
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad and role[name] not in fixed}


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
        ValueError: The server's model differs from ``model``, or ``connect`` does not fit the phase.
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
        self.rates: list[float] = []  # the learning rates of the steps of a user's own optimiser
        self.measured_samples = 0
        self.tested: tuple[float | None, float | None] = (None, None)  # the metric on the client's own test data, before and after training
        self.moments: dict[str, Moments] | None = None  # measured in a statistics pass, without layers held in evaluation mode
        self.buffers: Buffers = {}
        self._connect, self._first = connect, FirstBatch(self.model, connect)
        self._observing, self.passes = ExitStack(), TrainingPasses({})
        self._centring = Centring({}, ())
        self._values: dict[str, Tensor] = {}
        self.in_own_loop = False  # set by own_loop: a user's loop may make passes that lead to no step
        self.input_watch = InputWatch()
        self._load()
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
        return trainable(self.model, self.method, self.phase, self.network.role)

    @property
    def auxiliary(self) -> tuple[Auxiliary, ...]:
        """Return the kinds of auxiliary tensors that are sent with the weights; empty if the client only measures."""
        return auxiliary_of(self.settings) if self.trains else ()

    def _load(self) -> None:
        instruction, model = self.instruction, self.model
        expected = self.network.instruction(self.auxiliary)
        arrays = {section: to_numpy(tensors) for section, tensors in instruction.sections.items()}
        if instruction.signature and (mine := self.network.signature) != instruction.signature:
            raise ValueError(
                f"the server's model has signature {instruction.signature}, but this client's has {mine}: "
                f"{schema.difference(expected, arrays)}. Give the server's network, converted for its method: convert(model, method). Here "
                f"the method is {self.method.name}"
            )
        if self.trains and self.settings.objective.travels and CONTROL not in instruction.sections:
            raise ValueError(
                f"this client's loop has the objective {self.settings.objective.described}, but the server sends no control variates: give "
                "the server the same objective=..."
            )
        if instruction.objective and instruction.objective != (mine := self.settings.objective.described):
            raise ValueError(
                f"the server expects the objective {instruction.objective}, but this client's loop has {mine or 'none'}: give both sides "
                "the same objective=..., or the server none"
            )
        expected.check(arrays)
        beside = {extra.section for extra in self.auxiliary}
        tensors = {name: t for key in instruction.sections.keys() - beside for name, t in instruction.sections[key].items()}
        self._copy.load(self._unmixed() | tensors | self.kept.get("local"))
        _LOADED[self.model] = self._number = next(_NUMBERS)
        self._before = {} if self.method.shares(Role.STATISTIC) else running_statistics(model)

    def _unmixed(self) -> dict[str, Tensor]:
        """Return a zero tensor for each of HBN's mixing logits, by name; empty if the logits are shared.

        They replace the values in ``model``, which may be those of another client.
        """
        if Role.MIXING not in self.method.local:
            return {}
        return {name: torch.zeros_like(p) for name, p in self.parameters.items() if self.network.role[name] is Role.MIXING}

    @contextmanager
    def open(self, full_gradient: Callable[[], dict[str, Tensor]] | None = None) -> Iterator[LocalRound]:
        """Prepare the model for training inside the ``with`` block, and yield this round.

        The model is in training mode, and layers that this round freezes are frozen. If the method reports
        statistics of training batches, the moments of the BatchNorm layers are recorded.

        Args:
            full_gradient: Computes the gradient of the loss over all of the client's samples. SCAFFOLD's
                option 1 needs it.

        Raises:
            ValueError: The training loop changed frozen statistics, or trained a copy of the model.
        """
        self.set_modes(self.model)
        layers = batch_norms(self.model)
        own = {name: layer for name, layer in layers.items() if isinstance(layer, OwnBatchNorm)}
        freezing = {name for name, layer in own.items() if layer.frozen or isinstance(layer, CONSTANT)}
        statistics = running_statistics(self.model) if freezing else {}
        frozen = {name: before for name, before in statistics.items() if name in freezing}
        parameters = self.parameters
        shared = frozenset(name for name in parameters if self.method.shares(self.network.role[name]))
        control = self.instruction.sections.get(CONTROL, {})
        full = full_gradient or _no_full_gradient
        start = Start(self.model, parameters, shared, self.kept.get("objective"), control, self.kept.counted, full)
        self._objective = self.settings.objective.begin(start)
        centred = self.centred
        self._centring = Centring(dict(self.model.named_parameters()) if centred else {}, centred)
        try:
            if self.observes:
                first = self.method.reports(self.phase) is StatisticsReport.FIRST
                self.passes = TrainingPasses(parameters, first, batch_norms(self.model) if self.in_own_loop else None)
                self._observing.enter_context(self.passes.watching())
                leaves = self.passes.follow if self.in_own_loop else None
                observing = observe(self.model, counts=self.passes.counts, values=whole, leaves=leaves)
                self.passes.observed = self._observing.enter_context(observing)
            with self._first, self._centring, self.input_watch.watching(self.model), watching_calls(self):
                yield self
            if self.in_own_loop and self.steps:
                self.passes.close()
        finally:
            self._observing.close()
            self._objective.close()
            freeze_statistics(self.model, False)
        check_layers(self, frozen)

    @property
    def centred(self) -> list[str]:
        """Return the names of the weights whose gradients are centred in this round (see ``centring``)."""
        return self.network.centred if self.method.centres(self.phase) else []

    @property
    def freezes(self) -> bool:
        """Tell whether the running statistics are frozen in this round."""
        return self.phase is Phase.FROZEN and Role.STATISTIC in self.method.frozen

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
        self.passes.observed, self._first.samples = observed, batch

    @property
    def begun(self) -> bool:
        """Tell whether the round's first batch has begun, so that its number of samples is known."""
        return self._first.samples > 0

    @property
    def batch(self) -> Batch:
        """Return the number of samples of the first batch; 0 as long as it is unknown.

        fl-bn usually finds this number by itself. If it cannot, set the number before the first forward pass by
        ``round.batch(32)``: the returned integer can be called.
        """
        return Batch.of(self._first.samples or self.passes.samples or self._first.inputs, self.begin_batch)

    def begin_batch(self, samples: int) -> None:
        """Begin the first batch, of ``samples`` samples.

        In phase EXCHANGE the layers exchange their statistics with the cohort from now on.

        Raises:
            ValueError: The number is below 1, the first step is over, or the client has joined the exchange
                already.
        """
        self._first.begin(samples, self.steps)

    def inputs_seen(self, samples: int) -> None:
        """Add ``samples`` to the number of input samples before the first step. ``batch`` returns it if no other number is known."""
        self._first.inputs += samples

    def gradient_ready(self) -> None:
        """End the layer-wise exchange before the first step. Call this when the gradient of a batch is complete."""
        if self.steps == 0:
            self._first.end(self.method.name)

    def step_done(self) -> None:
        """Count one local step.

        A loop that makes its steps without a torch optimiser (``p -= lr * p.grad``) calls this method after
        each step.

        Raises:
            ValueError: The method centres gradients, and the step was made along one that is not centred.
        """
        if wrong := self._centring.stepped(self._values):
            raise ValueError(
                f"{self.method.name} centres gradients that autograd computes for round.model, but {wrong[0]} moved along another gradient "
                "(of torch.func, say): write it to p.grad and step by a torch.optim optimiser. Or switch centring off, at the server and "
                "at all clients, by the method dataclasses.replace(method, centre=False)"
            )
        self.count_step()

    def watch_values(self, values: Mapping[str, Tensor]) -> None:
        """Let ``step_done`` find steps that torch does not see, through ``p.data``. ``values`` has copies of the parameters by name."""
        self._values = dict(values)

    def count_step(self, goes_on: bool = False, parameters: Container[int] | None = None) -> None:
        """Count one local step, without the check of ``step_done`` that gradients are centred.

        Args:
            goes_on: Whether a second optimiser made this step after the same backward pass. If so, it is a part of the
                step that was counted last, and the number of steps stays the same.
            parameters: The ids of the parameters that the step changed. None: all.
        """
        self._centring.stepped()
        if goes_on:
            self.passes.settle(parameters)
            self.passes.next_step()
            return
        self.gradient_ready()
        self.passes.settle(parameters)
        if self.steps == 0:
            self._first.samples = int(self.batch)
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

        If the method asks for it, the momentum buffers are cleared after the first step (see ``momentum.restart``).

        Args:
            optimizer: The optimiser.
            goes_on: Whether the step is a part of the step that was counted last, see ``count_step``.

        Raises:
            ValueError: The objective needs plain SGD at one learning rate, but this is another optimiser, or has another rate.
        """
        check_optimizer(self.settings.objective, optimizer)
        restart(optimizer, self.method, self.phase, self.steps - goes_on)
        rate = optimizer.param_groups[0].get("lr")
        if rate is None:  # an optimiser without a learning rate
            return
        if goes_on and self.settings.objective.travels and self.rates and float(rate) != self.rates[-1]:
            raise ValueError(_one_rate(self.settings.objective, sorted({self.rates[-1], float(rate)})))
        self.rates.append(float(rate))

    def backward(self, forward: Callable[[], Tensor], x: Any) -> Tensor:
        """Compute the gradient of one batch, including the objective's terms, and add it to the parameters' ``grad``.

        Call it in place of ``loss.backward()``, once per optimiser step.

        Args:
            forward: Computes the loss of the batch.
            x: The inputs of the batch.

        Returns:
            The loss, without the objective's own terms.

        Raises:
            ValueError: The objective corrects the gradient of a whole step, but this is the second call before the optimiser's step.
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

        self.corrected += 1
        return self._objective.gradient(Step(x, forward, again))

    def measure(self, batches: Iterable[Any], task: Task = CLASSIFICATION) -> None:
        """Measure the moments of every BatchNorm layer over ``batches``; the model stays unchanged.

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
        if self.trains and isinstance(batches, Iterator):
            raise ValueError(
                f"round.measure got a {type(batches).__name__}, which it would use up before training: give a list of batches or a "
                "DataLoader"
            )
        if self._connect is not None and isinstance(batches, Iterator):
            batches = list(batches)  # an exchange goes through them more than once
        self.moments = self.measured(partial(self.inputs, batches, task), task.forward)

    def measured(self, inputs: Inputs, forward: Forward = called) -> dict[str, Moments]:
        """Return layer -> the moments of each BatchNorm layer that this round needs, over all batches of ``inputs()``.

        In a statistics-only exchange that goes layer by layer, the client exchanges the statistics of each layer with
        the cohort. If the network has no fixed order of layers, the client leaves the exchange and measures all layers in one pass.

        Args:
            inputs: Returns the batches of inputs, the same in every call.
            forward: Runs the network on a batch of inputs.
        """
        noted = self.input_watch.noted
        if self._connect is not None and not self.trains:
            order = LayerOrder.at(self.model, inputs, forward)
            exchange = self._connect(0 if order.problem else 1)
            if not order.problem:
                return layer_by_layer(self.model, lambda: noted(inputs()), order, exchange, self.instruction.memory, forward)
            exchange.close()
            LOGGER.warning("this client leaves the layer-wise exchange and measures all layers in one pass: %s", order.problem)
        return measured(self.model, noted(inputs()), self.statistics_pass, forward)

    def inputs(self, batches: Iterable[Any], task: Task) -> Iterator[Any]:
        """Yield the inputs of each batch, until the batches have as many samples as the statistics pass needs.

        Args:
            batches: Batches, in a form that ``task`` reads.
            task: Reads the inputs of a batch.
        """
        device, most = inputs_like(self.model).device, self.statistics_pass.samples
        self.measured_samples = 0
        for batch in batches:
            x, y = task.read(batch)
            self.measured_samples += batch_size(x, y)
            yield to_device(x, device)
            if 0 < most <= self.measured_samples:
                return

    @property
    def statistics_pass(self) -> StatisticsPass:
        """Return what this round's statistics pass measures, and on how many samples."""
        own = self.method.statistics_pass
        return own if self.trains else StatisticsPass.for_exchange(self.instruction.measured, own.samples)

    def load_momentum(self, optimizer: Optimizer) -> None:
        """Load the momentum buffers of earlier rounds into ``optimizer``, from the server or the client's state (see ``maintain``)."""
        if self.settings.maintain != "reset":
            load_buffers(optimizer, self.parameters, self.maintained)

    @property
    def maintained(self) -> Buffers:
        """Return the optimiser's buffers at the start of the round. They are empty if every round starts without momentum."""
        buffers = from_kept(self.kept.get("optimizer"))
        if self.settings.maintain == "global":
            for key, section in SECTIONS[self.settings.optimizer].items():
                buffers[key] = buffers.get(key, {}) | self.instruction.sections[section]
        return buffers

    def keep_momentum(self, optimizer: Optimizer) -> None:
        """Store the buffers of ``optimizer``, unless every round starts without momentum (``maintain="reset"``)."""
        if self.settings.maintain != "reset":
            self.buffers = buffers_of(optimizer, self.parameters, SECTIONS[self.settings.optimizer])

    def report(self) -> dict[str, Moments]:
        """Return layer -> the moments to report: of the statistics pass if there was one, else of the training batches so far."""
        if self.moments is not None:
            return self.moments
        if self.method.reports(self.phase) is not StatisticsReport.MOVING:
            return pooled(self.passes.observed)
        layers = batch_norms(self.model)
        return {name: moving_average(layers[name], batches) for name, batches in self.passes.observed.items() if batches}

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
            metrics: Further numbers for the record, by name.
            tells_drift: Whether the reply says how far the client's own running statistics moved (FedBN).

        Returns:
            The reply, and the state.

        Raises:
            ValueError: A loop of the user's own made no step, or a later round has loaded the network. Or ``samples`` or ``client`` is
                not a whole number, a name in ``metrics`` is taken, or the first batch has more than ``samples`` samples. Or the method
                needs ``round.measure`` before training, and it was not called.
        """
        samples, client = whole_number("samples", samples), whole_number("client", client)
        if self.trains and _LOADED.get(self.model) != self._number:
            raise ValueError(
                f"a later round has loaded other tensors into the network of this round (round {self.instruction.round}), so it would send "
                "those: call round.reply before the network's next round begins, or convert a network for each client"
            )
        if self.in_own_loop and (taken := sorted(TAKEN & (metrics or {}).keys())):
            raise ValueError(
                f"metrics has {taken[0]!r}, a name that fl-bn gives to a number of its own ({', '.join(sorted(TAKEN))}): choose another; "
                "the training loss is an argument, round.reply(samples, loss)"
            )
        if self.trains and self.in_own_loop and not self.steps:
            raise ValueError(
                f"no step on round.model was made in round {self.instruction.round}, so there is nothing to send: train round.model itself "
                "(not the network before convert, nor a copy) inside the block, by an optimiser of round.model.parameters(), and make the "
                "reply after the loop. A client without a batch makes no reply (if round.steps: ...)"
            )
        weight = samples
        if self.trains:
            sections, numbers, kept = self._trained(samples, client, tells_drift)
            numbers = {**(metrics or {}), "loss": float(loss), **numbers}
            weight = int(self.batch) if self.phase is Phase.EXCHANGE else samples
        else:
            sections, numbers, kept = {"moments": complete_moments(self, self.moments or {})}, {}, self.kept
        if self.measured_samples:
            numbers["measured"] = self.measured_samples  # the number of samples in the statistics pass
        sent = (tensor for tensors in sections.values() for tensor in tensors.values())
        if self.input_watch.suspects and not all_finite(sent) and (wrong := self.input_watch.count()):
            numbers[BAD_INPUTS] = wrong
        before, after = self.tested
        if before is not None and after is not None:
            numbers |= {"before": before, "after": after}
        return Reply(client, sections, samples, weight, numbers, self.instruction.round, self.network.signature), kept

    def _trained(self, samples: int, client: int, tells_drift: bool) -> tuple[Sections, dict[str, float], ClientState]:
        """Return the results of training: tensors to send, numbers for the record, and the state to keep.

        The arguments and the errors are those of ``reply``.
        """
        reports = self.method.reports(self.phase)
        if reports is StatisticsReport.FIRST and self.batch > samples:
            raise ValueError(
                f"the first batch had {int(self.batch)} samples, but round.reply got samples={samples}: give the number of different "
                "samples that this round trained on, and put round.model into evaluation mode for forward passes that do not train. If "
                "the network sees a sample several times (two views, frames of a clip), call round.batch(n) before the first forward pass"
            )
        gradients = ema_gradients(self) if self.settings.update == "gradients" else {}
        if self.settings.objective.travels and self.steps and not self._learning_rate():
            raise ValueError(
                f"{self.settings.objective.name} divides by the learning rate, but all {self.steps} local steps of round "
                f"{self.instruction.round} had rate 0: begin a warm-up above 0"
            )
        finish = self._objective.finish(self.steps, self._learning_rate())
        if gradients:
            step_at_home(self, gradients)
        if reports is StatisticsReport.PASS and self.moments is None:
            raise ValueError(
                f"{self.method.name} reports moments that the client measures before training, but round.measure was not called: call "
                "round.measure(batches) before the first step"
            )
        numbers: dict[str, float] = {"steps": self.steps, "waited": self._first.waited}
        numbers |= home_drift(self, self._before) if tells_drift else {}
        numbers |= {"batch": int(self.batch)} if reports is StatisticsReport.FIRST else {}
        kept = state_to_keep(self, gradients, finish, client)
        if kept.sections:
            numbers["kept"] = self.kept.round
        return sections_to_send(self, gradients, finish, self.report()), numbers, kept

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

    def _learning_rate(self) -> float:
        """Return the mean learning rate of the optimiser's steps. Without a recorded step, return the instruction's rate."""
        seen = set(self.rates) or {self.instruction.learning_rate}
        return seen.pop() if len(seen) == 1 else sum(self.rates) / len(self.rates)

    @property
    def state(self) -> Named:
        """Return the tensors of the model, by name."""
        return self._copy.state


def _one_rate(objective: Objective, rates: list[float]) -> str:
    return (
        f"{objective.name}'s control variates are changes of weights divided by one learning rate, but the loop steps with the rates "
        f"{', '.join(f'{rate:g}' for rate in rates)}: give all parameters the same rate"
    )


def check_optimizer(objective: Objective, optimizer: Optimizer) -> None:
    """Check that ``optimizer`` suits ``objective``.

    Raises:
        ValueError: The objective needs plain SGD at one learning rate, and this is another optimiser, or has several rates.
    """
    if objective.travels and (not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups)):
        raise ValueError(
            f"{objective.name}'s control variates are means of the gradients of plain SGD, but the optimiser is "
            f"{type(optimizer).__name__}{' with momentum' * isinstance(optimizer, SGD)}: take torch.optim.SGD without momentum"
        )
    if not objective.travels:
        return
    if any(group["maximize"] for group in optimizer.param_groups):
        raise ValueError(f"{objective.name} lowers the loss, but the optimiser has maximize=True: change the sign of the loss instead")
    if len(rates := sorted({float(group["lr"]) for group in optimizer.param_groups})) > 1:
        raise ValueError(_one_rate(objective, rates))


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an ``int``.

    Raises:
        ValueError: ``value`` is not of an integer type. A float is refused, even if it is whole.
    """
    try:
        return index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a whole number, such as {name}=40, but got {name}={value!r}: convert it by int(...)") from error


def _no_full_gradient() -> dict[str, Tensor]:
    raise ValueError(
        "SCAFFOLD's option 1 needs the gradient over all of a client's data, but your own training loop does not compute it: take option 2"
    )
