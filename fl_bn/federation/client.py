"""Carry out the client's half of a round: (instruction, state) -> (reply, state).

These modules do the parts of a round, in this order:

* ``client_tensors`` loads the instruction and the client's state, and makes the
  next ones.
* ``client_pass`` measures statistics before training, or in a statistics-only
  exchange.
* ``auxiliary`` carries the optimiser's buffers from round to round.
* ``recording`` records batches and steps, and runs FedTAN's exchange in the first
  batch.
* ``contract`` checks the network and the loop at the end of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.bn.layers import freeze_statistics
from fl_bn.bn.modules import frozen_affine, train_mode
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import in_backward, is_traced, observe, whole
from fl_bn.exchange.call import Exchange
from fl_bn.exchange.local import random_states, set_random_states
from fl_bn.federation import client_tensors
from fl_bn.federation.auxiliary import Momentum
from fl_bn.federation.client_pass import ClientPass
from fl_bn.federation.composition import check_rates
from fl_bn.federation.contract import ContractBroken, Lent, frozen_parameters
from fl_bn.federation.gradients import centring
from fl_bn.federation.network import Copy
from fl_bn.federation.optimizers import first_rate
from fl_bn.federation.recording import Connect, Recorder, following, restored
from fl_bn.federation.replies import TRAINED
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.methods import OBSERVED, Method, Phase, Place, StatisticsReport
from fl_bn.methods.fedtan import exchanging
from fl_bn.objectives import CONTROL, Finish, Start, Step
from fl_bn.task import CLASSIFICATION, Task


class LocalRound:
    """Carry out one client's half of one round: train inside ``open``, then call ``reply``.

    Args:
        model: The network, converted for ``method``. The server's and the client's
            own tensors are loaded into it.
        kept: The client's state after its last round. Default: none.
        settings: The settings of fl-bn's training loop. Default: for a user's own
            loop.
        connect: Joins the layer-wise exchange of FedTAN or, in phase MEASURE, of a
            pass layer by layer, see ``Connect``.
        in_own_loop: Whether a user's loop trains the network, to which
            docs/contract.md applies.

    Raises:
        ValueError: The server's model or objective differs from those of this
            client.
        WireError: A tensor of the instruction is not as expected.
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
        self.copy = model if isinstance(model, Copy) else Copy.of(model, method)
        self.network, self.trains = self.copy.network, instruction.trains
        self.method, self.instruction, self.kept = method, instruction, kept
        self.settings = settings or LocalTraining(batch_size=2, epochs=1)
        self.phase, self.reports, self.steps = instruction.phase, method.reports(instruction.phase), 0
        self.corrected = 0  # how many gradients the objective has computed
        self.private = False  # whether opacus computes the gradients
        self.in_own_loop, self.observes = in_own_loop, self.reports in OBSERVED
        self._connect, self._exchanging = connect, ExitStack()
        self.exchange: Exchange | None = None  # the layer-wise exchange, once the client has joined it
        self._observing = ExitStack()
        self._rates: list[float] = []  # of the steps of a user's own optimisers
        self._lent: Lent | None = None  # None as long as nothing is trained
        self.finish = Finish()  # the objective's tensors at the end of the round
        self._open = False
        self.auxiliary = self.settings.auxiliary if self.trains else ()  # the tensors that are sent with the weights
        self._first_samples, self._ids = 0, frozenset(map(id, self.model.parameters()))
        self.loaded = client_tensors.load(self.copy, instruction, kept, self.settings.objective, self.auxiliary)

    @property
    def model(self) -> nn.Module:
        """Return the network that this round trains."""
        return self.copy.model

    @cached_property
    def recorder(self) -> Recorder:
        """Return what records batches, of a user's loop or for the method."""
        return Recorder(once=self.reports is StatisticsReport.FIRST)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this round's optimiser updates, by name."""
        return self.copy.trainable(self.phase)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Return the names of shared ``parameters``."""
        return frozenset(name for name in self.parameters if self.network.locality.place[name] is Place.SHARED)

    @cached_property
    def momentum(self) -> Momentum | None:
        """Return the optimiser's buffers, if they outlive a round."""
        if self.settings.maintain == "reset":
            return None
        return Momentum(self.settings, self.parameters, self.shared, self.instruction.sections, self.kept.get("optimizer"))

    @cached_property
    def statistics_pass(self) -> ClientPass:
        """Return the statistics pass of a round that reports one."""
        return ClientPass(self.model, self.network.locality, self.instruction, self.kept, self._connect)

    @contextmanager
    def open(self) -> Iterator[LocalRound]:
        """Prepare the model for training inside the block, and yield this round.

        The model is in training mode, frozen where this round freezes it, and
        recorded if the method reports statistics of training batches.

        Raises:
            ContractBroken: The network or the loop did not keep docs/contract.md.
        """
        with ExitStack() as stack:
            stack.callback(freeze_statistics, self.model, False)
            self.set_modes(self.model)
            self._observe()  # before this round freezes parameters: layers that their owner has frozen report nothing
            stack.callback(self._observing.close)
            self._lent = Lent(self, stack.enter_context(frozen_parameters(self)) if self.in_own_loop else {})
            control = self.instruction.sections.get(CONTROL, {})
            start = Start(self.model, self.parameters, self.shared, self.kept.get("objective"), control, self.kept.counted)
            self._objective = self.settings.objective.begin(start)
            stack.callback(self._objective.close)
            if self.method.centres(self.phase):
                stack.enter_context(centring(dict(self.model.named_parameters()), self.network.centred))
            stack.enter_context(self._exchanging)
            if self.in_own_loop:
                stack.callback(self.model.register_forward_pre_hook(self.recorder).remove)
                stack.enter_context(following(self))
            self._open = True  # for ever if the block raises: then a reply is checked again
            yield self
            self._lent.check()
            self._open = False

    def _observe(self) -> None:
        """Let BatchNorm layers record their inputs, or join FedTAN's exchange."""
        if self.observes:
            observing = observe(self.model, counts=self.recorder.counts, values=whole)
            self.recorder.observed = self._observing.enter_context(observing)
        elif self.phase is Phase.EXCHANGE and self.in_own_loop:
            self._observing.enter_context(observe(self.model, counts=self._joins))

    def _joins(self, layer: nn.Module, x: Tensor) -> bool:
        """Join the exchange at the first layer called. Return False: nothing is recorded."""
        ready = not (self.steps or self._first_samples or self.recorder.pauses)
        if ready and layer.training and not in_backward() and not is_traced():
            self._note_opacus()
            if not self.private:  # otherwise the end of the round is refused, and no statistics have left
                self.batch(len(x))
        return False

    def _note_opacus(self) -> None:
        self.private = any(hasattr(p, "grad_sample") for p in self.parameters.values())

    def set_modes(self, model: nn.Module) -> None:
        """Put ``model`` into training mode, but for held parts, and freeze layers."""
        freeze_statistics(model, layers=None if self.method.freezes_statistics(self.phase) else frozen_affine(model))
        train_mode(model)

    def adopt(self, steps: int, observed: dict[str, list[Moments]], batch: int) -> None:
        """Store steps, moments by layer and first batch's size from an engine."""
        self.steps, self.recorder.observed, self._first_samples = steps, observed, batch

    @property
    def first_samples(self) -> int:
        """Return the first batch's samples, as layers' rows or ``batch`` say; 0 if unknown."""
        return self._first_samples or self.recorder.samples

    def batch(self, samples: int) -> None:
        """Say the number of samples of the first batch, before its forward pass.

        A loop calls this if its network folds something else, such as time, into
        the rows of a batch. In phase EXCHANGE the layers exchange their statistics
        from now on.

        Raises:
            ValueError: The number is below 1, or comes after the first step or the
                exchange's start.
        """
        if samples < 1 or self.steps or self.exchange is not None:
            raise ValueError(
                "a round's first batch must have at least 1 sample, and round.batch(n) says how many, once and before the first forward "
                f"pass in training mode, but got {samples} samples after {self.steps} steps and a batch of {self._first_samples}"
            )
        self._first_samples = samples
        if self._connect is not None and self.phase is Phase.EXCHANGE:
            self.exchange = self._connect(samples)
            self._exchanging.enter_context(exchanging(self.model, self.exchange, lambda: self.recorder.pauses))

    def step_done(self, goes_on: bool = False) -> None:
        """Count a local step, also of a loop without a torch optimiser (``p -= lr * p.grad``).

        One that ``goes_on`` with the one before is not counted.
        """
        if not goes_on:
            if self.steps == 0:
                self._end_first_batch()
            self.steps += 1
        if (self.observes or self.in_own_loop) and self.recorder.next_step():
            self._observing.close()

    def _end_first_batch(self) -> None:
        """Store the number of samples, and end the exchange, once no backward pass runs."""
        self._first_samples = self.first_samples
        if self.exchange is not None and in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._exchanging.close)
        else:
            self._exchanging.close()

    def step_ends(self, optimizer: Optimizer) -> None:
        """Count a step of a user's ``optimizer``, if the network has a gradient."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None and id(p) in self._ids}
        if not stepped:
            return
        if not self.steps:
            self._note_opacus()
        goes_on = self.recorder.continues(optimizer, stepped)
        self.optimizer_stepped(optimizer, goes_on)
        self.step_done(goes_on)

    def optimizer_stepped(self, optimizer: Optimizer, goes_on: bool = False) -> None:
        """Record a step's rate, and clear the optimiser's buffers if the method says so.

        Raises:
            ValueError: The objective needs plain SGD with one learning rate.
        """
        if self.settings.objective.travels:
            check_rates(self.settings.objective, optimizer, self._rates[-1:] if goes_on else [])
        rate = first_rate(optimizer)
        self._rates += [] if rate is None else [rate]
        if self.method.restarts and self.phase is Phase.EXCHANGE and self.steps == goes_on:
            optimizer.state.clear()

    @property
    def mean_rate(self) -> float:
        """Return the steps' mean learning rate, by default the instruction's."""
        seen = set(self._rates) or {self.instruction.learning_rate}
        return seen.pop() if len(seen) == 1 else sum(self._rates) / len(self._rates)

    def backward(self, forward: Callable[[], Tensor], x: Any, call: Callable[[nn.Module, Any], Any] | None = None) -> Tensor:
        """Add a batch's gradient, with the objective's terms, to the parameters' ``grad``.

        Call this in place of ``loss.backward()``, once per optimiser step.

        Args:
            forward: Computes the loss of the batch.
            x: The inputs of the batch.
            call: Calls a network on inputs, as ``Task.forward`` does. None: the
                inputs are its only argument.

        Returns:
            The loss, without the objective's own terms.

        Raises:
            ContractBroken: No parameter got a gradient from the first batch.
        """
        states = random_states() if self.settings.objective.repeats else None

        loss = self._objective.gradient(Step(x, forward, partial(self._again, forward, states), call))
        self.corrected += 1
        if self.steps == 0 and all(p.grad is None for p in self.parameters.values()):
            raise ContractBroken("moved", self, "the loss gave no parameter of the network a gradient")
        return loss

    def _again(self, forward: Callable[[], Tensor], states: Any) -> Tensor:
        """Compute a batch's loss again, from random ``states``."""
        if states is not None:
            set_random_states(states)
        with restored(self.model), self.recorder.paused():
            return forward()

    def measure(self, batches: Iterable[Any], task: Task = CLASSIFICATION) -> None:
        """Measure the moments of every BatchNorm layer over ``batches``, read by ``task``.

        The model stays unchanged. HBN needs this before training.

        Raises:
            ValueError: A local step was made already.
        """
        if self.steps:
            raise ValueError(
                f"round.measure measures with the weights that the server sent, but this round has made {self.steps} local steps: "
                "measure before the first step"
            )
        self.statistics_pass.run(batches, task)

    def reply(
        self,
        samples: int,
        loss: float = float("nan"),
        *,
        client: int = 0,
        metrics: Mapping[str, float] | None = None,
    ) -> tuple[Reply, ClientState]:
        """Make the reply to the server, and the state that the client keeps for later.

        Args:
            samples: The number of different samples that the client trained on, its
                weight in averages. In phase EXCHANGE, the weight is the size of the
                first batch instead.
            loss: The mean loss over the training batches.
            client: The client's number.
            metrics: Further numbers for the record, by name: in a loop of your own,
                for its ``client_metrics`` and, weighted by samples,
                ``own_metrics``. fl-bn's own numbers, such as ``steps``, replace
                those of their names.

        Raises:
            ContractBroken: Nothing can be replied, see ``contract``.
        """
        if self._open and self._lent is not None:
            self._lent.check()
        own = TRAINED.fields if self.in_own_loop else ()
        given = {name: float(value) for name, value in (metrics or {}).items() if name not in own}
        if self._lent is not None:
            if self.in_own_loop:
                self._lent.check(samples)
            self.finish = self._objective.finish(self.steps, self.mean_rate)
        return client_tensors.reply(self, index(samples), float(loss), index(client), given)

    def sit_out(self, client: int, metrics: Mapping[str, float]) -> tuple[Reply, ClientState]:
        """Leave the round, with a reply without tensors and the state as before."""
        if self._connect is not None:
            self._connect(0).close()
        return Reply(client, {}, 0, 0, dict(metrics), self.instruction.round, self.network.signature), self.kept
