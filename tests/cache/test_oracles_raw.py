"""The seven oracles, on the raw codec and over attention kinds."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

from kvjax import CacheConfig

CONFIGS = [
    CacheConfig(page_size=8),
    CacheConfig(page_size=16, sinks=4, recent=5),
    CacheConfig(page_size=8, sinks=0, recent=0),
    CacheConfig(page_size=8, sinks=3, recent=24),
    CacheConfig(page_size=8, sinks=13, recent=3),
]
NAMES = [f"page{c.page_size}-sinks{c.sinks}-recent{c.recent}" for c in CONFIGS]
FORMS = ["unrolled", "stacked"]
KINDS = {"mha": 4, "gqa": 2, "mqa": 1}


BOTH_FORMS = pytest.mark.parametrize(("form", "config"), list(zip(FORMS, CONFIGS[:2], strict=True)))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_chunking(tiny, config):
    oracles.chunking(tiny(), config)


@BOTH_FORMS
def test_batching(tiny, form, config):
    oracles.batching(tiny(form=form), config)


@pytest.mark.parametrize("kind", KINDS)
@BOTH_FORMS
def test_cached_equals_full(tiny, form, config, kind):
    model = tiny(form=form, num_kv_heads=KINDS[kind])
    oracles.cached_equals_full(model, config, tolerance=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("config", CONFIGS[::2], ids=NAMES[::2])
def test_paths(tiny, config):
    oracles.paths(tiny(), config)


@BOTH_FORMS
def test_poison(tiny, form, config):
    oracles.poison_changes_nothing(tiny(form=form), config)


@pytest.mark.parametrize("max_len", [104, 400])
def test_one_row(tiny, max_len):
    """One row, its pool mostly full (read where it lies) or mostly empty."""
    model, config = tiny(form="unrolled"), CacheConfig(page_size=16, sinks=2, recent=5)
    oracles.cached_equals_full(model, config, tolerance=2e-5, length=100, batch=1)
    tokens, more = (oracles.tokens_for(model, 1, n, seed=n) for n in (100, 4))
    cache = model.init_cache(batch=1, max_len=max_len, config=config)
    _, cache = model(tokens, cache)
    assert cache.groups[0].pool.apart
    want, _ = model(more, cache)
    for other in (oracles.moved_pages(cache), oracles.poisoned(cache)):
        assert np.array_equal(model(more, other)[0], want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_bytes(tiny, kind, config):
    oracles.exact_bytes(tiny(num_kv_heads=KINDS[kind]), config)


@pytest.mark.quick
def test_identity(tiny):
    oracles.identity(tiny(form="stacked"), page_size=8, sinks=2, recent=7)


@pytest.mark.parametrize("what", ["swap", "stale"])
def test_oracles_see_faults(tiny, what, monkeypatch):
    """A cache that swaps K and V, or seals a page late, is caught."""
    from kvjax.cache import kv_cache
    from kvjax.cache.spec import GroupSpec

    config = CacheConfig(page_size=8)
    model = tiny(seed=1)
    if what == "swap":
        real = kv_cache.append_group
        monkeypatch.setattr(kv_cache, "append_group", lambda g, k, v, **kw: real(g, v, k, **kw))
    else:
        real_sealed = GroupSpec.sealed_pages
        monkeypatch.setattr(
            GroupSpec,
            "exact_valid",
            lambda self, n: (
                self.token_in_slot(n)
                >= self.sinks + (real_sealed(self, n)[:, None] * self.page_size + 1)
            ),
        )
    import jax

    jax.clear_caches()
    try:
        with pytest.raises(AssertionError, match="largest difference"):
            oracles.cached_equals_full(model, config, tolerance=2e-5)
    finally:
        jax.clear_caches()
