"""The seven oracles of the design, as helpers that every method is run through.

Each takes a model and a cache config, feeds real data through the public interface and raises
AssertionError with numbers. Keys and values come from unlike distributions (`unlike_kv`), so that a
swap of the two fails.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.plan import cache_bytes


def tokens_for(model, batch: int, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, model.config.vocab_size, (batch, length)).astype(np.int32)


def unlike_kv(model, batch: int, length: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[O, B, T, K, H]` of all owners, of unlike distributions: wide keys with
    offsets per channel, narrow values."""
    c = model.config
    rng = np.random.default_rng(seed)
    heads, k_dim, v_dim = c.cache_shape
    shape = (len(c.owners), batch, length, heads)
    k = rng.normal(size=(*shape, k_dim)) * 3
    k = k + rng.normal(size=(shape[0], 1, 1, heads, k_dim)) * 4
    v = rng.uniform(-0.5, 0.2, size=(*shape, v_dim))
    return jnp.asarray(k, model.dtype), jnp.asarray(v, model.dtype)


def feed(model, cache, tokens, splits):
    """Logits of tokens fed in calls of the given lengths, and the cache after them."""
    out, at = [], 0
    for n in splits:
        logits, cache = model(tokens[:, at : at + n], cache)
        out.append(np.asarray(logits))
        at += n
    assert at == tokens.shape[1], "the splits must cover the tokens"
    return np.concatenate(out, axis=1), cache


def splits_of(length: int, first: int, step: int) -> list[int]:
    """A prefill of `first`, then calls of `step` tokens."""
    rest = length - first
    return [first] + [step] * (rest // step) + [1] * (rest % step)


def assert_same_tree(a, b) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y)), f"{jax.tree_util.keystr(path)} differs"


def close(a, b, tolerance: float) -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    worst = np.abs(a - b).max() / b.std()
    assert worst <= tolerance, f"largest difference {worst:.3g} of the deviation > {tolerance:.3g}"


def chunking(model, config, *, length: int = 150, batch: int = 2, splits=None) -> None:
    """1. Any split of the same keys and values gives the same state, bit for bit.

    splits: the ways to cut them; each length of a call compiles once.
    """
    k, v = unlike_kv(model, batch, length)
    states = []
    append = jax.jit(lambda c, k, v, n: c.append(k, v, new=n))
    usual = ([length], [1] * length, splits_of(length, 37, 13), splits_of(length, 64, 64))
    for split in usual if splits is None else splits:
        cache, at = model.init_cache(batch=batch, max_len=length, config=config), 0
        for n in split:
            new = jnp.full((batch,), n, jnp.int32)
            cache = append(cache, k[:, :, at : at + n], v[:, :, at : at + n], new)
            at += n
        states.append(cache)
    for other in states[1:]:
        assert_same_tree(states[0], other)


def batching(model, config, *, tolerance: float = 1e-5, pad_alone: int = 0) -> None:
    """2. A row in a batch equals the row alone, padded left or right, whatever its neighbours.

    pad_alone: pads the row alone on the right up to this length, so that rows share a program.
    """
    lengths, T = [5, 90, 41], 90
    rows = [tokens_for(model, 1, n, seed=n)[0] for n in lengths]
    steps = tokens_for(model, 3, 3, seed=9)
    right, left = np.zeros((3, T), np.int32), np.full((3, T), 7, np.int32)
    mask = np.zeros((3, T), bool)
    for b, row in enumerate(rows):
        right[b, : len(row)], left[b, T - len(row) :] = row, row
        mask[b, T - len(row) :] = True
    together = []
    for padded, how in ((right, {"lengths": np.asarray(lengths)}), (left, {"mask": mask})):
        cache = model.init_cache(batch=3, max_len=T + 3, config=config)
        prefill, cache = model(padded, cache, **how)
        decoded, cache = feed(model, cache, steps, [1, 1, 1])
        together.append((np.asarray(prefill), decoded))
    for b, row in enumerate(rows):
        cache = model.init_cache(batch=1, max_len=T + 3, config=config)
        padded = np.pad(row, (0, max(0, pad_alone - len(row))))[None]
        alone, cache = model(padded, cache, lengths=[len(row)])
        decoded, _ = feed(model, cache, steps[b : b + 1], [1, 1, 1])
        n = len(row)
        close(together[0][0][b, :n], alone[0, :n], tolerance)
        close(together[1][0][b, T - n :], alone[0, :n], tolerance)
        for _, batch_decoded in together:
            close(batch_decoded[b], decoded[0], tolerance)


def cached_equals_full(
    model, config, *, tolerance: float, length: int = 150, batch: int = 2
) -> None:
    """3. Cached logits equal the full forward pass at every position, past several pages."""
    tokens = tokens_for(model, batch, length)
    full, _ = model(tokens)
    for splits in (splits_of(length, 33, 1), splits_of(length, 70, 16)):
        cache = model.init_cache(batch=batch, max_len=length, config=config)
        logits, cache = feed(model, cache, tokens, splits)
        sealed = [int(g.spec.sealed_pages(jnp.int32(length))) for g in cache.groups]
        assert min(sealed) >= 2, f"the case must seal several pages, it sealed {sealed}"
        close(logits, full, tolerance)


def paths(model, config, *, length: int = 150, batch: int = 2, splits=None) -> None:
    """4. Cold equals restored, compacted and shared: where a page lies changes nothing."""
    tokens, more = tokens_for(model, batch, length), tokens_for(model, batch, 4, seed=1)
    tokens[1] = tokens[0]
    cache = model.init_cache(batch=batch, max_len=length + 4, config=config)
    _, cache = feed(model, cache, tokens, splits or splits_of(length, 70, 16))
    cold, _ = feed(model, cache, more, [1] * 4)
    restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), cache)
    for other in (restored, moved_pages(cache), shared_prefix(cache)):
        assert np.array_equal(feed(model, other, more, [1] * 4)[0], cold)


def moved_pages(cache, seed: int = 3):
    """The same cache with its pages elsewhere in the pool."""

    def move(group):
        P = group.pool.pages
        if not P:  # a window that the exact ring holds
            return group
        order = np.random.default_rng(seed).permutation(P)
        place = np.argsort(order)  # page i of every layer moves to place[i]

        def moved(x):
            layers = np.arange(x.shape[0] // P)[:, None] * P
            return x[(layers + order).ravel()]

        table = jnp.asarray(place.astype(np.int32))[group.table]
        return dataclasses.replace(group, pool=jax.tree.map(moved, group.pool), table=table)

    return dataclasses.replace(cache, groups=tuple(move(g) for g in cache.groups))


def shared_prefix(cache):
    """The same cache with row 1 reading row 0's sealed pages, its own filled with NaN."""

    def share(group):
        sealed = int(group.spec.used_pages(group.rows(cache.length))[0])
        assert sealed > 0
        own = np.asarray(group.table[:, 1, :sealed])
        table = group.table.at[:, 1, :sealed].set(group.table[:, 0, :sealed])
        return dataclasses.replace(group, pool=poisoned_pool(group.pool, own), table=table)

    return dataclasses.replace(cache, groups=tuple(share(g) for g in cache.groups))


def poison(x, where):
    """NaN, or all bits set for integers, at indices of the first axis."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.at[where].set(jnp.nan)
    return x.at[where].set(jnp.iinfo(x.dtype).max)


def poisoned_pool(pool, ids):
    """The pool with poison in pages `ids [slots, n]` of each layer."""

    def block(i, codes):
        own = np.split(np.asarray(ids), len(pool.k))[i]  # of the layers in this block
        where = (own + np.arange(len(own))[:, None] * pool.pages).ravel()
        return jax.tree.map(lambda x: poison(x, where), codes)

    k, v = (tuple(block(i, b) for i, b in enumerate(blocks)) for blocks in (pool.k, pool.v))
    return dataclasses.replace(pool, k=k, v=v)


def poisoned(cache):
    """The cache with poison in every page and exact slot that holds no token of any row."""

    def fill(group):
        spec = group.spec
        rows = group.rows(cache.length)
        sealed = np.asarray(spec.used_pages(rows))
        free = np.arange(group.table.shape[2])[None] >= sealed[:, None]  # B M
        unused = np.asarray(group.table)[:, free]
        bad = ~spec.exact_valid(rows)[None, :, None, :, None]
        return dataclasses.replace(
            group,
            pool=poisoned_pool(group.pool, unused),
            k_exact=jnp.where(jnp.swapaxes(bad, 3, 4), jnp.nan, group.k_exact),
            v_exact=jnp.where(bad, jnp.nan, group.v_exact),
        )

    return dataclasses.replace(cache, groups=tuple(fill(g) for g in cache.groups))


def poison_changes_nothing(model, config, *, length: int = 100, more: int = 40) -> None:
    """5. NaN in every unused slot, page and scale changes nothing.

    length: tokens of the first call, of which rows use all, 3 and 60; more: of the second.
    """
    tokens = tokens_for(model, 3, length + more + 20)
    clean = model.init_cache(batch=3, max_len=length + more + 20, config=config)
    dirty = poisoned(clean)
    first, second = tokens[:, :length], tokens[:, length : length + more]
    for call, n in ((first, [length, 3, 60]), (second, [more] * 3)):
        a, clean = model(call, clean, lengths=n)
        b, dirty = model(call, dirty, lengths=n)
        real = np.arange(call.shape[1]) < np.asarray(n)[:, None]
        assert np.array_equal(np.asarray(a)[real], np.asarray(b)[real])
        dirty = poisoned(dirty)
    for t in range(length + more, length + more + 20):
        a, clean = model(tokens[:, t : t + 1], clean)
        b, dirty = model(tokens[:, t : t + 1], dirty)
        assert np.array_equal(np.asarray(a), np.asarray(b))
        dirty = poisoned(dirty)


def exact_bytes(model, config, *, batch: int = 3, max_len: int = 200) -> None:
    """6. Reported bytes == sum of the leaves == the planner's formula."""
    cache = model.init_cache(batch=batch, max_len=max_len, config=config)
    report = kvjax.cache_report(cache)
    leaves = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    planned = cache_bytes(
        model.config, batch=batch, max_len=max_len, config=config, dtype=model.dtype
    )
    assert report["total_bytes"] == leaves == sum(report["bytes"].values())
    assert planned == report["bytes"], (planned, report["bytes"])


def identity(model, *, page_size: int, sinks: int, recent: int, tolerance: float = 1e-5) -> None:
    """7. With the raw codec a cache is exactly the dense model."""
    config = kvjax.CacheConfig(page_size=page_size, sinks=sinks, recent=recent)
    cached_equals_full(model, config, tolerance=tolerance)
