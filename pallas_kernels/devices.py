"""A TPU's kernel where a program is for a TPU, and for one; plain XLA anywhere else.

A process without TPUs has plain XLA alone, and so its derivatives of all orders and its exports,
unless a mesh of TPUs is set, as when compiling for chips that are not here. With TPUs, XLA does not
partition a kernel over devices, and jax refuses to try. How many there are is known when a program
is lowered, not when it is traced, so a primitive holds both forms until then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir


class UnpartitionedKernelWarning(UserWarning):
    """A program for several devices runs plain XLA where for one it would run a kernel."""


def tpu_generation() -> int | None:
    """Of the TPUs that what is traced now is for, those of the mesh or of this process; None where
    there are none."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:  # it knows no such device
        return None


def on_tpu(kernel: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
    """`kernel(*operands)` where a program is lowered for a TPU, else `plain(*operands)`."""
    if tpu_generation() is None:
        return plain(*operands)
    return jax.lax.platform_dependent(*operands, tpu=kernel, default=plain)


def on_one_device(
    name: str, kernel: Callable[..., Any], plain: Callable[..., Any], *operands: Any
) -> Any:
    """`kernel(*operands)`, or `plain(*operands)` in a program that XLA partitions over devices.

    Both give arrays of the same shapes, in the same tree. In a `shard_map` over all axes of the
    mesh each device has arrays of its own, and runs the kernel. Warns with
    `UnpartitionedKernelWarning` when a program is lowered for several devices. name: what the
    warning says runs.
    """
    flat, tree = jax.tree.flatten(operands)

    def traced(f: Callable[..., Any]) -> tuple[ClosedJaxpr, Any]:
        def on_leaves(*leaves: Any) -> Any:
            return f(*jax.tree.unflatten(tree, leaves))

        return jax.make_jaxpr(on_leaves, return_shape=True)(*flat)

    (one, shapes), (several, _) = traced(kernel), traced(plain)
    out = _choice.bind(*flat, name=name, one=one, several=several)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


_choice = Primitive("on_one_device")
_choice.multiple_results = True


@_choice.def_abstract_eval
def _shapes(*_, one: ClosedJaxpr, several: ClosedJaxpr, name: str):
    expected, got = one.out_avals, several.out_avals
    if [(x.shape, x.dtype) for x in expected] != [(x.shape, x.dtype) for x in got]:
        raise TypeError(f"{name}: plain: expected {expected}, as the kernel gives, got {got}.")
    return expected


@_choice.def_impl
def _eager(*operands, **forms):
    with jax.disable_jit(False):
        return jax.jit(lambda *x: _choice.bind(*x, **forms))(*operands)


def _batched(operands, axes, *, one: ClosedJaxpr, several: ClosedJaxpr, name: str):
    def mapped(form: ClosedJaxpr) -> ClosedJaxpr:
        return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(form), in_axes=axes))(*operands)

    out = _choice.bind(*operands, name=name, one=mapped(one), several=mapped(several))
    return out, [0] * len(out)


def _lowered(ctx: Any, *operands, one: ClosedJaxpr, several: ClosedJaxpr, name: str):
    devices = _devices(ctx.module_context.axis_context)
    if devices > 1:
        warnings.warn(
            f"{name} runs in plain XLA, as the program is for {devices} devices, over which no"
            " kernel is partitioned. Put it in jax.shard_map to run the kernel on each.",
            UnpartitionedKernelWarning,
            stacklevel=2,
        )
    form = jaxpr_as_fun(several if devices > 1 else one)
    return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)


def _devices(axes: Any) -> int:
    """Over how many devices XLA partitions what is lowered here."""
    if hasattr(axes, "num_devices"):
        return axes.num_devices
    manual = axes.manual_axes | set(axes.mesh.manual_axes)
    return 1 if manual == set(axes.mesh.axis_names) else axes.mesh.size


batching.primitive_batchers[_choice] = _batched
mlir.register_lowering(_choice, _lowered)
