# ruff: noqa: N803, N806 (the names of the paper)
"""FedTAN, Algorithms 1 to 3 (Wang, Shi, Chang), transcribed: all clients compute the same layer at the same time.

A network is hidden layers (a linear map or a 3x3 convolution without bias, BatchNorm, ReLU), then a linear head with softmax and
cross-entropy. p_i: client i's share of the samples; m_i: its values per channel at a layer, s_i its share of these (s_i = p_i if all
images are of one size); ŷ: normalised values, ĝ the gradient of client i's own loss with respect to them; E: local steps per round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Batch = tuple[Array, Array]  # images (B, C, H, W), labels (B,)
Gradients = list[tuple[Array, Array]]  # every client's (g_μ, g_σ2)


@dataclass
class Layer:
    """Hold one hidden layer.

    Attributes:
        W: The weights, (out, in) or (out, in, 3, 3).
        γ: BatchNorm's scale, (out,).
        β: BatchNorm's shift, (out,).
        μ_run: The running mean, (out,).
        σ2_run: The running variance, (out,).
    """

    W: Array
    γ: Array
    β: Array
    μ_run: Array
    σ2_run: Array


@dataclass
class Net:
    layers: list[Layer]
    V: Array
    c: Array

    def tensors(self) -> list[Array]:
        """Return all tensors in the order of torch's state_dict."""
        return [t for x in self.layers for t in (x.W, x.γ, x.β, x.μ_run, x.σ2_run)] + [self.V, self.c]


def values(y: Array) -> Array:
    """Reshape activations (B, C, *) to (m, C): one row per sample and position."""
    return np.moveaxis(y, 1, -1).reshape(-1, y.shape[1])


def shaped(rows: Array, y: Array) -> Array:
    """Reshape ``rows`` (m, C) to the shape of ``y`` (B, C, *), the reverse of ``values``."""
    return np.moveaxis(rows.reshape(np.moveaxis(y, 1, -1).shape), -1, 1)


def apply(W: Array, x: Array) -> Array:
    if W.ndim == 2:
        return x.reshape(len(x), -1) @ W.T
    H, w = x.shape[2:]
    padded, y = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), np.zeros((len(x), len(W), H, w))
    for i in range(3):
        for j in range(3):
            y += np.einsum("oc,bchw->bohw", W[:, :, i, j], padded[:, :, i : i + H, j : j + w])
    return y


def gradients_of_apply(W: Array, x: Array, dy: Array) -> tuple[Array, Array]:
    """Return the gradients ``(dx, dW)`` of ``apply``, given that of its output, ``dy``."""
    if W.ndim == 2:
        return (dy @ W).reshape(x.shape), dy.T @ x.reshape(len(x), -1)
    H, w = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    dpadded, dW = np.zeros_like(padded), np.zeros_like(W)
    for i in range(3):
        for j in range(3):
            dpadded[:, :, i : i + H, j : j + w] += np.einsum("oc,bohw->bchw", W[:, :, i, j], dy)
            dW[:, :, i, j] = np.einsum("bohw,bchw->oc", dy, padded[:, :, i : i + H, j : j + w])
    return dpadded[:, :, 1:-1, 1:-1], dW


def algorithm_2(y: list[Array]) -> tuple[Array, Array]:
    """Return mean and variance of all clients' values at one BatchNorm layer, in the forward pass; ``y[i]`` is (m_i, C)."""
    n, M = len(y), sum(len(y_i) for y_i in y)
    s = [len(y_i) / M for y_i in y]
    μ_i = [sum(row for row in y_i) / len(y_i) for y_i in y]  # each client sends the mean of its values
    μ = np.zeros_like(μ_i[0])
    for i in range(n):  # the server averages, and sends the average back
        μ = μ + s[i] * μ_i[i]
    σ2_i = [sum((row - μ) ** 2 for row in y_i) / len(y_i) for y_i in y]  # each client: the variance about the common mean
    σ2 = np.zeros_like(μ)
    for i in range(n):  # the server
        σ2 = σ2 + s[i] * σ2_i[i]
    return μ, σ2


def algorithm_3(g: Gradients, p: list[float]) -> Gradients:
    """Average the clients' gradients of μ and σ2 at one BatchNorm layer, in the backward pass; every client goes on with the average."""
    G_μ, G_σ2 = np.zeros_like(g[0][0]), np.zeros_like(g[0][1])
    for i in range(len(g)):  # the server averages, and sends the average to all
        G_μ = G_μ + p[i] * g[i][0]
        G_σ2 = G_σ2 + p[i] * g[i][1]
    return [(G_μ, G_σ2)] * len(g)


def only_algorithm_2(g: Gradients, p: list[float]) -> Gradients:
    """Return the clients' gradients of μ and σ2 unchanged, instead of Algorithm 3: each client goes on with its own."""
    return g


def local_step(nets: list[Net], batches: list[Batch], η: float, ρ: float, ε: float, backward: Callable[..., Gradients]) -> None:
    """Make one SGD step of every client, in place, with common statistics in the BatchNorm layers. A single client trains by itself."""
    n, B = len(nets), [len(x) for x, _ in batches]
    p = [B_i / sum(B) for B_i in B]
    x = [batch[0] for batch in batches]
    passed = []
    for depth in range(len(nets[0].layers)):  # forward
        layers = [net.layers[depth] for net in nets]
        y = [apply(layers[i].W, x[i]) for i in range(n)]
        μ, σ2 = algorithm_2([values(y_i) for y_i in y])
        M = sum(len(values(y_i)) for y_i in y)
        ŷ = [shaped((values(y_i) - μ) / np.sqrt(σ2 + ε), y_i) for y_i in y]
        z = [shaped(values(ŷ[i]) * layers[i].γ + layers[i].β, y[i]) for i in range(n)]
        passed.append((x, y, ŷ, z, μ, σ2))
        for layer in layers:
            layer.μ_run, layer.σ2_run = (1 - ρ) * layer.μ_run + ρ * μ, (1 - ρ) * layer.σ2_run + ρ * σ2 * M / (M - 1)
        x = [np.maximum(z_i, 0) for z_i in z]
    dx = []
    for i in range(n):  # the head, and the gradient of client i's mean loss
        flat, labels = x[i].reshape(B[i], -1), batches[i][1]
        scores = flat @ nets[i].V.T + nets[i].c
        softmax = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        dscores = (softmax - np.eye(len(nets[i].c))[labels]) / B[i]
        dx.append((dscores @ nets[i].V).reshape(x[i].shape))
        nets[i].V, nets[i].c = nets[i].V - η * dscores.T @ flat, nets[i].c - η * dscores.sum(0)
    for depth in reversed(range(len(nets[0].layers))):  # backward
        layers = [net.layers[depth] for net in nets]
        x, y, ŷ, z, μ, σ2 = passed[depth]
        dz = [dx[i] * (z[i] > 0) for i in range(n)]
        ĝ = [values(dz[i]) * layers[i].γ for i in range(n)]
        centred = [values(y[i]) - μ for i in range(n)]
        g = [(-sum(row for row in ĝ[i]) / np.sqrt(σ2 + ε), -0.5 * (ĝ[i] * centred[i]).sum(0) * (σ2 + ε) ** -1.5) for i in range(n)]
        G = backward(g, p)
        m, M = [len(c) for c in centred], sum(len(c) for c in centred)
        for i in range(n):
            share = (m[i] / M) / p[i] if backward is algorithm_3 else 1.0  # s_i / p_i
            dy = shaped(ĝ[i] / np.sqrt(σ2 + ε) + share * (G[i][0] + 2 * centred[i] * G[i][1]) / m[i], y[i])
            dx[i], dW = gradients_of_apply(layers[i].W, x[i], dy)
            dγ, dβ = (values(dz[i]) * values(ŷ[i])).sum(0), values(dz[i]).sum(0)
            layers[i].W, layers[i].γ, layers[i].β = layers[i].W - η * dW, layers[i].γ - η * dγ, layers[i].β - η * dβ


def algorithm_1(
    net: Net, clients: list[list[Batch]], η: float, ρ: float = 0.1, ε: float = 1e-5, backward: Callable[..., Gradients] = algorithm_3
) -> tuple[list[Net], list[Array]]:
    """Run one round from ``net``; ``clients[i]`` has the E batches of client i.

    Returns:
        Every client's network after its local steps, and the server's averaged tensors.
    """
    nets = [copy.deepcopy(net) for _ in clients]
    local_step(nets, [batches[0] for batches in clients], η, ρ, ε, backward)  # t = 1: layer-wise, with all clients
    for i in range(len(clients)):
        for t in range(1, len(clients[i])):  # t = 2, ..., E: each client by itself
            local_step([nets[i]], [clients[i][t]], η, ρ, ε, algorithm_3)
    B = [len(batches[0][0]) for batches in clients]
    mean = [np.zeros_like(t) for t in net.tensors()]
    for i in range(len(nets)):  # the server aggregates w_i and S_i
        mean = [total + B[i] / sum(B) * t for total, t in zip(mean, nets[i].tensors(), strict=True)]
    return nets, mean


def fedavg_alg2(net: Net, clients: list[list[Batch]], η: float, ρ: float = 0.1, ε: float = 1e-5) -> tuple[list[Net], list[Array]]:
    """Run one round of FedAvg with Algorithm 2 only: the moments are those of all clients, but their gradients are each client's own."""
    return algorithm_1(net, clients, η, ρ, ε, only_algorithm_2)
