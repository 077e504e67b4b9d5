"""Serve a ``LocalClient`` as Flower's ``NumPyClient``, by lists of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.client import NumPyClient

from fl_bn.federation.narrow import AS_THE_MODEL
from fl_bn.federation.payload import to_numpy
from fl_bn.federation.values import Reply
from fl_bn.flower.handlers import Request, metrics_of, request_of
from fl_bn.flower.local_client import LocalClient
from fl_bn.flower.wire.codec import FORMAT, flatten, header_from, unflatten
from fl_bn.flower.wire.fields import Form
from fl_bn.flower.wire.messages import HEADER, LAYOUT, TO_EVALUATE, TO_MEASURE, TO_TRAIN
from fl_bn.methods import Phase


class BatchNormClient(LocalClient, NumPyClient):
    """Train, measure and evaluate one model as its method says, as Flower's ``NumPyClient``.

    A list of arrays has no names. So the entry ``layout`` of the config has the names, as JSON from
    ``codec.flatten``. The config's other entries are the fields of the instruction's header and of its config.
    ``make_client_app`` calls ``compute``, without lists of arrays. So override ``compute``, not ``fit``, to change
    the training.

    All random numbers depend only on ``seed``, the client and the round.

    Args:
        model: the converted network with its initial tensors. It is copied, never changed. Clients of one process may
            share a ``Network``, and train its copy one after the other.
        method: the run's method.
        settings: the settings of local training.
        site: the client's data and device.
        state: Flower's ``context.state``.
        seed: the run's seed.
        tells: whether the client sends the layers that it keeps, for the average that unseen clients get.
        shares_drift: whether the client reports how far the statistics that it keeps have moved in a round. One
            of the reported numbers is the value of one channel in these statistics.
        task: the model's task.

    Raises:
        ValueError: method and settings contradict each other.
    """

    def get_properties(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``introduce`` returns: index, number of clients, number of samples, signature and label counts."""
        return dict(self.introduce())

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the scales, shifts and statistics that this client keeps, in the order of ``schema.kept_layers``.

        Args:
            config: ``round`` is the number of the round, and ``run`` the run's name (NAME/state-XXXXXXXX).

        Raises:
            PermissionError: this client does not share them.
        """
        return list(to_numpy(self.kept_layers(config, int(config["round"]))).values())

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Train or measure, as the phase in ``config`` says.

        Args:
            parameters: the arrays of the instruction.
            config: the entry ``layout`` (the names of ``parameters``), the fields of the instruction's header,
                and the fields of its config, such as ``learning-rate``.

        Returns:
            The arrays of the reply, the number of different samples trained on, and metrics with the reply's
                ``layout``.
        """
        request = self._request(parameters, config, TO_MEASURE if config["phase"] == Phase.MEASURE.value else TO_TRAIN)

        def listed(reply: Reply) -> tuple[list[np.ndarray], int, dict[str, Any]]:
            arrays, layout = flatten(request.rounding.narrow({section: to_numpy(named) for section, named in reply.sections.items()}))
            return arrays, reply.samples, {"layout": layout, **metrics_of(reply)}

        return self.compute(request, listed)

    def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Return the loss on this client's test data, the number of test samples, and other metrics.

        Args:
            parameters: the arrays of the instruction.
            config: the entry ``layout`` (the names of ``parameters``), the fields of the instruction's header,
                and the fields of its config. If it has ``save``, the client saves the model in the folder of this
                name, below the site's folder.
        """
        metrics = self.test(self._request(parameters, config, TO_EVALUATE))
        return metrics.pop("loss"), len(self.site.test), metrics

    def _request(self, parameters: list[np.ndarray], config: Mapping[str, Any], form: Form) -> Request:
        header = header_from(HEADER.read({"format": FORMAT, "payload": AS_THE_MODEL, **config}))
        payload = unflatten(parameters, LAYOUT.read(config)["layout"])
        return request_of(header, payload, form.read(config), self.network)
