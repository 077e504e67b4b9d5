"""Static BN: batch statistics in training, which nobody tracks; those of evaluation are measured when they are needed.

HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, Diao, Ding, Tarokh, ICLR 2021, section 3
(sBN), there queried from the clients once, after training, with batch statistics in the layers below.

Here, as that is exact in the first layer alone, the clients measure as often as there are BatchNorm layers, each time with the
pooled statistics of the time before: pass p makes layers 1..p those of the union of all data. Training never sees them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fl_bn.layers import _SharedNorm
from fl_bn.methods.method import Method, Refresh


class StaticBatchNorm(_SharedNorm):
    """BatchNorm that normalises a training batch with its own statistics and forgets them."""

    def normalised(self, x: Tensor) -> Tensor:
        self.check(x)
        if self.observation is not None:
            self.observation(self, x)
        if not self.training:
            return self.normalise_shared(x)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def static_bn() -> Method:
    return Method("static-bn", layer=StaticBatchNorm.from_batch_norm, refresh=Refresh.EXACT)
