"""The GPU kernels on a GPU: right numbers, time against bf16 attention, share of the bandwidth.

    pip install 'kvjax[cuda]'
    python infer/gpu_check.py                        # minutes; a table in Markdown
    python infer/gpu_check.py --tokens 8192,131072 --codecs raw,int4

Decode attention of one layer at the shape of Llama-3-8B, random keys and values. Each codec's
kernel is compared with the plain-XLA path on the same codes; times are medians. Beside it stand
JAX's own bf16 attention over dense keys and, where torch is installed, its SDPA. Then whole decode
steps of a random model at the shape of Llama-3.2-1B, by the kernel and in plain XLA. Not yet run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax import CacheConfig, ModelConfig, RopeConfig, Transformer, cache_report, codecs
from kvjax.cache.gpu_leaf import gpu_leaf
from kvjax.codecs import code_bytes
from pallas_kernels.paged_attention import paged_partial
from pallas_kernels.paged_attention.gpu import paged_attention_gpu
from pallas_kernels.softmax import finish

HEADS, GROUP, HEAD_DIM, PAGE = 8, 4, 128, 128
ONE_B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rope": RopeConfig(theta=5e5),
}
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
    print("\n| tokens | codec | kernel | ms a step | tokens/s | cache, GiB | bytes over copies |")
    print("|---|---|---|---|---|---|---|")
    model = random_model(ONE_B)
    for tokens in map(int, arguments.tokens.split(",")):
        for name in arguments.codecs.split(","):
            for kernel in ("gpu", "xla") if name == "raw" else ("gpu",):  # each compiles
                row = decode(model, name, kernel, batch=arguments.batch, tokens=tokens)
                rate, share = arguments.batch / row["seconds"], row["bytes"] / bandwidth
                print(
                    f"| {tokens} | {name} | {kernel} | {1e3 * row['seconds']:.2f} | {rate:.0f}"
                    f" | {row['cache'] / 2**30:.2f} | {share / row['seconds']:.2f} |",
                    flush=True,
                )
    return 0


def random_model(fields: dict[str, Any]) -> Transformer:
    return Transformer(ModelConfig(**fields), rngs=nnx.Rngs(0), dtype="bfloat16", form="stacked")


def decode(
    model: Transformer, codec: str, kernel: str, *, batch: int, tokens: int, steps: int = 16
) -> dict[str, Any]:
    """Seconds of a decode step over `tokens` cached tokens of each row, the bytes that a step reads
    (weights and cache) and those of the cache. The pages hold zeros: time does not depend on what
    they hold."""
    config = CacheConfig(k=codec, v=codec, kernel=kernel)
    cache = model.init_cache(batch=batch, max_len=tokens + PAGE, config=config)
    cache = dataclasses.replace(cache, length=jnp.full((batch,), tokens, jnp.int32))
    size = cache_report(cache)["total_bytes"]
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(state, token, cache):
        model = nnx.merge(graphdef, state)
        x, cache = model.hidden(token, cache, jnp.ones((batch,), jnp.int32))
        return jnp.argmax(model.logits(x), axis=-1).astype(jnp.int32), cache

    token, times = jnp.zeros((batch, 1), jnp.int32), []
    for _ in range(steps):
        start = time.perf_counter()
        token, cache = jax.block_until_ready(step(state, token, cache))
        times.append(time.perf_counter() - start)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return {"seconds": statistics.median(times[2:]), "bytes": weights + size, "cache": size}


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
            decode_k=lambda codes, t: pair[0].decode(codes, {}, jnp.bfloat16),
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
