"""A decoder layer and a stack of them, run by `lax.scan` or one by one.

The stack has two storage forms with the same parameters. "stacked" holds each parameter of a run of
equal layers (`kvjax.layers.kinds`) once with a leading axis and scans: compile time is flat in
depth, the form for TPU, GPU and training. "unrolled" holds each layer's arrays apart: XLA's CPU
backend would copy a layer's weights out of the stack before each matrix product (measured: 1.7
times the time of a decode step), so it is the form for CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.config import ModelConfig, RopeConfig, need
from kvjax.layers.attention import KV, Attention, Rope
from kvjax.layers.kinds import LayerKind, Place, Run, exit_layer, layer_kind, runs_of
from kvjax.layers.mla import LatentAttention
from kvjax.layers.mlp import GatedMLP
from kvjax.layers.moe import MoE
from kvjax.layers.norm import norm_of
from kvjax.layers.retention import GatedRetention, State

Form = Literal["stacked", "unrolled"]
#: attention of one layer: an `Attend`, a `LatentAttend` with MLA, a `Retain` of gated retention
LayerAttend = Callable[[Place], Any]
#: angles of all positions of a call, by kind of RoPE
Ropes = Mapping[RopeConfig, Rope]


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a residual and the norms of the config."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        def norm(*placements: str):
            here = config.norm_placement in placements
            return norm_of(config, config.hidden_size, dtype=dtype) if here else None

        self.input_norm = norm("pre", "sandwich", "parallel")
        self.kv_norm = norm_of(config, config.hidden_size, dtype=dtype) if kind.kv_norm else None
        self.attention = _attention(config, kind)(config, kind, dtype=dtype, rngs=rngs)
        self.attention_out_norm = norm("sandwich", "post")
        self.post_norm = norm("pre", "sandwich")
        mlp = MoE if kind.moe else GatedMLP
        self.mlp = mlp(config, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = norm("sandwich", "post")
        self.parallel = config.norm_placement == "parallel"
        self.residual_scale = config.residual_scale

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: Rope | None,
        attend: Any,
        *,
        shared: KV | None = None,
        at: Int[Array, "B A"] | None = None,
        rope_at: Rope | None = None,
    ) -> tuple[Float[Array, "B A D"], KV | State]:
        """at: the tokens that go on from here, whose angles are rope_at; None: all."""
        source = normed = _maybe(self.input_norm, x)
        if self.kv_norm is not None:
            source = self.kv_norm(x)
        if at is not None:
            x, normed = take_tokens(x, at), take_tokens(normed, at)
        with jax.named_scope("attention"):
            out, kv = self.attention(
                normed,
                rope if at is None else rope_at,
                attend,
                source=source,
                source_rope=rope,
                shared=shared,
            )
            out = _maybe(self.attention_out_norm, out)
            if not self.parallel:
                x = self._add(x, out)
        with jax.named_scope("mlp"):
            inner = normed if self.parallel else _maybe(self.post_norm, x)
            y = _maybe(self.mlp_out_norm, self.mlp(inner))
            return self._add(x, y + out if self.parallel else y), kv

    def _add(self, x: Array, y: Array) -> Array:
        return x + y if self.residual_scale == 1.0 else x + y * self.residual_scale


def _attention(config: ModelConfig, kind: LayerKind) -> Any:
    """The class of a layer's attention."""
    if kind.retention:
        return GatedRetention
    return Attention if config.mla is None else LatentAttention


def _maybe(norm: Any, x: Array) -> Array:
    return x if norm is None else norm(x)


def take_tokens(x: Float[Array, "B T D"], at: Int[Array, "B A"]) -> Float[Array, "B A D"]:
    """The entries of some tokens of each row."""
    return jnp.take_along_axis(x, at[..., None], axis=1)


class Made(NamedTuple):
    """What the layers of a stack made of a call, for the cache: keys (as it stores them) and values
    of the O owners in order, and the states of the Z layers of gated retention (None without)."""

    k: Any  # [O, B, T, K, H]
    v: Any  # [O, B, T, K, R]
    states: Float[Array, "Z B N H H"] | None


class LayerStack(nnx.Module):
    """`num_layers` decoder layers; see the module's text for the two forms."""

    def __init__(self, config: ModelConfig, *, form: Form, dtype: jnp.dtype, rngs: nnx.Rngs):
        need(form in ("stacked", "unrolled"), "form", "'stacked' or 'unrolled'", form)
        self.form, self.config = form, config

        def layer(kind: LayerKind, rngs):
            return DecoderLayer(config, kind, dtype=dtype, rngs=rngs)

        def stacked(kind: LayerKind, repeats: int):
            make = nnx.vmap(lambda rngs: layer(kind, rngs))
            return make(rngs.split(repeats)) if repeats > 1 else layer(kind, rngs)

        if form == "unrolled":
            kinds = [layer_kind(config, i) for i in range(config.num_layers)]
            self.layers = nnx.List([layer(kind, rngs) for kind in kinds])
        else:
            self.runs = nnx.List(
                [nnx.List([stacked(k, run.repeats) for k in run.kinds]) for run in self.plan]
            )

    @property
    def plan(self) -> tuple[Run, ...]:
        """The runs of this form."""
        return runs_of(self.config, scan=self.form == "stacked")

    @property
    def stack(self) -> DecoderLayer:
        """The one stack of a model whose layers are all alike, stacked."""
        alike = self.form == "stacked" and len(self.plan) == self.plan[0].period == 1
        need(alike, "stack", "equal layers in stacked form", self.form)
        return self.runs[0][0]

    def layer_array(self, layer: int, *path: str) -> Array | None:
        """A parameter of one layer, such as "attention", "k_proj", "kernel"; None without it."""
        for run, modules in zip(self.plan, self.modules(), strict=True):
            for j, module in enumerate(modules):
                if layer in run.layers(j):
                    for name in path:
                        module = getattr(module, name, None)
                    if module is None:
                        return None
                    return (
                        module[...][run.layers(j).index(layer)] if run.repeats > 1 else module[...]
                    )
        raise ValueError(f"layer: expected 0 to {self.config.num_layers - 1}, got {layer}.")

    def modules(self) -> list[Any]:
        """The layers of each run."""
        return [[layer] for layer in self.layers] if self.form == "unrolled" else list(self.runs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        ropes: Ropes,
        attend: LayerAttend,
        *,
        at: Int[Array, "B A"] | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "B A D"], Made]:
        """The output, and what the layers made.

        at: tokens of each row whose output is wanted; layers from the exit layer's attention on run
        for them alone. remat: recompute layers under `grad`.
        """
        return _Pass(self, ropes, attend, at, remat).run(x)


class _Pass:
    """One call of a stack: what its runs have in common, and what earlier runs leave to later."""

    def __init__(self, stack: LayerStack, ropes: Ropes, attend: LayerAttend, at: Any, remat: bool):
        self.stack, self.attend, self.remat, self.at = stack, attend, remat, at
        self.leave = None if at is None else exit_layer(stack.config)
        self.ropes: dict[Any, Any] = {None: None, **ropes}
        self.ropes_at = dict(self.ropes)
        if self.leave is not None:
            assert at is not None
            turned = {k: tuple(take_tokens(t, at) for t in r) for k, r in ropes.items()}
            self.ropes_at |= turned
        self.fresh: dict[int, Any] = {}  # of owners that later runs read
        self.outside = _read_outside(stack.plan)

    def run(self, x: Array):
        pairs: list[Any] = []
        states: list[Any] = []
        for run, modules in zip(self.stack.plan, self.stack.modules(), strict=True):
            x, made = self._scan(run, modules, x)
            retained = {j for j in made if run.kinds[j].retention}
            for into, mine in ((states, retained), (pairs, made.keys() - retained)):
                if mine:  # periods x layers of a period -> in the order of layers
                    each = [made[j] for j in sorted(mine)]
                    into.append(jax.tree.map(lambda *a: _in_order(list(a)), *each))
        if self.at is not None and self.leave is None:
            x = take_tokens(x, self.at)
        k, v = jax.tree.map(lambda *a: jnp.concatenate(a), *pairs)
        return x, Made(k, v, jnp.concatenate(states) if states else None)

    def _scan(self, run: Run, modules: Any, x: Array) -> tuple[Array, dict[int, Any]]:
        """The run's output, and what each owner of a period made, repeats along axis 0."""
        parts = [nnx.split(module) for module in modules]
        graphs, states = [p[0] for p in parts], [p[1] for p in parts]
        if run.repeats == 1:
            x, made = self._period(run, graphs, states, 0, x)
            for j, kv in made.items():
                if run.start + j in self.outside:
                    self.fresh[run.start + j] = kv
            return x, {j: jax.tree.map(lambda a: a[None], kv.made) for j, kv in made.items()}

        def body(x, xs):
            repeat, states = xs
            x, made = self._period(run, graphs, states, repeat, x)
            kept = {j: kv for j, kv in made.items() if self.outside.intersection(run.layers(j))}
            return x, ({j: kv.made for j, kv in made.items()}, kept)

        x, (made, kept) = jax.lax.scan(body, x, (jnp.arange(run.repeats), states))
        for j, kv in kept.items():
            for repeat, layer in enumerate(run.layers(j)):
                if layer in self.outside:
                    self.fresh[layer] = jax.tree.map(lambda a, r=repeat: a[r], kv)
        return x, made

    def _period(self, run: Run, graphs, states, repeat: Any, x: Array):
        made: dict[int, Any] = {}
        for j, kind in enumerate(run.kinds):
            place = self._place(run, j, repeat)
            offset = run.sources[j]
            shared = None
            if not kind.owns:
                shared = made[offset] if offset >= 0 else self.fresh[-1 - offset]
            x, kv = self._apply(graphs[j], states[j], x, place, shared)
            if kind.owns:
                made[j] = kv
        return x, made

    def _place(self, run: Run, j: int, repeat: Any) -> Place:
        offset, among = run.sources[j], run.layers(j)
        if offset >= 0:
            sources = run.layers(offset)
            source = run.start + offset + repeat * run.period
        else:
            sources, source = (-1 - offset,), -1 - offset
        index = run.start + j + repeat * run.period
        left = self.leave is not None and among[0] >= self.leave
        return Place(run.kinds[j], index, among, source, sources, self.at if left else None)

    def _apply(self, graph, state, x: Array, place: Place, shared: KV | None):
        leaves = self.leave is not None and place.among[0] == self.leave
        after = self.leave is not None and place.among[0] > self.leave
        rope = (self.ropes_at if after else self.ropes)[place.kind.rope]
        extra = {"at": self.at, "rope_at": self.ropes_at[place.kind.rope]} if leaves else {}
        attend = self.attend(place)

        def run(state, x, shared):
            return nnx.merge(graph, state)(x, rope, attend, shared=shared, **extra)

        return (jax.checkpoint(run) if self.remat else run)(state, x, shared)


def _in_order(parts: list[Array]) -> Array:
    """Of each owner of a period its entries `[repeats, ...]`: all, in the order of layers."""
    both = jnp.stack(parts, axis=1)
    return both.reshape(-1, *both.shape[2:])


def _read_outside(plan: tuple[Run, ...]) -> frozenset[int]:
    """Owners that layers of later runs read."""
    return frozenset(-1 - s for run in plan for s in run.sources if s < 0)
