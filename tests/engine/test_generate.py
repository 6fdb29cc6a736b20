"""The generation loop: what it produces, what it compiles, where its memory is."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig, Engine, SamplingParams
from kvjax.engine import programs
from kvjax.engine.sampling import Sampling, sample

PAGES = CacheConfig(page_size=8, sinks=2, recent=5)


def greedy(model, prompt: list[int], steps: int) -> list[int]:
    """The reference: a full forward pass for every token, at one padded length."""
    ids, size = list(prompt), len(prompt) + steps
    for _ in range(steps):
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(ids)] = ids
        logits, _ = model(padded, lengths=[len(ids)])
        ids.append(int(jnp.argmax(logits[0, len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.quick
def test_greedy_equals_full_forward(tiny):
    model = tiny()
    rows = [oracles.tokens_for(model, 1, n, seed=n)[0].tolist() for n in (5, 40, 33)]
    out = kvjax.generate(model, rows, max_tokens=20, cache_config=PAGES)
    assert out.tokens == [greedy(model, row, 20) for row in rows]
    assert out.finish_reasons == ["length"] * 3
    assert out.stats["new_tokens"] == [20] * 3


def test_padding_on_either_side(tiny):
    model = tiny()
    rows = [[3, 4, 5], [9, 8, 7, 6, 5, 4]]
    want = kvjax.generate(model, rows, max_tokens=6).tokens
    right, left = np.zeros((2, 8), int), np.zeros((2, 8), int)
    mask = np.zeros((2, 8), bool)
    for b, row in enumerate(rows):
        right[b, : len(row)], left[b, 8 - len(row) :], mask[b, 8 - len(row) :] = row, row, True
    assert kvjax.generate(model, right, lengths=[3, 6], max_tokens=6).tokens == want
    assert kvjax.generate(model, left, mask=mask, max_tokens=6).tokens == want


def test_hidden_padding_is_refused(tiny):
    model = tiny(pad_token_id=0)
    with pytest.raises(ValueError, match="rows \\[0\\] begin or end with pad_token_id=0"):
        kvjax.generate(model, np.asarray([[3, 4, 0], [3, 4, 5]]))


def test_rows_end_on_their_own(tiny):
    """Rows end at different steps, on any of several ids (case 58); then they cost nothing."""
    model = tiny()
    rows = [[3, 4, 5], [9, 8, 7], [20, 21, 22]]
    free = kvjax.generate(model, rows, max_tokens=30).tokens
    first, second = free[0][4], free[1][9]
    eos = [first, second]
    out = kvjax.generate(model, rows, max_tokens=30, eos_ids=eos)
    for got, full, reason in zip(out.tokens, free, out.finish_reasons, strict=True):
        ends = [i for i, t in enumerate(full) if t in eos]
        want = full[: ends[0] + 1] if ends else full
        assert got == want
        assert reason == ("stop" if ends else "length")
    assert out.stats["cache"]["tokens"][:3] == [3 + len(t) - 1 for t in out.tokens]


def test_limits(tiny):
    model = tiny()
    engine = Engine(model, batch=2, max_model_len=20)
    run = engine.start([[1] * 15], max_tokens=50)
    while not run.done:
        run.step()
    out = run.result()
    assert len(out.tokens[0]) == 5
    assert out.finish_reasons == ["length"]
    for call, message in [
        (lambda: engine.start([[1] * 20], max_tokens=1), "prompt 0: expected 1 to 19 tokens"),
        (lambda: engine.start([[]], max_tokens=1), "prompt 0: expected 1 to 19 tokens"),
        (lambda: engine.start([[1]] * 3, max_tokens=1), "prompts: expected 1 to 2 rows, got 3"),
        (lambda: engine.start([[97]], max_tokens=1), "prompt 0: expected ids below 97"),
        (lambda: engine.start([[1]], max_tokens=0), "max_tokens: expected an int > 0"),
        (lambda: Engine(model, batch=1, max_model_len=5000), "max_model_len: expected 1 to 4096"),
        (lambda: SamplingParams(temperature=-1), "temperature: expected"),
        (lambda: SamplingParams(top_p=0.0), "top_p: expected"),
        (lambda: SamplingParams(top_k=-1), "top_k: expected"),
        (lambda: SamplingParams(min_p=2.0), "min_p: expected"),
        (lambda: SamplingParams(seed=-1), "seed: expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.quick
def test_nothing_compiles_after_warmup(tiny):
    """Case 106: an odd limit, then every kind of length, batch and setting within it."""
    model = tiny()
    engine = Engine(model, batch=4, max_model_len=317, cache_config=PAGES)
    engine.warmup()
    with counted_compiles() as compiled:
        for n, rows in [(1, 1), (31, 4), (32, 2), (33, 3), (129, 1), (200, 4), (315, 2)]:
            for temperature in (0.0, 0.7):
                prompts = [[1 + (i * n) % 90] * max(1, n - i) for i in range(rows)]
                sampling = SamplingParams(temperature, top_k=n % 5, top_p=0.9, seed=n)
                run = engine.start(prompts, max_tokens=3 + n % 3, sampling=sampling)
                run.step(2)
                run.stop(0)
                while not run.done:
                    run.step()
    assert compiled == []


class counted_compiles:
    """Collects the names of what XLA compiles inside the block."""

    def __enter__(self):
        self.names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._on)
        return self.names

    def _on(self, event: str, seconds: float, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(str(details))

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self._on)


def test_the_compile_counter_counts():
    with counted_compiles() as compiled:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones((3, 5)))
    assert compiled


@pytest.mark.quick
@pytest.mark.parametrize("form", ["unrolled", "stacked"])
def test_decode_step_memory(tiny, form):
    """At 8k tokens: no copy as large as the cache, the donated cache aliased, little else held."""
    model = tiny(form=form, num_layers=3, max_position_embeddings=8192)
    engine = Engine(model, batch=2, max_model_len=8192)
    cache = model.init_cache(batch=2, max_len=8192, config=engine.cache_config)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    graphdef, state = nnx.split(model)
    rows = programs.first_token(
        jnp.zeros((2, 97)),
        Sampling.of([SamplingParams()] * 2),
        cache.length,
        jnp.asarray([5, 5]),
        engine.eos,
    )
    sampling = Sampling.of([SamplingParams()] * 2)
    compiled = programs.decode.lower(
        graphdef, state, cache, rows, sampling, engine.eos, jnp.int32(1)
    ).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4
    largest = max(map(copied_bytes, compiled.as_text().splitlines()))
    assert largest < size / 100, f"a copy of {largest} bytes beside a cache of {size}"


def copied_bytes(line: str) -> int:
    """Bytes of the copy instruction in a line of HLO, 0 if it holds none."""
    match = re.search(r"= (\w+)\[([\d,]*)\]\S* copy\(", line)
    if not match:
        return 0
    width = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "u8": 1, "s8": 1}
    dims = [int(d) for d in match[2].split(",") if d]
    return int(np.prod(dims)) * width[match[1]]


def draws(logits, n: int, **settings) -> np.ndarray:
    rows = [SamplingParams(seed=i, **settings) for i in range(n)]
    batch = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    return np.asarray(sample(batch, Sampling.of(rows), jnp.zeros((n,), jnp.int32)))


def test_sampling_follows_the_distribution():
    probs = np.asarray([0.5, 0.3, 0.15, 0.05])
    seen = np.bincount(draws(np.log(probs), 4000, temperature=1.0), minlength=4) / 4000
    np.testing.assert_allclose(seen, probs, atol=0.03)
    hot = np.bincount(draws(np.log(probs), 4000, temperature=2.0), minlength=4) / 4000
    np.testing.assert_allclose(hot, probs**0.5 / (probs**0.5).sum(), atol=0.03)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.31}, {0, 1}),
        ({"min_p": 0.05}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),
    ],
)
def test_sampling_cuts(settings, kept):
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draws(logits, 400, temperature=1.0, **settings).tolist()) == kept


def test_seed_and_neighbours(tiny):
    """Sampled text depends on the seed, not on the batch around it."""
    model = tiny()
    engine = Engine(model, batch=2, max_model_len=64, eos_ids=())

    def run(prompts, seeds):
        each = [SamplingParams(1.0, seed=s) for s in seeds]
        out = engine.start(prompts, max_tokens=12, sampling=each)
        while not out.done:
            out.step()
        return out.tokens

    a = run([[5, 6, 7]], [1])[0]
    assert run([[50, 2], [5, 6, 7]], [9, 1])[1] == a
    assert run([[5, 6, 7]], [2])[0] != a
