"""The GPU kernels on a GPU: right numbers, time against bf16 attention, share of the bandwidth.

    pip install 'kvjax[cuda]'
    python infer/gpu_check.py                        # minutes; a table in Markdown
    python infer/gpu_check.py --tokens 8192,131072 --codecs raw,int4

Decode attention of one layer at the shape of Llama-3-8B, random keys and values. Each codec's
kernel is compared with the plain-XLA path on the same codes; times are medians. Beside it stand
JAX's own bf16 attention over dense keys and, where torch is installed, its SDPA. Not yet run.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import codecs
from kvjax.cache.gpu_leaf import gpu_leaf
from kvjax.codecs import code_bytes
from pallas_kernels.paged_attention import paged_partial
from pallas_kernels.paged_attention.gpu import paged_attention_gpu
from pallas_kernels.softmax import finish

HEADS, GROUP, HEAD_DIM, PAGE = 8, 4, 128, 128
CODECS = "raw,int8,int4,int4-hadamard,kivi4,kivi2,turboquant4,turboquant2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--tokens", default="8192,32768,131072", help="of each row")
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"gpu_check: expected a GPU, got {jax.default_backend()}: kvjax[cuda].")
        return 2
    device = jax.devices()[0].device_kind
    bandwidth = copy_bandwidth()
    print(f"{datetime.date.today()}, {device}, jax {jax.__version__}")
    print(f"copies at {bandwidth / 1e9:.0f} GB/s")
    print("| tokens | codec | error | us | bf16 of jax, us | of torch, us | GB/s | of copies |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in map(int, arguments.tokens.split(",")):
        dense = time_dense(arguments.batch, tokens), time_torch(arguments.batch, tokens)
        for name in arguments.codecs.split(","):
            row = check(name, arguments.batch, tokens)
            rate = row["bytes"] / row["seconds"]
            times = " | ".join(
                "-" if t is None else f"{t * 1e6:.0f}" for t in (row["seconds"], *dense)
            )
            share = f"{rate / 1e9:.0f} | {rate / bandwidth:.2f}"
            print(f"| {tokens} | {name} | {row['error']:.1e} | {times} | {share} |", flush=True)
    return 0


def check(name: str, batch: int, tokens: int) -> dict[str, Any]:
    """Error of the kernel against plain XLA, over the deviation; seconds a call; bytes it reads."""
    pair = codecs.pair(name)
    pages = tokens // PAGE
    k_pages, v_pages = (random_pages(codec, batch * pages, i) for i, codec in enumerate(pair))
    key = jax.random.key(2)
    q = jax.random.normal(key, (batch, HEADS, GROUP, HEAD_DIM), jnp.bfloat16)
    table = 1 + jax.random.permutation(key, batch * pages).reshape(batch, pages).astype(jnp.int32)
    used = jnp.full((batch,), pages, jnp.int32).at[0].set(max(1, pages // 2 - 1))
    scale = HEAD_DIM**-0.5
    k, v = (gpu_leaf(codec, HEAD_DIM) for codec in pair)

    @jax.jit
    def kernel(q, k_pages, v_pages, table, used):
        arrays = (q, k_pages, v_pages, table, used)
        return finish(paged_attention_gpu(*arrays, k=k, v=v, page_size=PAGE, scale=scale))

    @jax.jit
    def reference(q, k_pages, v_pages, table, used):
        part = paged_partial(
            q, k_pages, v_pages, table, used, page_size=PAGE, scale=scale, tile_tokens=1024,
            decode_k=lambda codes, t: pair[0].decode_t(codes, {}, jnp.bfloat16),
            decode_v=lambda codes, t: pair[1].decode(codes, {}, jnp.bfloat16),
        )  # fmt: skip
        return finish(part)

    arrays = (q, k_pages, v_pages, table, used)
    got, expected = kernel(*arrays), reference(*arrays)
    each = sum(code_bytes({n: c[1] for n, c in p.items()}) for p in (k_pages, v_pages))
    return {
        "error": float(jnp.abs(got - expected).max() / jnp.std(expected)),
        "seconds": seconds(kernel, *arrays),
        "bytes": each * int(used.sum()),
    }


def random_pages(codec: Any, pages: int, seed: int) -> Any:
    """A pool of pages, the null page first, encoded a few at a time."""

    @jax.jit
    def encode(i):
        x = jax.random.normal(jax.random.key(seed * 10**6 + i), (64, HEADS, PAGE, HEAD_DIM))
        return codec.encode(x.astype(jnp.bfloat16), {})

    parts = [encode(i) for i in range(-(-pages // 64))]
    pool = jax.tree.map(lambda *x: jnp.concatenate(x)[:pages], *parts)
    return jax.tree.map(lambda x: jnp.pad(x, [(1, 0)] + [(0, 0)] * (x.ndim - 1)), pool)


def seconds(call: Callable[..., Any], *arrays: Any, repeats: int = 20) -> float:
    jax.block_until_ready(call(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 1 GB."""
    x = jnp.ones((2**28,), jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def time_dense(batch: int, tokens: int) -> float:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, 1, HEADS * GROUP, HEAD_DIM), jnp.bfloat16)
    k, v = (
        jax.random.normal(key, (batch, tokens, HEADS, HEAD_DIM), jnp.bfloat16) for key in keys[1:]
    )
    return seconds(jax.jit(jax.nn.dot_product_attention), q, k, v)


def time_torch(batch: int, tokens: int) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, HEADS * GROUP, 1, HEAD_DIM, **shape)
    k, v = (torch.randn(batch, HEADS, tokens, HEAD_DIM, **shape) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    times = []
    for _ in range(21):
        torch.cuda.synchronize()
        start = time.perf_counter()
        attend(q, k, v, enable_gqa=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
