"""Calibration: fits a model's codecs to the keys and values they will see, once, from a text.

    calibration = calibrate(model, tokens, config)        # tokens: [B, T] or rows of any lengths
    save("model.kvquant3.safetensors", model, config, calibration)
    cache = model.init_cache(..., config=CacheConfig.parse("kvquant3", calibration="model.kv..."))

`infer/calibrate.py` does the first two. A file belongs to one model: `model_fingerprint`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.attending import Dense, Retained
from kvjax.cache.build import Calibration, group_specs
from kvjax.cache.spec import GroupSpec
from kvjax.codecs import calibrate as files
from kvjax.codecs import name_of
from kvjax.codecs.base import Codec, Params
from kvjax.config import CacheConfig, ModelConfig, need
from kvjax.fingerprint import model_fingerprint
from kvjax.layers.attention import KV
from kvjax.layers.rope import apply_rope

if TYPE_CHECKING:
    from kvjax.model import Transformer

# Shapes: L layers, B rows (one), T tokens of a row, K KV heads, H head dim, S samples.

#: host memory for samples; layers that do not fit together are collected in further passes
BLOCK_BYTES = 512 << 20
#: tokens whose logits live at once while gradients are taken
LOSS_CHUNK = 128


def calibrate(
    model: Transformer,
    tokens: Any,
    config: CacheConfig,
    *,
    fisher: bool | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Calibration:
    """Per layer the params of its key and its value codec, `{}` for codecs without any.

    tokens: `[B, T]` ids or rows of any lengths, each a text of its own; their first `sinks` tokens,
    which a cache keeps exact, are left out. fisher: weigh errors by the gradient of the loss
    (squared, number by number: KVQuant, 2401.18079, section 3.3; or its second moment over the head
    dim); None: where a codec uses one. block_bytes: host memory for samples; a smaller one repeats
    the forward pass for fewer layers at a time.
    """
    specs = _by_layer(model, config)
    tuned = [layer for layer in model.config.owners if any(_has_params(specs[layer]))]
    need(
        bool(tuned),
        "config",
        "a codec with calibrated arrays, such as kvquant3 or pca3",
        f"{config.k}+{config.v}",
    )
    weighted = any(_uses_gradients(c) for layer in tuned for c in _pair(specs[layer]))
    fisher = weighted if fisher is None else fisher
    need(weighted or not fisher, "fisher", "False: none of these codecs uses gradients", fisher)
    rows = _rows(model.config, tokens, specs[0].sinks)
    out: list[tuple[Params, Params]] = [({}, {})] * len(specs)
    for layers in _blocks(tuned, rows, specs[0], fisher, block_bytes):
        for layer, samples in _collect(model, rows, layers, specs, fisher):
            out[layer] = _fit(specs[layer], samples)
    return out


class Samples(NamedTuple):
    """What one layer's codecs are fitted to: `[keys, values]`, arrays `[K, S, H]`."""

    entries: list[np.ndarray]
    gradients: list[np.ndarray] | None  # of the summed loss by each entry


def collect(model: Transformer, tokens: Any, config: CacheConfig) -> list[Samples]:
    """Every layer's samples with their gradients, all in host memory: for codecs that are chosen
    after a look at them. Keys are before RoPE where the codec of `config` keeps them so."""
    specs = _by_layer(model, config)
    _need_own_layers(model.config)
    rows = _rows(model.config, tokens, specs[0].sinks)
    layers = list(range(len(specs)))
    return [samples for _, samples in _collect(model, rows, layers, specs, True)]


def fit(model: Transformer, config: CacheConfig, collected: Sequence[Samples]) -> Calibration:
    """The params of `config`'s codecs from samples of `collect`."""
    specs = _by_layer(model, config)
    return [_fit(spec, samples) for spec, samples in zip(specs, collected, strict=True)]


def metric(gradients: np.ndarray) -> np.ndarray:
    """E[g g^T] `[K, H, H]` of gradients `[K, S, H]`: what an error costs by its direction."""
    return np.swapaxes(gradients, 1, 2) @ gradients / gradients.shape[1]


def save(path: str | Path, model: Transformer, config: CacheConfig, params: Calibration) -> None:
    """Writes a calibration of this model for the codecs of `config`."""
    specs = _by_layer(model, config)
    labels = _labels(specs)
    layers = {
        layer: {
            labels[role][codec]: params[layer][role]
            for role, codec in enumerate(_pair(spec))
            if codec in labels[role]
        }
        for layer, spec in enumerate(specs)
        if layer in model.config.owners
    }
    files.save(path, layers, fingerprint=model_fingerprint(model), codecs=_codecs(labels))


def load(path: str | Path, model: Transformer, config: CacheConfig) -> Calibration:
    """The inverse of `save`. Raises ValueError on a file of another model, naming both, or for
    other codecs, and on layers that it lacks. Read once while the file does not change."""
    file = Path(path).expanduser()
    need(file.is_file(), "calibration", "an existing file", str(path), _make_one(config))
    stat = file.stat()
    specs = _by_layer(model, config)
    stamp = (stat.st_mtime_ns, stat.st_size)
    return _read(str(file), stamp, model_fingerprint(model), specs, model.config.owners)


def for_cache(model: Transformer, config: CacheConfig) -> Calibration | None:
    """The calibration that a cache of this config needs: from its file; None where none is needed.

    Raises ValueError when a codec needs one and `config.calibration` is None, and when it is given
    and no codec has calibrated arrays.
    """
    specs = _by_layer(model, config)
    tuned = {codec for spec in specs for codec in _pair(spec) if _shapes(codec, spec)}
    if config.calibration is not None:
        need(
            bool(tuned), "calibration", "None: no codec of this cache uses one", config.calibration
        )
        return load(config.calibration, model, config)
    lacking = sorted({name_of(codec) for codec in tuned if _needs_file(codec, specs[0])})
    need(
        not lacking,
        "calibration",
        f"a file, which {', '.join(lacking)} needs",
        None,
        _make_one(config),
    )
    return None


def needs_calibration(model: ModelConfig, config: CacheConfig) -> bool:
    """Whether some codec of this cache has no defaults for its calibrated arrays."""
    specs = group_specs(model, max_len=1, config=config, dtype="float32")
    return any(_needs_file(codec, spec) for spec in specs for codec in _pair(spec))


# -- which codecs, which layers ------------------------------------------------------------------


def _by_layer(model: Transformer, config: CacheConfig) -> tuple[GroupSpec, ...]:
    """The spec of each layer's cache; readers have the owner's, layers without tokens any one."""
    c = model.config
    specs = group_specs(c, max_len=1, config=config, dtype=model.dtype)
    of = {layer: spec for spec in specs for layer in spec.layers}
    return tuple(of.get(c.source_of(layer), specs[0]) for layer in range(c.num_layers))


def _need_own_layers(config: ModelConfig) -> None:
    """Presets spread bits over layers one by one."""
    own, got = len(config.owners) == config.num_layers, config.kv_source or config.layer_types
    fix = "Name the codec: --kv-cache-dtype turboquant4."
    need(own, "preset", "a model whose layers share no keys", got, fix)


def _pair(spec: GroupSpec) -> tuple[Codec, Codec]:
    return spec.k_codec, spec.v_codec


def _shapes(codec: Codec, spec: GroupSpec) -> Any:
    return codec.param_shapes(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)


def _uses_gradients(codec: Codec) -> bool:
    return codec.uses_weights or codec.uses_metric


def _has_params(spec: GroupSpec) -> tuple[bool, bool]:
    return bool(_shapes(spec.k_codec, spec)), bool(_shapes(spec.v_codec, spec))


@functools.cache
def _needs_file(codec: Codec, spec: GroupSpec) -> bool:
    """Whether `init_params` refuses. Some codecs have arrays with defaults (an order, a mask)."""
    try:
        codec.init_params(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
    except ValueError:
        return True
    return False


def _labels(specs: Sequence[GroupSpec]) -> tuple[dict[Codec, str], dict[Codec, str]]:
    """A role name in the file for each calibrated codec: "k", "k1", ...; "v", "v1", ..."""
    labels: tuple[dict[Codec, str], dict[Codec, str]] = ({}, {})
    for spec in specs:
        for known, role, codec in zip(labels, "kv", _pair(spec), strict=True):
            if _shapes(codec, spec) and codec not in known:
                known[codec] = role + (str(len(known)) if known else "")
    return labels


def _codecs(labels: tuple[dict[Codec, str], dict[Codec, str]]) -> dict[str, Codec]:
    return {label: codec for known in labels for codec, label in known.items()}


@functools.lru_cache(maxsize=8)
def _read(
    path: str,
    stamp: tuple[int, int],
    fingerprint: str,
    specs: tuple[GroupSpec, ...],
    owners: tuple[int, ...],
) -> Calibration:
    labels = _labels(specs)
    layers = files.load(path, fingerprint=fingerprint, codecs=_codecs(labels))

    def params_of(layer: int, role: int) -> Params:
        spec = specs[layer]
        codec = _pair(spec)[role]
        if codec not in labels[role] or layer not in owners:
            return {}
        got = layers.get(layer, {}).get(labels[role][codec])
        need(
            got is not None,
            "calibration",
            f"layer {layer}'s {name_of(codec)} in {path}",
            f"layers {sorted(layers)}",
            "Calibrate again with these layers.",
        )
        assert got is not None
        shape = {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        files.check_params(codec, got, **shape)
        return got

    return [(params_of(layer, 0), params_of(layer, 1)) for layer in range(len(specs))]


def _make_one(config: CacheConfig) -> str:
    names = config.k if config.k == config.v else f"{config.k}+{config.v}"
    layers = f" --kv-layers {config.layers}" if config.layers else ""
    return (
        f"Make one: python infer/calibrate.py --kv-cache-dtype {names}{layers} --out FILE "
        "(add --model unless it is the default), then give calibration=FILE."
    )


# -- collecting samples --------------------------------------------------------------------------


def _rows(config: ModelConfig, tokens: Any, sinks: int) -> list[np.ndarray]:
    rows = [np.asarray(row, np.int32) for row in tokens]
    for row in rows:
        need(
            row.ndim == 1 and sinks + 1 < row.size,
            "tokens",
            f"rows of over {sinks + 1} ids (the first {sinks} stay exact)",
            row.shape,
        )
        bad = row[(row < 0) | (row >= config.vocab_size)]
        need(bad.size == 0, "tokens", f"ids 0 to {config.vocab_size - 1}", bad[:5].tolist())
    need(bool(rows), "tokens", "at least one row", 0)
    return rows


def _blocks(
    layers: list[int], rows: list[np.ndarray], spec: GroupSpec, fisher: bool, limit: int
) -> Iterator[list[int]]:
    samples = sum(row.size for row in rows) * spec.num_kv_heads * spec.head_dim
    size = max(1, limit // (samples * 4 * (4 if fisher else 2)))
    for start in range(0, len(layers), size):
        yield layers[start : start + size]


def _collect(
    model: Transformer,
    rows: list[np.ndarray],
    layers: list[int],
    specs: Sequence[GroupSpec],
    fisher: bool,
) -> Iterator[tuple[int, Samples]]:
    """(layer, its samples over all rows)."""
    graphdef, state = nnx.split(model)
    pre = tuple(spec.k_codec.pre_rope for spec in specs)
    index = np.asarray([model.config.owners.index(layer) for layer in layers])
    sinks, size = specs[0].sinks, -(-max(row.size for row in rows) // LOSS_CHUNK) * LOSS_CHUNK
    parts = []
    for row in rows:
        padded = np.zeros((1, size), np.int32)
        padded[0, : row.size] = row
        length = jnp.asarray([row.size], jnp.int32)
        got = _keys_and_values(graphdef, state, jnp.asarray(padded), length, pre, fisher)
        own = [x[index, 0, sinks : row.size] for x in got]  # layers T K H
        parts.append([np.asarray(x.astype(jnp.float32)) for x in own])
    for i, layer in enumerate(layers):
        each = [np.concatenate([part[n][i] for part in parts]) for n in range(len(parts[0]))]
        each = [np.ascontiguousarray(np.swapaxes(x, 0, 1)) for x in each]
        yield layer, Samples(each[:2], each[2:] or None)


def _fit(spec: GroupSpec, samples: Samples) -> tuple[Params, Params]:
    out: list[Params] = []
    for role, codec in enumerate(_pair(spec)):
        shape = {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        if not codec.param_shapes(**shape):
            out.append({})
            continue
        how: dict[str, np.ndarray] = {}
        if samples.gradients is not None and codec.uses_weights:
            how["weights"] = np.square(samples.gradients[role])
        if samples.gradients is not None and codec.uses_metric:
            how["metric"] = metric(samples.gradients[role])
        params = codec.calibrate(samples.entries[role], **how)
        files.check_params(codec, params, **shape)
        out.append(params)
    return out[0], out[1]


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _keys_and_values(graphdef, state, tokens, lengths, pre, fisher):
    """Keys and values `[L, B, T, K, H]` of all layers; with fisher, gradients of the loss by them.

    Gradients come from zeros that are added to keys and values (taps): one backward pass, no
    gradient of any weight (methods.md 19.3).
    """
    model = nnx.merge(graphdef, state)
    if not fisher:
        return _run(model, tokens, lengths, pre, None)[1]
    c = model.config
    shape = (len(c.owners), *tokens.shape, c.num_kv_heads, c.head_dim)
    taps = (jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype))

    def loss(taps):
        x, kv = _run(model, tokens, lengths, pre, taps)
        return _loss(model, x, tokens, lengths), kv

    grads, kv = jax.grad(loss, has_aux=True)(taps)
    return (*kv, *grads)


def _run(model, tokens, lengths, pre, taps):
    """Normed final states, and every owner's (keys as its codec sees them, values)."""
    ropes = model.ropes(jnp.zeros_like(lengths), tokens.shape[1], lengths)
    owners = model.config.owners
    before = jnp.asarray([pre[layer] for layer in owners])
    ordinal = jnp.asarray([owners.index(n) if n in owners else 0 for n in range(len(pre))])

    class Tapped(Dense):
        """Adds an owner's taps to what it makes."""

        def fresh(self, k, v, plain):
            at = ordinal[self.place.index]
            if taps is not None:
                tap, rope = taps[0][at], ropes.get(self.place.kind.rope)
                interleave = model.config.rope_interleave
                turned = tap if rope is None else apply_rope(tap, *rope, interleave=interleave)
                k = k + jnp.where(before[at], turned, tap)
                v = v + taps[1][at]
            return KV(k, v, jnp.where(before[at], plain, k))

    def attend(place):
        kind = Retained if place.kind.retention else Tapped
        return kind(model.config, place, lengths)

    x, made = model.stack(model.embed(tokens), ropes, attend, remat=taps is not None)
    return model.norm(x), (made.k, made.v)


def _loss(model, x, tokens, lengths):
    """Summed cross-entropy of the next tokens, some logits at a time."""
    B, T = tokens.shape
    targets = jnp.roll(tokens, -1, axis=1)
    real = jnp.arange(T)[None] + 1 < lengths[:, None]
    chunks = [
        jnp.moveaxis(a.reshape(B, -1, LOSS_CHUNK, *a.shape[2:]), 1, 0) for a in (x, targets, real)
    ]

    @jax.checkpoint
    def of_chunk(part):
        x, targets, real = part
        logits = model.logits(x)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(real, jax.nn.logsumexp(logits, axis=-1) - chosen, 0))

    return jnp.sum(jax.lax.map(of_chunk, tuple(chunks)))
