"""Define static BN: batch statistics in training, and statistics measured before each evaluation.

HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, Diao, Ding,
Tarokh, ICLR 2021, section 3 (sBN). In the paper the clients report these statistics once, and each layer is
measured while those below it normalise with batch statistics, which is exact in the first layer only. Here
the clients make passes, each with the pooled statistics of the pass before, until all layers have those of
the union of all data (``Refresh.EXACT``). Training never uses these statistics.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fl_bn.bn.layers import SharedNorm
from fl_bn.methods.method import Method, Refresh


class StaticBatchNorm(SharedNorm):
    """Normalise a training batch with the batch's own statistics, and keep no running average of them."""

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *): with its own moments in training, else with running statistics."""
        self.check_input(x)
        if self.observation is not None:
            self.observation(self, x)
        if not self.training:
            return self.normalise_shared(x)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def static_bn() -> Method:
    """Make the method Static BN: statistics are measured for evaluation only. It has no options."""
    return Method("static-bn", layer=StaticBatchNorm.from_batch_norm, refresh=Refresh.EXACT)
