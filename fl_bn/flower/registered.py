"""Whose key each node of a SuperLink has, asked through its Control API: Flower's own command ``flwr`` does not show keys."""

from __future__ import annotations

import grpc

from fl_bn.flower.compat import ControlStub, ListNodesRequest


def registered_keys(address: str, authority: bytes, timeout: float = 30.0) -> dict[int, bytes]:
    """Public keys (PEM) by node id, of the nodes that are registered at the SuperLink whose Control API is at ``address``.

    Flower binds the two: a SuperNode proves with every request that it has the private key of the node id it acts for.

    Raises:
        ConnectionError: no SuperLink answers that ``authority`` (PEM) vouches for, or it cannot say.
    """
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as channel:
        try:
            answer = ControlStub(channel).ListNodes(ListNodesRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise ConnectionError(f"the SuperLink at {address} does not say which sites are registered: {error.details()}") from error
    return {node.node_id: node.public_key for node in answer.nodes_info if node.status != "unregistered"}
