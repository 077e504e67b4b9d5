"""Lightning's Trainer and accelerate around ``round.model``: the same numbers as a plain loop's."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import methods
from fl_bn.methods import Method
from tests.doors.doors import apart
from tests.loops.loops import DOORS, RATE, clients, net

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the trainers, about machines, loggers and workers
METHODS: dict[str, Method] = {
    "fixbn": methods.fixbn(freeze_after=1),
    "fbn": methods.fbn(),
    "fedbn": methods.fedbn(),
    "hbn": methods.hbn(),
    "fedtan": methods.fedtan(),
}
EPOCHS = 2


def batches(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=4)


def plain(round: Any, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(round.model.parameters(), RATE, momentum=0.9)
    for _ in range(EPOCHS):
        for inputs, targets in batches(x, y):
            optimizer.zero_grad()
            F.cross_entropy(round.model(inputs), targets).backward()
            optimizer.step()


def lightning(round: Any, x: Tensor, y: Tensor) -> None:
    """With a validation after every epoch and one before the first, as the Trainer does by default."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs), targets)

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=EPOCHS, **quiet)
    trainer.fit(Module(round.model), batches(x, y), batches(x + 3, y))


def accelerate(round: Any, x: Tensor, y: Tensor) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(round.model.parameters(), RATE, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(round.model, optimizer, batches(x, y))
    for _ in range(EPOCHS):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x + 3)


def distributed(round: Any, x: Tensor, y: Tensor) -> None:
    """DistributedDataParallel, as ``torchrun`` starts it, with one process."""
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}-store", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(round.model)
            optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
            for _ in range(EPOCHS):
                for inputs, targets in batches(x, y):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
        finally:
            dist.destroy_process_group()


def accumulated(round: Any, x: Tensor, y: Tensor) -> None:
    """accelerate's gradient accumulation: two micro-batches a step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(round.model.parameters(), RATE, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(round.model, optimizer, DataLoader(TensorDataset(x, y), batch_size=2))
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("loop", [lightning, accelerate, distributed], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_of_a_plain_loop(method: str, loop: Callable[..., None], door: str) -> None:
    if method == "fedtan" and loop is distributed:
        return  # its clients take turns in this process, which has one process group
    found, want = (DOORS[door](net(), METHODS[method], clients(), one, 3) for one in (loop, plain))
    assert apart(found, want) < 1e-12
    other = DOORS[door](net(), METHODS["fbn" if method != "fbn" else "fixbn"], clients(), plain, 3)  # control: another method's numbers
    shared = found[0].keys() & other[0].keys()
    assert not apart([{k: one[k] for k in shared} for one in found], [{k: one[k] for k in shared} for one in other]) < 1e-6


def test_accumulation_of_accelerate_is_one_batch_to_fbn() -> None:
    """It normalises with constants, so two micro-batches are the batch, and the moments are those of both."""
    warnings.simplefilter("ignore")
    found, want = (DOORS["own loop"](net(), METHODS["fbn"], clients(), one, 2) for one in (accumulated, plain))
    assert apart(found, want) < 1e-12
