"""Paged decode attention on GPUs, through jax-triton (`gpu_kernel.py`).

Compiled for sm_80, sm_90 and sm_100 and run in Triton's interpreter by the tests; not yet run on a
GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.softmax import Partial, merge

#: rows of words that are read at once; a product wants 16 at least
ROWS = 32


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How the leaves of a page's codes are read: `words` (or `x`), `scale`, `low`.

    kind: "x" whole entries, "uniform" q - zero, "codebook" table[q]. mode: how scale and low lie,
    "none", "token" `[H / group, T]` or "channel" `[T / group, H]`. tokens_last: `x [P, K, H, T]`.
    """

    kind: str = "x"
    bits: int = 32
    zero: float = 0.0
    table: tuple[float, ...] = (0.0,)
    tokens_last: bool = False
    mode: str = "none"
    group: int = 1
    low: bool = False

    @property
    def fields(self) -> int:
        return 1 if self.kind == "x" else 32 // self.bits

    def constants(self, role: str) -> dict[str, Any]:
        values = {
            "KIND": self.kind,
            "BITS": self.bits,
            "ZERO": self.zero,
            "TABLE": self.table,
            "LAST": self.tokens_last,
            "MODE": self.mode,
            "GROUP": self.group,
            "LOW": self.low,
        }
        return {f"{role}_{name}": value for name, value in values.items()}

    def arrays(self, pages: Mapping[str, Array]) -> list[Array]:
        """(entries, scales, lows); what is absent is never read."""
        x = pages["x" if self.kind == "x" else "words"]
        if x.dtype == jnp.uint32:
            x = jax.lax.bitcast_convert_type(x, jnp.int32)
        return [x, pages.get("scale", x), pages.get("low", x)]


def available() -> bool:
    """Whether jax-triton is here."""
    return importlib.util.find_spec("jax_triton") is not None


def unsupported(k: Leaf, v: Leaf, *, page_size: int) -> str:
    """Why the kernel does not take the leaves; empty when it does."""
    if k.fields != v.fields:
        return f"keys of {k.fields} and values of {v.fields} numbers a word: they must be equal."
    if any(x.kind != "x" and x.bits not in (1, 2, 4, 8) for x in (k, v)):
        return f"bits: need 1, 2, 4 or 8, got {k.bits} and {v.bits}."
    if page_size % k.fields:
        return f"page_size: needs a multiple of {k.fields}, got {page_size}."
    return ""


def constants(
    k: Leaf,
    v: Leaf,
    *,
    heads: int,
    rows: int,
    head_dim: int,
    page_size: int,
    pages: int,
    splits: int,
) -> dict[str, Any]:
    """The kernel's static arguments."""
    shape = {"K": heads, "R": rows, "D": head_dim, "DP": max(16, 1 << (head_dim - 1).bit_length())}
    walk = {"T": page_size, "M": pages, "F": k.fields, "ROWS": ROWS, "SPLITS": splits}
    return {**shape, **walk, **k.constants("K"), **v.constants("V")}


def paged_attention_gpu(
    q: Float[Array, "B K Q H"],
    k_pages: Mapping[str, Array],
    v_pages: Mapping[str, Array],
    table: Int[Array, "B M"],
    used: Int[Array, "B"],
    *,
    k: Leaf,
    v: Leaf,
    page_size: int,
    scale: float,
    splits: int = 8,
    compute_capability: int | None = None,
) -> Partial:
    """Attention to the first `used[b]` pages of each row, as `paged_partial`.

    Raises NotImplementedError, with the reason, on leaves it does not take and without jax-triton.
    """
    reason = unsupported(k, v, page_size=page_size)
    if reason:
        raise NotImplementedError(f"paged_attention on GPU: {reason}")
    if not available():
        raise NotImplementedError("paged_attention on GPU: needs jax-triton: kvjax[cuda].")
    import jax_triton
    import triton.language as tl

    from pallas_kernels.paged_attention.gpu_kernel import paged_attention_kernel

    B, K, Q, H = q.shape
    rows = max(16, 1 << (Q - 1).bit_length())
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, 0), (0, rows - Q), (0, 0)))
    shapes = [jax.ShapeDtypeStruct((B, K, splits, rows, *s), jnp.float32) for s in ((H,), (), ())]
    new = tuple(int(x) for x in jax_triton.__version__.split(".")[:2]) >= (0, 4)
    out: dict[str, Any] = {"out_type" if new else "out_shape": shapes}
    if compute_capability is not None:
        out["compute_capability"] = compute_capability
    shape = {"heads": K, "rows": rows, "head_dim": H, "page_size": page_size}
    parts = jax_triton.triton_call(
        *(q, *k.arrays(k_pages), *v.arrays(v_pages), table, used),
        kernel=paged_attention_kernel,
        grid=(B * K, splits),
        num_warps=4,
        num_stages=2,
        FACTOR=scale * math.log2(math.e),
        CT=tl.bfloat16,
        **constants(k, v, **shape, pages=table.shape[1], splits=splits),
        **out,
    )
    each = [Partial(*(x[:, :, i, :Q] for x in parts)) for i in range(splits)]
    return merge(*each)
