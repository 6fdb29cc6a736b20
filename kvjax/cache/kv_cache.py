"""The cache pytree: allocation, and what the model calls: `attend` per layer, `append` once.

Layers only read the cache; their new keys and values come back stacked and are appended in one
place after the last layer. So layers that share KV need no special case, the pool is written in
place, and one function owns quantise-and-write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.append import append_group
from kvjax.cache.attend import Chunk, How, LayerView, attend_layer
from kvjax.cache.heavy import Scored, append_heavy, fill_heavy, step_mass
from kvjax.cache.latent import LatentChunk, attend_latent
from kvjax.cache.pool import Pool
from kvjax.cache.spec import GroupSpec
from kvjax.checks import need
from kvjax.codecs.base import Params
from kvjax.eviction import Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Cache of the layers in `spec.layers`."""

    pool: Pool
    k_exact: Float[Array, "slots B K H E"]  # tokens last: a score is a plain product
    v_exact: Float[Array, "slots B K E R"]
    table: Int[Array, "slots B M"]  # ids among the layer's pages
    k_params: Params  # calibrated arrays of the codecs, leaves [slots, K, ...]
    v_params: Params
    spec: GroupSpec = dataclasses.field(metadata={"static": True})
    evicted: Int[Array, "B"] | None = None  # tokens of each row that eviction took
    positions: Int[Array, "slots B K C"] | None = None  # for keys that are turned when read
    scores: Float[Array, "slots B K E"] | None = None  # of tokens that may yet be evicted

    def rows(self, length: Int[Array, "B"]) -> Int[Array, "B"]:
        """Tokens that rows of this true length have here."""
        if self.spec.heavy:
            return jnp.minimum(length, self.spec.max_len)
        return length if self.evicted is None else length - self.evicted

    def layer(self, slot: int | Int[Array, ""]) -> LayerView:
        """What one layer reads. slot: an int where the pool is unrolled."""

        def of(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, slot, keepdims=False)

        k_pages, v_pages, offset = self.pool.at(slot)
        return LayerView(
            k_pages=k_pages,
            v_pages=v_pages,
            k_exact=of(self.k_exact),
            v_exact=of(self.v_exact),
            table=of(self.table) + offset,
            k_params=jax.tree.map(of, self.k_params),
            v_params=jax.tree.map(of, self.v_params),
            spec=dataclasses.replace(self.spec, layers=()),  # one trace serves every layer
            evicted=self.evicted,
            positions=None if self.positions is None else of(self.positions),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """All layers' cache. `length [B]`: true tokens of each row so far.

    layer_map[l] = (group, slot) of the layer whose keys and values layer l reads, or, of a layer of
    gated retention, (-1, slot in `states`). pending: a prompt is still to come, whose tokens the
    policy judges; its call takes the whole prompt.
    """

    groups: tuple[LayerGroup, ...]
    length: Int[Array, "B"]
    layer_map: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    max_len: int = dataclasses.field(metadata={"static": True})
    policy: Policy | None = dataclasses.field(default=None, metadata={"static": True})
    pending: bool = dataclasses.field(default=False, metadata={"static": True})
    states: Float[Array, "Z B N H H"] | None = None  # float32, of layers of gated retention

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def owners(self) -> tuple[int, ...]:
        """The layers that have keys and values here, in order."""
        return tuple(sorted(layer for group in self.groups for layer in group.spec.layers))

    @property
    def judged(self) -> tuple[int, ...]:
        """Those of them whose tokens a policy judges: layers with windows keep theirs."""
        groups = [group for group in self.groups if group.spec.kept is not None]
        return tuple(sorted(layer for group in groups for layer in group.spec.layers))

    @property
    def most_kept(self) -> int:
        """Tokens that a layer leaves of a prompt at most."""
        specs = [group.spec for group in self.groups]
        return max(spec.span if spec.kept is None else spec.kept for spec in specs)

    @property
    def scores_steps(self) -> bool:
        """Each decode step's attention counts for what is evicted next."""
        return self.policy is not None and self.policy.decodes

    def _among_owners(self, group: LayerGroup) -> tuple[int, ...]:
        """Which of the owners are the group's layers."""
        owners = self.owners
        return tuple(owners.index(layer) for layer in group.spec.layers)

    @property
    def start(self) -> Int[Array, "B"]:
        """The position, as RoPE sees it, of each row's next token."""
        return self.length - self.groups[0].spec.shift(self.length)

    @property
    def longest_call(self) -> int | None:
        """Tokens that one call may bring at most; None: no bound."""
        if self.scores_steps and not self.pending:
            return 1  # every token's attention is judged before the next comes
        stream = self.groups[0].spec.stream
        return None if stream is None else stream.recent

    def attend(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "B A K G H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        new: Int[Array, "B"],
        how: How,
        among: Sequence[int] | None = None,
        at: Int[Array, "B A"] | None = None,
        sinks: Float[Array, "K G"] | None = None,
    ) -> Float[Array, "B A K G H"]:
        """Attention of a chunk to the cached tokens and, causally, to itself.

        layer: any layer, a reader too; it may be traced (a scan over layers), and is then one of
        `among` (None: any). k, v: the chunk's own keys and values, not yet appended; new: its real
        tokens per row; at: which of its tokens attend, None for all. sinks: see `Chunk`.
        """
        chunk = Chunk(q, k, v, self.length, new, at, sinks, how)
        return self._of(layer, among, lambda view: attend_layer(view, chunk))

    def mass(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "B 1 K G H"],
        k: Float[Array, "B 1 K H"],
        *,
        how: How,
        among: Sequence[int] | None = None,
    ) -> Float[Array, "B K E+1"]:
        """Attention that one token of each row pays to the slots and to itself; zeros in layers
        whose tokens are not judged."""
        slots = max(group.spec.places for group in self.groups if group.spec.heavy)
        return self._of(layer, among, lambda view: step_mass(view, q, k, how, slots=slots))

    def attend_latent(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "B A N U"],
        q_rope: Float[Array, "B A N R"],
        k: Float[Array, "B T 1 C"],
        v: Float[Array, "B T 1 R"],
        *,
        up: tuple[Float[Array, "C N U"], Float[Array, "C N W"]],
        new: Int[Array, "B"],
        how: How,
        among: Sequence[int] | None = None,
        at: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A N W"]:
        """`attend` where the cache holds latents `k` and rotated keys `v`; see `LatentChunk`."""
        chunk = LatentChunk(q, q_rope, k, v, up[0], up[1], self.length, new, at, how)
        return self._of(layer, among, lambda view: attend_latent(view, chunk))

    def _of(
        self,
        layer: int | Int[Array, ""],
        among: Sequence[int] | None,
        read: Callable[[LayerView], Array],
    ) -> Array:
        """`read` of what the layer's owner has."""
        if isinstance(layer, int):
            g, slot = self.layer_map[layer]
            return read(self.groups[g].layer(slot))
        among = range(len(self.layer_map)) if among is None else among
        used = sorted({self.layer_map[member][0] for member in among} - {-1})
        groups, slots = (jnp.asarray(x)[layer] for x in zip(*self.layer_map, strict=True))
        if len(used) == 1:
            return read(self.groups[used[0]].layer(slots))
        branches = [lambda slot, g=g: read(self.groups[g].layer(slot)) for g in used]
        return jax.lax.switch(jnp.searchsorted(jnp.asarray(used), groups), branches, slots)

    def state_of(self, layer: int | Int[Array, ""]) -> Float[Array, "B N H H"]:
        """The state of a layer of gated retention."""
        assert self.states is not None
        slot = jnp.asarray([slot for _, slot in self.layer_map])[layer]
        return jax.lax.dynamic_index_in_dim(self.states, slot, keepdims=False)

    def stored_keys(
        self,
        layer: int | Int[Array, ""],
        roped: Float[Array, "B T K H"],
        plain: Float[Array, "B T K H"],
    ) -> Float[Array, "B T K H"]:
        """What `append` wants of a layer's keys: after RoPE, or before it as its codec needs."""
        before = [self.groups[g].spec.turns for g, _ in self.layer_map]
        if len(set(before)) == 1:
            return plain if before[0] else roped
        if isinstance(layer, int):
            return plain if before[layer] else roped
        return jnp.where(jnp.asarray(before)[layer], plain, roped)

    def append(
        self,
        k: Float[Array, "O B T K H"],
        v: Float[Array, "O B T K R"],
        *,
        new: Int[Array, "B"],
        states: Float[Array, "Z B N H H"] | None = None,
    ) -> KVCache:
        """The cache with each row's first `new[b]` tokens of the chunk appended.

        k, v: of the O layers that own keys and values, in order. states: of the layers of gated
        retention, after the chunk. A row must not grow past `max_len`: callers check that, what
        would lie past it is dropped.
        """
        want, got = ("none" if s is None else str(s.shape) for s in (self.states, states))
        need(want == got, "states", f"{want}, of the layers with gated retention", got)

        def appended(group: LayerGroup) -> LayerGroup:
            mine = self._among_owners(group)
            fresh, own = jax.tree.map(lambda x: _take(x, mine), (k, v))
            if group.spec.heavy:
                assert self.policy is not None
                return append_heavy(group, self.policy, fresh, own, length=self.length, new=new)
            fresh = fresh.k if isinstance(fresh, Scored) else fresh
            return append_group(group, fresh, own, length=group.rows(self.length), new=new)

        if states is not None and self.states is not None:  # rows without new tokens keep theirs
            states = jnp.where((new > 0)[None, :, None, None, None], states, self.states)
        groups = tuple(appended(group) for group in self.groups)
        return dataclasses.replace(self, groups=groups, length=self.length + new, states=states)

    def fill(
        self, kept: Kept, v: Float[Array, "O B C K R"], *, lengths: Int[Array, "B"]
    ) -> KVCache:
        """The cache of prompts of these lengths, of which the owners kept some tokens."""
        policy, judged = self.policy, self.judged
        assert policy is not None
        factors = policy.factors(len(judged))

        def filled(group: LayerGroup) -> LayerGroup:
            mine, spec = self._among_owners(group), group.spec
            C = min(spec.span if spec.kept is None else spec.kept, kept.k.shape[2])
            own = _take(kept.k, mine)[:, :, :C], _take(v, mine)[:, :, :C]
            if spec.kept is None:  # a window: its newest tokens, as they are
                first = spec.reached(lengths)
                return append_group(group, *own, length=first, new=lengths - first)
            factor = factors[judged.index(spec.layers[0])]
            keep = policy.keep(lengths, longest=kept.length, factor=factor)
            if group.spec.heavy:
                places, scores = (_take(x, mine)[..., :C] for x in (kept.at, kept.scores))
                stayed = (group, own[0], places, scores, own[1])
                return fill_heavy(*stayed, lengths=lengths, padded=kept.length)
            zero = jnp.zeros_like(lengths)
            group = append_group(group, *own, length=zero, new=keep)
            evicted = lengths - keep
            positions = group.positions
            if positions is not None:
                at = _take(kept.at, mine)[..., :C]
                place = jnp.arange(C)[None, None, None]
                later = place + evicted[None, :, None, None]
                at = jnp.where(place < keep[None, :, None, None], at, later)
                positions = positions.at[..., :C].set(at)
            return dataclasses.replace(group, evicted=evicted, positions=positions)

        groups = tuple(filled(group) for group in self.groups)
        return dataclasses.replace(self, groups=groups, length=lengths, pending=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """Keys that stay of a prompt, with their places in it."""

    k: Float[Array, "*O B C K H"]
    at: Int[Array, "*O B K C"]
    scores: Float[Array, "*O B K C"]
    length: int = dataclasses.field(metadata={"static": True})  # of the call, padding included


def _take(x: Array, index: tuple[int, ...]) -> Array:
    return x if index == tuple(range(x.shape[0])) else x[np.asarray(index)]
