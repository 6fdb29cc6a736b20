"""`paged_attention`: one signature, its kernels behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.packed import paged_attention_xla
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.pages import PageFormat, Params
from pallas_kernels.softmax import Partial
from pallas_kernels.turn import Turn

IMPLEMENTATIONS = ("xla", "tpu", "gpu")


def paged_attention(
    q: Float[Array, "B K Q D"],
    pages: Int[Array, "P rows 128"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    fmt: PageFormat,
    scale: float,
    positions: Int[Array, "B"] | None = None,
    queries: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    turn: Turn | None = None,
    params: Params = ({}, {}),
    implementation: str | None = None,
    interpret: Any = False,
) -> Partial:
    """Attention of each KV head's queries to the first `lengths[b]` tokens of its row.

    q: in the space of `fmt.k`, already rotated or projected; Q = G T rows, query head by query head
    (T = `queries` tokens each). Rounded to bfloat16. pages: a pool in `fmt`; page 0 is the null
    page, all zeros. table: page ids of 128 tokens each; an id outside of the pool reads page 0.
    positions: where, among the row's tokens, each row's first query stands; then a query sees no
    token after itself, and of those before it the nearest `window`, itself included. Without
    positions all see all. softcap: c of c tanh(s / c). turn: of keys stored before RoPE, whose
    format must hold them in the head's own space; queries come rotated, as ever. params: arrays of
    the keys' code and of the values', for those that are calibrated (`Code.param_shapes`).

    implementation: None takes the platform's kernel where it takes the case, else "xla". Returns
    the un-normalised `Partial` (`acc [B, K, Q, H]` in the space of `fmt.v`), to merge and finish.
    Raises NotImplementedError, with the reason, where the implementation asked for does not take
    the case, and ValueError on shapes that do not fit `fmt`.
    """
    case: dict[str, Any] = {
        "positions": positions,
        "fmt": fmt,
        "queries": queries,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "turn": turn,
        "params": params,
    }
    arrays = (q, pages, table, lengths)
    return _attend(*arrays, implementation=implementation, interpret=interpret, **case)[0]


def paged_attention_logits(
    q: Float[Array, "B K Q D"],
    pages: Int[Array, "P rows 128"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    fmt: PageFormat,
    scale: float,
    positions: Int[Array, "B"] | None = None,
    queries: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    turn: Turn | None = None,
    params: Params = ({}, {}),
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Partial, Float[Array, "B K Q S"]]:
    """`paged_attention`, and the scores of each query at its row's S = 128 M
    tokens: float32, scaled, capped, in natural units, MASKED where the query does not see.

    What eviction by attention (H2O 2306.14048) needs: `attention_mass(logits, lse)` of
    `pallas_kernels.softmax`, with the `log_sum_exp` over these pages and all else that a query
    attends to. Raises as `paged_attention` does.
    """
    case: dict[str, Any] = {
        "positions": positions,
        "fmt": fmt,
        "queries": queries,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "turn": turn,
        "params": params,
        "logits": True,
    }
    arrays = (q, pages, table, lengths)
    return _attend(*arrays, implementation=implementation, interpret=interpret, **case)


def _attend(q, pages, table, lengths, *, implementation=None, interpret=False, **case):
    """(Partial, logits or None)."""
    _check(q, pages, table, lengths, **case)
    fmt = case["fmt"]
    chosen = implementation or choose(fmt)
    if chosen == "xla":
        return paged_attention_xla(q, pages, table, lengths, **case)
    if chosen == "tpu":
        reason = unsupported(fmt)
        if reason:
            raise NotImplementedError(f"paged_attention on TPU: {reason}")
        return paged_attention_tpu(q, pages, table, lengths, interpret=interpret, **case)
    if chosen == "gpu":
        raise NotImplementedError(
            "paged_attention: these pages are the TPU's; GPUs have a layout of their own."
        )
    raise ValueError(f"implementation: expected one of {IMPLEMENTATIONS} or None, got {chosen!r}.")


def choose(fmt: PageFormat, platform: str | None = None) -> str:
    """The implementation that None stands for: what a run's configuration table shows."""
    platform = platform or jax.default_backend()
    return "tpu" if platform == "tpu" and not unsupported(fmt) else "xla"


def unsupported(fmt: PageFormat) -> str:
    """Why the TPU kernel does not take a format; empty when it does."""
    for part in fmt.key_parts:
        if (part.stop - part.start) % 8:
            dim = part.stop - part.start
            return f"head_dim: needs a multiple of 8 (a register's rows), got {dim}."
    return ""


def unturnable(fmt: PageFormat, half: int) -> str:
    """Why no implementation turns a format's keys, in `half` pairs; empty when they do."""
    if len(fmt.key_parts) > 1:
        return "turned keys: not those of latents."
    if not fmt.k.turns:
        return f"turned keys: {type(fmt.k).__name__} has them in a form that no angle turns."
    if half % 8:
        return f"turned keys: needs a multiple of 8 pairs (a register's rows), got {half}."
    return ""


def _check_turn(turn: Turn, fmt: PageFormat, *, rows: int) -> None:
    one = jnp.ndim(turn.frequencies) == 1
    _need(one, "turn.frequencies", "[half]", jnp.shape(turn.frequencies))
    half = turn.frequencies.shape[0]
    _need(turn.start.shape == (rows,), "turn.start: rows", rows, turn.start.shape)
    most = fmt.head_dim // 2
    _need(0 < half <= most, "turn.frequencies", f"1 to {most} of them", half)
    reason = unturnable(fmt, half)
    if reason:
        raise NotImplementedError(f"paged_attention: {reason}")


def _check(
    q, pages, table, lengths, *, fmt, queries, window, positions, softcap, turn, params, **_
) -> None:
    _need(q.ndim == 4, "q: axes", "[B, K, Q, D]", q.shape)
    _need(table.ndim == 2, "table: axes", "[B, M]", table.shape)
    B, K, Q, D = q.shape
    _need(fmt.num_kv_heads == K, "q: KV heads", fmt.num_kv_heads, K)
    _need(fmt.query_width == D, "q: channels", fmt.query_width, D)
    _need(pages.shape[1:] == (fmt.rows, 128), "pages", ("P", fmt.rows, 128), pages.shape)
    _need(pages.dtype == jnp.int32, "pages: dtype", "int32", pages.dtype)
    _need(table.shape[0] == B and lengths.shape == (B,), "table, lengths: rows", B, lengths.shape)
    _need(queries > 0 and Q % queries == 0, "queries", f"a divisor of Q={Q}", queries)
    _need(window is None or window > 0, "window", "None or a positive int", window)
    _need(window is None or positions is not None, "window", "positions beside it", None)
    one = positions is None or positions.shape == (B,)
    _need(one, "positions", f"one for each of {B} rows", None if one else positions.shape)
    _need(softcap is None or softcap > 0, "softcap", "None or a number > 0", softcap)
    if turn is not None:
        _check_turn(turn, fmt, rows=B)
    for role, code, own in zip("kv", (fmt.k, fmt.v), params, strict=True):
        for name, shape in code.param_shapes(K, fmt.head_dim).items():
            got = own[name].shape if name in own else None
            _need(got == shape, f"params: {role}: {name}", shape, got)


def _need(ok: bool, field: str, expected: object, got: object) -> None:
    if not ok:
        raise ValueError(f"paged_attention: {field}: expected {expected}, got {got}.")


def check_table(
    table: Int[Array, "B M"], lengths: Int[Array, "B"], *, num_pages: int, page_size: int = 128
) -> None:
    """The checked mode of a caller with concrete arrays: raises ValueError on a page id outside of
    the pool among those a row uses, and on a length outside of its table."""
    ids, sizes = np.asarray(table), np.asarray(lengths)
    longest = ids.shape[1] * page_size
    if (sizes < 0).any() or (sizes > longest).any():
        raise ValueError(f"lengths: expected 0 to {longest}, got {sizes.tolist()}.")
    used = np.arange(ids.shape[1])[None] * page_size < sizes[:, None]
    bad = used & ((ids < 0) | (ids >= num_pages))
    if bad.any():
        row, page = (int(i[0]) for i in np.nonzero(bad))
        raise ValueError(
            f"table[{row}, {page}]: expected a page id of 0 to {num_pages - 1}, "
            f"got {int(ids[row, page])}."
        )
