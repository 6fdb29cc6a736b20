"""Slots that single tokens take from each other: the cache of policies that evict while decoding.

Without a codec there are no pages: each KV head has as many exact slots as the budget, and in
`positions` and `scores` what they hold (with one, see `kvjax.cache.slots`). A step's attention to
the slots comes back with its keys (`Scored`), since layers only read; `append_heavy` adds it up and
puts the new token where the lightest was.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.attend import How, LayerView
from kvjax.cache.slots import append_coded, fill_coded, slot_keys
from kvjax.eviction import Policy
from pallas_kernels.softmax import soft_cap

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import LayerGroup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """A step's keys, and the attention it paid to each slot and, last, to itself."""

    k: Float[Array, "*O B 1 K H"]
    mass: Float[Array, "*O B K E+1"]


def step_mass(
    layer: LayerView,
    q: Float[Array, "B 1 K G H"],
    k: Float[Array, "B 1 K H"],
    how: How,
    *,
    slots: int,
) -> Float[Array, "B K E+1"]:
    """Softmax weights of one token's queries over the slots and itself, summed over the group.

    With latent attention H is that of the latent and the rotated key. slots: E, for layers without
    such slots, which get zeros.
    """
    if not layer.spec.heavy:
        return jnp.zeros((q.shape[0], q.shape[2], slots + 1), jnp.float32)
    assert layer.positions is not None
    rows, keys = q[:, 0].astype(jnp.float32), layer.k_exact  # B K G H, B K H E
    if layer.spec.latent:
        keys = jnp.concatenate([keys, jnp.swapaxes(layer.v_exact, 2, 3)], axis=2)
    old = jnp.einsum("bkgh,bkhe->bkge", rows, keys.astype(jnp.float32))
    if layer.spec.coded:
        turned = layer.spec.k_codec.prepare_query(rows, layer.k_params).astype(jnp.float32)
        coded = jnp.einsum("bkgr,bkrz->bkgz", turned, slot_keys(layer, jnp.float32))
        old = jnp.concatenate([old, coded], axis=-1)
    own = jnp.einsum("bkgh,bkh->bkg", rows, k[:, 0].astype(jnp.float32))
    scores = soft_cap(jnp.concatenate([old, own[..., None]], axis=-1) * how.scale, how.softcap)
    valid = jnp.pad(layer.positions >= 0, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    weights = jax.nn.softmax(jnp.where(valid[:, :, None], scores, -1e30), axis=-1)
    return jnp.sum(weights, axis=2)


def append_heavy(
    group: LayerGroup,
    policy: Policy,
    fresh: Scored,
    v: Float[Array, "slots B 1 K R"],
    *,
    length: Int[Array, "B"],
    new: Int[Array, "B"],
) -> LayerGroup:
    """One token of each row (none where new is 0) into an empty slot, or the lightest one's."""
    assert group.positions is not None
    assert group.scores is not None
    at, real = group.positions, (new > 0)[None, :, None]  # slots B K E
    scores = group.scores + jnp.where(at >= 0, fresh.mass[..., :-1], 0.0)
    scores = jnp.where(real[..., None], scores, group.scores)
    if group.spec.coded:
        return append_coded(
            group,
            policy.sinks,
            fresh.k,
            v,
            scores,
            fresh.mass[..., -1:],
            length=length,
            real=new > 0,
        )
    recent = (length + 1 - policy.window)[None, :, None, None]
    safe = (at >= recent) | ((at >= 0) & (at < policy.sinks))
    worth = jnp.where(at < 0, -1.0, jnp.where(safe, jnp.inf, scores))
    slot = jnp.arange(at.shape[-1])[None, None, None]
    here = slot == jnp.argmin(worth, axis=-1)[..., None]
    here = here & real[..., None]
    k_new = jnp.moveaxis(fresh.k, 2, 4).astype(group.k_exact.dtype)  # slots B K H 1
    v_new = jnp.moveaxis(v, 2, 3).astype(group.v_exact.dtype)  # slots B K 1 R
    return dataclasses.replace(
        group,
        k_exact=jnp.where(here[..., None, :], k_new, group.k_exact),
        v_exact=jnp.where(here[..., None], v_new, group.v_exact),
        positions=jnp.where(here, length[None, :, None, None], at),
        scores=jnp.where(here, fresh.mass[..., -1:], scores),
    )


def fill_heavy(
    group: LayerGroup,
    k: Float[Array, "slots B C K H"],
    at: Int[Array, "slots B K C"],
    scores: Float[Array, "slots B K C"],
    v: Float[Array, "slots B C K R"],
    *,
    lengths: Int[Array, "B"],
    padded: int,
) -> LayerGroup:
    """The group with what stayed of prompts; places of `padded` and beyond hold nothing."""
    if group.spec.coded:
        return fill_coded(group, k, at, scores, v, lengths=lengths, padded=padded)
    assert group.positions is not None
    assert group.scores is not None
    C, there = at.shape[-1], at < padded
    k_t, v = jnp.moveaxis(k, 2, 4), jnp.moveaxis(v, 2, 3)  # slots B K H C, slots B K C R
    return dataclasses.replace(
        group,
        k_exact=group.k_exact.at[..., :C].set(k_t.astype(group.k_exact.dtype)),
        v_exact=group.v_exact.at[..., :C, :].set(v.astype(group.v_exact.dtype)),
        positions=group.positions.at[..., :C].set(jnp.where(there, at, -1)),
        scores=group.scores.at[..., :C].set(jnp.where(there, scores, 0.0)),
    )
