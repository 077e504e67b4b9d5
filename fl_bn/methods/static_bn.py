"""Define static BN: normalise by batch statistics in training, and measure statistics before each evaluation.

HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, Diao, Ding,
Tarokh, ICLR 2021, section 3 (sBN). In the paper the clients report these statistics once, after training. Each
layer is then measured while the layers below it normalise with batch statistics.

This measurement is exact in the first layer only. In this project the clients make passes until all layers have the
statistics of the union of all data. Each pass uses the pooled statistics of the pass before. After pass p, layers 1..p
have them. One pass is enough if clients exchange statistics layer by layer. Training never uses these statistics.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fl_bn.bn.layers import SharedNorm
from fl_bn.methods.method import Method, Refresh


class StaticBatchNorm(SharedNorm):
    """Normalise a training batch with the batch's own statistics, and keep no running average of them."""

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *): with its own moments in training, with the running statistics in evaluation."""
        self.check_input(x)
        if self.observation is not None:
            self.observation(self, x)
        if not self.training:
            return self.normalise_shared(x)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def static_bn() -> Method:
    """Make the method Static BN: statistics are measured for evaluation only. It has no options."""
    return Method("static-bn", layer=StaticBatchNorm.from_batch_norm, refresh=Refresh.EXACT)
