"""A plain, slow twin of Transformer-XL's relative multi-head attention, for tests to compare against.

Written from the equations of Dai et al. 2019, "Transformer-XL: Attentive Language Models Beyond a Fixed-Length
Context" (arXiv 1901.02860), section 3.3, and from nothing else.  Every score is computed on its own, for one batch
row, one head, one query and one key at a time: no relative shift, no masking with -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def twin_sinusoid(distance: int, hidden: int) -> Tensor:
    """R_d of section 3.3, the sinusoid encoding of one relative distance d >= 0.

    The first half of the features is sin(d * w_i) and the second half cos(d * w_i), where w_i = 10000^(-2i / hidden)
    for i = 0 .. hidden/2 - 1.  R has no learnable parameters.

    Args:
        distance: How far the key lies behind the query, i - j.
        hidden: The number of features, even.

    Returns:
        A float64 tensor of shape (hidden,), on the CPU.
    """
    if distance < 0:
        raise ValueError(f"the distance must not be negative, got {distance}")
    if hidden <= 0 or hidden % 2 != 0:
        raise ValueError(f"hidden must be positive and even, got {hidden}")
    sines: list[float] = []
    cosines: list[float] = []
    for i in range(hidden // 2):
        frequency = 10000.0 ** (-2.0 * i / hidden)
        sines.append(math.sin(distance * frequency))
        cosines.append(math.cos(distance * frequency))
    return torch.tensor(sines + cosines, dtype=torch.float64)


def twin_attention(
    x: Tensor,
    memory: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wr: Tensor,
    wo: Tensor,
    u: Tensor,
    v: Tensor,
    heads: int,
) -> Tensor:
    """Relative multi-head attention of section 3.3, one score at a time.

    The keys and values come from [SG(memory), x] and the queries from x alone, as in the layer equations at the end
    of section 3.3; SG is the stop-gradient, so no gradient reaches ``memory``.  Query t of the segment sits at the
    absolute position i = M + t and may look at each j <= i.  Its score for key j is the sum of section 3.3's terms

        (a) q_i . k_j    (b) q_i . (W_{k,R} R_{i-j})    (c) u . k_j    (d) v . (W_{k,R} R_{i-j})

    divided by sqrt(head_dim).  The softmax over the allowed j weights the values, the heads are concatenated, and the
    output projection follows.  The residual, the layer norm and the feed-forward part are not here.

    Args:
        x: The current segment, (batch, length, hidden).
        memory: The cached hidden states before it, (batch, mem, hidden); mem may be 0.
        wq: The query weight W_q, (hidden, hidden), applied as y = x @ w.T like every other weight here.
        wk: The content key weight W_{k,E}, (hidden, hidden).
        wv: The value weight W_v, (hidden, hidden).
        wr: The location key weight W_{k,R}, (hidden, hidden).
        wo: The output projection, (hidden, hidden).
        u: The global content bias, (heads, head_dim).
        v: The global location bias, (heads, head_dim).
        heads: The number of heads; head h uses the features [h * head_dim : (h + 1) * head_dim].

    Returns:
        The attention's output, (batch, length, hidden).
    """
    batch, length, hidden = x.shape
    mem = memory.shape[1]
    if hidden % heads != 0:
        raise ValueError(f"hidden ({hidden}) must be a multiple of heads ({heads})")
    head_dim = hidden // heads
    if tuple(memory.shape) != (batch, mem, hidden):
        raise ValueError(f"memory has shape {tuple(memory.shape)}, x has {tuple(x.shape)}")
    for name, weight in (("wq", wq), ("wk", wk), ("wv", wv), ("wr", wr), ("wo", wo)):
        if tuple(weight.shape) != (hidden, hidden):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, expected {(hidden, hidden)}")
    for name, bias in (("u", u), ("v", v)):
        if tuple(bias.shape) != (heads, head_dim):
            raise ValueError(f"{name} has shape {tuple(bias.shape)}, expected {(heads, head_dim)}")

    # W_{k,R} R_d for each distance that can occur: 0 (a query and itself) up to mem + length - 1.
    location_keys: list[Tensor] = []
    for distance in range(mem + length):
        location_keys.append(wr @ twin_sinusoid(distance, hidden).to(dtype=x.dtype, device=x.device))

    rows: list[Tensor] = []
    for b in range(batch):
        context: list[Tensor] = []  # the hidden state at each absolute position: the memory, then the segment
        for position in range(mem):
            context.append(memory[b, position].detach())
        for t in range(length):
            context.append(x[b, t])
        keys = [wk @ state for state in context]
        values = [wv @ state for state in context]

        outputs: list[Tensor] = []
        for t in range(length):
            i = mem + t
            query = wq @ x[b, t]
            head_outputs: list[Tensor] = []
            for h in range(heads):
                features = slice(h * head_dim, (h + 1) * head_dim)
                q_i = query[features]
                scores: list[Tensor] = []
                for j in range(i + 1):
                    k_j = keys[j][features]
                    r_ij = location_keys[i - j][features]
                    content = torch.dot(q_i, k_j)
                    location = torch.dot(q_i, r_ij)
                    content_bias = torch.dot(u[h], k_j)
                    location_bias = torch.dot(v[h], r_ij)
                    scores.append((content + location + content_bias + location_bias) / math.sqrt(head_dim))
                weights = torch.softmax(torch.stack(scores), dim=0)
                mixed = torch.zeros(head_dim, dtype=x.dtype, device=x.device)
                for j in range(i + 1):
                    mixed = mixed + weights[j] * values[j][features]
                head_outputs.append(mixed)
            outputs.append(wo @ torch.cat(head_outputs))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)
