"""The forward-backward recursions of a hidden Markov model, for all sequences at once.

With b_t(k) = p(y_t | theta_k), scaled as in Rabiner (1989):

    forward    a_t = b_t * (A' a_{t-1}) / c_t,       a_t(k) = p(z_t = k | y_1 .. y_t),     log p(y) = sum_t log c_t
    backward   d_{t-1} = A (b_t * d_t) / c_t,        p(z_t = k | y) = a_t(k) d_t(k)
    pairs      sum_t p(z_{t-1} = i, z_t = j | y) = A_ij sum_t a_{t-1}(i) [b_t(j) d_t(j) / c_t]

A step of the recursion is a small matrix product for all sequences at once. A few long sequences are cut into chunks,
which are processed in parallel (Blelloch's scan, 1990, in two levels). First the transfer matrix of each chunk,
diag(b_1) A diag(b_2) A ... diag(b_L), K x K, is computed for all chunks at once. Then messages are passed from chunk to
chunk, and finally the recursions run inside all chunks at once. About 2 sqrt(T) sequential steps replace T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RESCALE_STEPS = {torch.float64: 4, torch.float32: 2}  # steps between rescalings: MIN_PROBABILITY^steps is not zero
MAX_PARALLEL_OPERATIONS = 1 << 16  # per step of all transfers; with more, cutting costs more than it saves
MAX_UNCUT_STEPS = 256  # shorter sequences are not cut


@dataclass
class Smoothed:
    """Messages over L steps of B = chunks * n columns; the chunks of a sequence are n columns apart."""

    transitions: Tensor  # A, (K, K)
    ahead: Tensor  # a_t, (K, L, B)
    back: Tensor  # d_t, (K, L, B)
    lead: Tensor  # b_t d_t / c_t, (K, L, B)
    evidence: Tensor  # log c_t plus the log of the largest entry that b_t was divided by, (L, B)
    chunks: int

    def marginals(self) -> Tensor:
        """p(z_t = k | y), (K, L, B)."""
        return self.ahead * self.back

    def pairs(self) -> Tensor:
        """Return sum_t a_{t-1} lead_t', (K, K), over all pairs of steps, including pairs across chunks."""
        columns = self.ahead.shape[2]
        n = columns // self.chunks
        inside = self.ahead.flatten(1)[:, :-columns] @ self.lead.flatten(1)[:, columns:].mT
        return inside + self.ahead[:, -1, : columns - n] @ self.lead[:, 0, n:].mT

    def inside(self, length: Tensor) -> Tensor:
        """Whether a step is before its sequence's end, (L, B)."""
        steps, columns = self.evidence.shape
        chunk = torch.arange(self.chunks, device=length.device) * steps
        t = torch.arange(steps, device=length.device)[:, None] + chunk  # (L, chunks)
        return (t[:, :, None] < length).reshape(steps, columns)

    def log_evidence(self, length: Tensor) -> Tensor:
        """log p(y_n), (n,)."""
        total = torch.where(self.inside(length), self.evidence, 0.0).sum(0)
        return total.unflatten(0, (self.chunks, -1)).sum(0)


def cuts(n: int, steps: int, k: int) -> int:
    """Return the number of chunks into which each of n sequences is cut."""
    return 1 if steps <= MAX_UNCUT_STEPS or n * k**3 > MAX_PARALLEL_OPERATIONS else math.isqrt(steps)


def arrange_chunks(y: Tensor, chunks: int) -> Tensor:
    """Arrange sequences (n, T, ...) as steps of chunks, (L, chunks * n, ...), padded with NaN."""
    n, steps = y.shape[:2]
    length = -(-steps // chunks)
    if length * chunks > steps:
        y = torch.cat([y, y.new_full((n, length * chunks - steps, *y.shape[2:]), torch.nan)], 1)
    return y.unflatten(1, (chunks, length)).movedim((2, 1), (0, 1)).flatten(1, 2)


def smooth(initial: Tensor, transitions: Tensor, log_b: Tensor, chunks: int, faint: float) -> Smoothed:
    """Run forward and backward from log b_t (K, L, B), which is overwritten."""
    top = log_b.amax(0)
    b = log_b.sub_(top).exp_().clamp_min_(faint)
    k, _, columns = b.shape
    if chunks == 1:
        first, last = initial[:, None].expand(k, columns), None
    else:
        first, last = chunk_messages(initial, transitions, b, chunks)
    ahead, scale = forward(first, transitions, b)
    last = torch.ones_like(ahead[:, -1]) if last is None else last / (last * ahead[:, -1]).sum(0)
    back, lead = backward(last, transitions, b.div_(scale))
    return Smoothed(transitions, ahead, back, lead, scale.log_().add_(top), chunks)


def forward(first: Tensor, transitions: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a_t (K, L, B) and c_t (L, B), from p(z_1) (K, B)."""
    ahead, scale = torch.empty_like(b), torch.empty_like(b[0])
    ahead_step, predicted = transitions.mT.contiguous(), first.clone(memory_format=torch.contiguous_format)
    for a_t, b_t, c_t in zip(ahead.unbind(1), b.unbind(1), scale.unbind(0), strict=True):
        torch.mul(predicted, b_t, out=a_t)
        torch.sum(a_t, 0, out=c_t)
        a_t.div_(c_t)
        torch.mm(ahead_step, a_t, out=predicted)
    return ahead, scale


def backward(last: Tensor, transitions: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """d_t and b_t d_t / c_t, (K, L, B), from the last d_t (K, B) and b_t / c_t."""
    back, lead = torch.empty_like(scaled), torch.empty_like(scaled)
    back[:, -1] = last
    before = [None, *back.unbind(1)[:-1]]
    for d_before, d_t, lead_t, b_t in reversed(
        list(zip(before, back.unbind(1), lead.unbind(1), scaled.unbind(1), strict=True))
    ):
        torch.mul(b_t, d_t, out=lead_t)
        if d_before is not None:
            torch.mm(transitions, lead_t, out=d_before)
    return back, lead


def chunk_messages(initial: Tensor, transitions: Tensor, b: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the messages into each chunk, (K, B): p(z | all before) at its first step, and d at its last, scaled."""
    k, _, columns = b.shape
    n = columns // chunks
    through = transfers(transitions, b)
    ahead_step, back_step = transitions.mT @ through.flatten(1), transitions @ through.transpose(0, 1).flatten(1)
    ahead_step, back_step = (t.reshape(k, k, chunks, n).permute(2, 3, 0, 1) for t in (ahead_step, back_step))
    both = torch.cat([ahead_step[:-1], back_step[1:].flip(0)], 1)  # one step ahead and one back, (., 2 n, K, K)
    message = torch.cat([initial.expand(n, k), torch.ones_like(initial).expand(n, k)])[..., None]
    messages = [message]
    for step in both.unbind(0):
        message = torch.bmm(step, message)
        message.div_(message.sum(1, keepdim=True))
        messages.append(message)
    ahead, back = torch.stack(messages)[..., 0].unflatten(1, (2, n)).unbind(1)  # (chunks, n, K)
    return ahead.permute(2, 0, 1).reshape(k, columns), back.flip(0).permute(2, 0, 1).reshape(k, columns)


def transfers(transitions: Tensor, b: Tensor) -> Tensor:
    """Return diag(b_1) A diag(b_2) ... A diag(b_L) of each column, (to, from, B), its largest row sum 1."""
    k, steps, columns = b.shape
    through = torch.eye(k, dtype=b.dtype, device=b.device)[:, :, None].expand(k, k, columns).contiguous()
    size, moved = b[:, 0].log(), torch.empty_like(through)  # log scale of each row, a first state
    ahead_step, rest = transitions.mT.contiguous(), RESCALE_STEPS[b.dtype]
    for t in range(1, steps):
        torch.mm(ahead_step, through.view(k, -1), out=moved.view(k, -1))
        torch.mul(moved, b[:, t, None], out=through)
        if t % rest == 0 or t == steps - 1:
            total = through.sum(0)
            through.div_(total)
            size += total.log()
    return through * (size - size.amax(0)).exp()
