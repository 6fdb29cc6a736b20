"""Paged decode attention in Triton's language, over the codecs' own leaves.

A page is a dict of arrays `[P, K, ...]` as the plain-XLA path reads it: words along tokens, so
token F i + f is field f of word row i, F = 32 / bits; scales `[n, T]` or `[T / span, H]`. A program
has one KV head of one row and a share of its pages (flash decoding, 2311.01282); it leaves an
un-normalised part. Values are decoded in registers: a GPU has arithmetic to spare while it waits
for bytes.

Import needs triton, of the extra kvjax[cuda].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def levels(
    words, field, KIND: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr
):
    """Numbers of one field of words; of whole entries when KIND is "x"."""
    if KIND == "x":
        value = words.to(tl.float32)
    else:
        code = (words >> (BITS * field)) & (2**BITS - 1)
        if KIND == "uniform":
            value = code.to(tl.float32) - ZERO
        else:
            value = tl.full(code.shape, TABLE[0], tl.float32)
            for i in tl.static_range(1, len(TABLE)):  # the last level whose number is reached
                value = tl.where(code >= i, TABLE[i], value)
    return value


@triton.jit
def side(
    ptr,
    base,
    token,
    channel,
    ok,
    MODE: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Scales or lows of tokens (rows) and channels: per token and GROUP channels, or per channel
    and GROUP tokens. base: the page's and head's number, N: numbers of each."""
    if MODE == "token":
        at = (channel // GROUP)[None, :] * T + token[:, None]
    else:
        at = (token // GROUP)[:, None] * D + channel[None, :]
    return tl.load(ptr + base[:, None] * N + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def tile(
    x_ptr,
    scale_ptr,
    low_ptr,
    base,
    row,
    field,
    channel,
    ok,
    T: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    LAST: tl.constexpr,
    MODE: tl.constexpr,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
):
    """Values `[rows, channels]` of one field of the rows of words; zero where not ok."""
    token = row * F + field
    if LAST:  # tokens last: raw keys
        at = channel[None, :] * T + row[:, None]
    else:
        at = row[:, None] * D + channel[None, :]
    words = tl.load(x_ptr + base[:, None] * (T // F * D) + at, mask=ok, other=0)
    value = levels(words, field, KIND, BITS, ZERO, TABLE)
    if MODE != "none":
        N: tl.constexpr = D // GROUP * T if MODE == "token" else T // GROUP * D
        value = value * side(scale_ptr, base, token, channel, ok, MODE, GROUP, T, D, N)
        if LOW:
            value = value + side(low_ptr, base, token, channel, ok, MODE, GROUP, T, D, N)
    return tl.where(ok, value, 0.0)


@triton.jit
def paged_attention_kernel(
    q_ptr,
    kx_ptr,
    ks_ptr,
    kl_ptr,
    vx_ptr,
    vs_ptr,
    vl_ptr,
    table_ptr,
    used_ptr,
    acc_ptr,
    top_ptr,
    mass_ptr,
    K: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    K_KIND: tl.constexpr,
    K_BITS: tl.constexpr,
    K_ZERO: tl.constexpr,
    K_TABLE: tl.constexpr,
    K_LAST: tl.constexpr,
    K_MODE: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_LOW: tl.constexpr,
    V_KIND: tl.constexpr,
    V_BITS: tl.constexpr,
    V_ZERO: tl.constexpr,
    V_TABLE: tl.constexpr,
    V_LAST: tl.constexpr,
    V_MODE: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_LOW: tl.constexpr,
    FACTOR: tl.constexpr,
    CT: tl.constexpr,
):
    """q `[B, K, R, D]`, table `[B, M]`, used `[B]` pages; acc `[B, K, SPLITS, R, D]`. FACTOR is in
    units of log2. CT: the type that is multiplied, float32 under the interpreter."""
    unit, split = tl.program_id(0), tl.program_id(1)
    b, head = unit // K, unit % K
    W: tl.constexpr = T // F  # word rows of a page
    used = tl.load(used_ptr + b)
    share = tl.cdiv(used, SPLITS)
    first, last = split * share * W, tl.minimum((split + 1) * share, used) * W
    r, d = tl.arange(0, R), tl.arange(0, DP)
    real = d < D
    at_q = (unit * R + r)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_q, mask=real[None, :], other=0.0).to(CT)
    top = tl.full((R,), -1e30, tl.float32)
    mass = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, DP), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < last
        page = tl.load(table_ptr + b * M + row // W, mask=inside, other=0)
        base = page.to(tl.int64) * K + head
        ok = inside[:, None] & real[None, :]
        for field in tl.static_range(F):
            k = tile(
                kx_ptr,
                ks_ptr,
                kl_ptr,
                base,
                row % W,
                field,
                d,
                ok,
                T,
                D,
                F,
                K_KIND,
                K_BITS,
                K_ZERO,
                K_TABLE,
                K_LAST,
                K_MODE,
                K_GROUP,
                K_LOW,
            )
            v = tile(
                vx_ptr,
                vs_ptr,
                vl_ptr,
                base,
                row % W,
                field,
                d,
                ok,
                T,
                D,
                F,
                V_KIND,
                V_BITS,
                V_ZERO,
                V_TABLE,
                V_LAST,
                V_MODE,
                V_GROUP,
                V_LOW,
            )
            s = tl.dot(q, tl.trans(k.to(CT))) * FACTOR
            s = tl.where(inside[None, :], s, -1e30)
            now = tl.maximum(top, tl.max(s, 1))
            p = tl.where(inside[None, :], tl.exp2(s - now[:, None]), 0.0)
            decay = tl.exp2(top - now)
            mass = mass * decay + tl.sum(p, 1)
            acc = acc * decay[:, None] + tl.dot(p.to(CT), v.to(CT))
            top = now
    part = unit * SPLITS + split
    at = (part * R + r)[:, None] * D + d[None, :]
    tl.store(acc_ptr + at, acc, mask=real[None, :])
    tl.store(top_ptr + part * R + r, tl.where(mass > 0, top * 0.6931471805599453, -1e30))
    tl.store(mass_ptr + part * R + r, mass)
