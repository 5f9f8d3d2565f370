"""Paths of a hidden Markov chain, one step at a time: sums over paths, draws of paths and the most probable path.

Unlike the faster recursions of `forward_backward`, these are differentiable and can temper q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filtered(
    log_initial: Tensor, log_transitions: Tensor, log_b: Tensor, length: Tensor, least: float
) -> tuple[Tensor, list[Tensor]]:
    """log sum_z of the product over a path, (n,), and log a_t (K, n) of each step, from log b_t (K, T, n)."""
    transitions = log_transitions.exp()
    coming, total, messages = log_initial[:, None], 0.0, []
    for t, log_b_t in enumerate(log_b.unbind(1)):
        joint = log_b_t + coming
        evidence = joint.logsumexp(0)
        total = total + torch.where(t < length, evidence, 0.0)
        messages.append(joint - evidence)
        coming = (transitions.mT @ messages[-1].exp()).clamp_min(least).log()
    assert isinstance(total, Tensor)
    return total, messages


def mean_log(
    log_initial: Tensor,
    log_transitions: Tensor,
    log_b: Tensor,
    messages: list[Tensor],
    length: Tensor,
    cold: float,
    least: float,
) -> Tensor:
    """Return E_q[log p(y, z)] for q ~ p^cold, (n,), by a recursion over h_t(j), its part up to t given z_t = j."""
    tilted = (cold * log_transitions).exp()
    h = log_initial[:, None] + log_b[:, 0]
    for t in range(1, log_b.shape[1]):
        a = messages[t - 1].exp()
        came = (tilted.mT @ a).clamp_min(least)
        fresh = log_b[:, t] + (tilted.mT @ (a * h) + (tilted * log_transitions).mT @ a) / came
        h = torch.where(t < length, fresh, h)
    last = torch.stack(messages)[
        (length - 1).clamp_min(0), :, torch.arange(len(length), device=length.device)
    ]  # (n, K)
    return torch.where(length > 0, (last.exp() * h.T).sum(1), 0.0)


def paths(
    messages: list[Tensor], log_transitions: Tensor, length: Tensor, draws: int, generator: torch.Generator | None
) -> Tensor:
    """Draws of z given y, (T, draws, n), the last state first: p(z_t | z_{t+1}, y) ~ a_t A_{z_t z_{t+1}}."""
    n = len(length)
    after, drawn = torch.zeros(draws, n, dtype=torch.long, device=length.device), []
    for t in range(len(messages) - 1, -1, -1):
        onward = log_transitions.T[after]  # (draws, n, K)
        logits = messages[t].T + torch.where((t < length - 1)[:, None], onward, 0.0)
        after = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).reshape(draws, n)
        drawn.append(after)
    return torch.stack(drawn[::-1])


def counted_paths(path: Tensor, length: Tensor, k: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of draws (T, draws, n) in first states (K,), pairs (K, K) and states (K, T, n), counted by weights."""
    steps, draws, _ = path.shape
    inside = torch.arange(steps, device=path.device)[:, None] < length
    share = (inside * weights / draws)[:, None].expand(path.shape)  # (T, draws, n)
    q = torch.zeros(k, steps, path.shape[2], dtype=weights.dtype, device=path.device)
    for i in range(k):
        q[i] = (share * (path == i)).sum(1)
    kinds = (path[:-1] * k + path[1:]).flatten()
    pairs = torch.bincount(kinds, share[1:].flatten(), minlength=k * k).reshape(k, k)
    return q[:, 0].sum(1), pairs.to(weights.dtype), q


def viterbi(log_initial: Tensor, log_transitions: Tensor, log_b: Tensor, length: Tensor) -> Tensor:
    """Return the most probable path, (n, T), -1 after the end, from log b_t (K, T, n)."""
    _, steps, n = log_b.shape
    best, came = log_initial[:, None] + log_b[:, 0], []
    stay = torch.arange(len(log_b), device=log_b.device)[:, None].expand(-1, n)
    for t in range(1, steps):
        value, origin = (best[:, None] + log_transitions[:, :, None]).max(0)  # (from, to, n) -> (to, n)
        going = t < length
        best = torch.where(going, value + log_b[:, t], best)
        came.append(torch.where(going, origin, stay))
    state = best.argmax(0)
    path = [state]
    for origin in reversed(came):
        state = origin.gather(0, state[None])[0]
        path.append(state)
    drawn = torch.stack(path[::-1], 1)
    return torch.where(torch.arange(steps, device=length.device) < length[:, None], drawn, -1)
