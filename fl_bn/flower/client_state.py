"""What a client keeps between its rounds: local tensors and optimiser momentum, in Flower's ``context.state``."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import Array
from torch import Tensor

from fl_bn.flower.codec import to_numpy, to_tensors


class ClientState:
    """Named sections of tensors that never leave the client.

    ``write`` replaces all sections at once, as the last statement of a round: where training fails, deployment does not roll
    ``context.state`` back.
    """

    def __init__(self, state: RecordDict, signature: str) -> None:
        self._state, self._signature = state, signature

    def read(self) -> dict[str, dict[str, Tensor]]:
        """The sections kept by this client for this model and method; empty before its first round."""
        owner = self._state.config_records.get("kept-for")
        if owner is None or owner.get("signature") != self._signature:
            return {}
        records = self._state.array_records
        return {section: to_tensors({k: a.numpy() for k, a in records[section].items()}) for section in records}

    def write(self, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        for section in list(self._state.array_records):
            del self._state[section]
        for section, tensors in sections.items():
            self._state[section] = ArrayRecord({k: Array(a) for k, a in to_numpy(tensors).items()})
        self._state["kept-for"] = ConfigRecord({"signature": self._signature})
