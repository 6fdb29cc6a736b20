"""What a codec is: how the entries of a sealed page are written and read.

A codec is a small frozen dataclass (hashable, so it is static under `jit`) with pure functions.
It sees the *page block* of each KV head: `x` of shape `[..., K, T, H]`, T consecutive tokens of
head dim H, and turns it into a dict of arrays, the *codes*, with the same leading axes. Whatever
must travel with a page (scales, outliers) is in that dict, each in a leaf of its own.

Two facts let one attention serve every codec:

* a key codec is a linear functional of the query: `score = prepare_query(q) . decode(codes)`;
* a value codec is linear after the weighted sum: `out = finish_output(sum_t p_t decode(codes)_t)`.

So a rotation is applied once to the query (or once to the output), never to every cached token.

Calibrated arrays (means, levels, bases) are not static: they come in as `params`, a dict of arrays
of one layer with the KV head as leading axis, `[K, ...]`. A codec without any has `params = {}`.

Layouts every leaf keeps to (`pallas.md`: a scale as a column costs a relayout, as a row nothing):

* `words*`: uint32 `[..., K, T*b/32, H]`, adjacent tokens share a word (`packing.py`);
* one number a token: `[..., K, T]`; several: `[..., K, n, T]`, tokens last;
* per channel and group of tokens: `[..., K, T/group, H]`, channels last;
* `x` (raw, int8, fp8): `[..., K, T, H]`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

Codes = dict[str, Array]
Params = dict[str, Any]
Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """Base of all codecs. Subclasses add their parameters as dataclass fields."""

    #: the method's family; `codecs.name_of` gives the name on the command line
    name: ClassVar[str]
    #: keys are encoded before RoPE and rotated when they are read (KVQuant)
    pre_rope: ClassVar[bool] = False
    #: the stored form has tokens last: `decode_t` costs nothing, and `decode` a transposition
    tokens_last: ClassVar[bool] = False
    #: the stored `x` is what `decode` (for keys `decode_t`) gives: attention may read it in place
    in_place: ClassVar[bool] = False
    #: a token's codes are its own, in leaves of the layouts above: it may be written over alone
    single: ClassVar[bool] = False
    #: `calibrate` uses weights; the others refuse them
    uses_weights: ClassVar[bool] = False
    #: `calibrate` takes `metric` `[K, H, H]`: E[g g^T], g the loss's gradient by an entry
    uses_metric: ClassVar[bool] = False

    def check(self, *, head_dim: int, page_size: int, role: str) -> None:  # noqa: B027
        """Raises ValueError when this codec cannot hold pages of this shape. role: "k" or "v"."""

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        """Codes of T tokens. Pure, deterministic; each leaf keeps the leading axes of `x`."""

    def quantise(self, x: Float[Array, "*lead T H"], params: Params) -> Codes:
        """`encode` before codes are packed: leaves `words*` hold a code for each token and channel,
        uint32 `[..., K, T, H]`. For kernels with words of their own."""
        return self.encode(x, params)

    @abc.abstractmethod
    def decode(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead T R"]:
        """What the codes stand for, in the codec's own (perhaps rotated) space of R channels."""

    def decode_t(self, codes: Codes, params: Params, dtype: Any) -> Float[Array, "*lead R T"]:
        """`decode` with tokens last, the form in which keys are used."""
        return jnp.swapaxes(self.decode(codes, params, dtype), -1, -2)

    def prepare_query(self, q: Float[Array, "*lead H"], params: Params) -> Float[Array, "*lead R"]:
        """Takes a query to the space of `decode`. For key codecs."""
        return q

    def finish_output(self, o: Float[Array, "*lead R"], params: Params) -> Float[Array, "*lead H"]:
        """Takes a weighted sum of decoded values back to the head's space. For value codecs."""
        return o

    def param_shapes(self, *, num_kv_heads: int, head_dim: int) -> Shapes:
        """Shapes of one layer's params, `[K, ...]`; known without a calibration file."""
        return {}

    def init_params(self, *, num_kv_heads: int, head_dim: int) -> Params:
        """Arrays of one layer without a calibration file. Codecs that need one raise."""
        return {}

    def calibrate(self, samples: np.ndarray, weights: np.ndarray | None = None) -> Params:
        """Params of one layer from samples `[K, S, H]` of what `encode` will see.

        weights: same shape, how much an error there matters (Fisher: squared gradient of the loss).
        """
        self.refuse_weights(weights)
        return self.init_params(num_kv_heads=samples.shape[0], head_dim=samples.shape[2])

    def refuse_weights(self, weights: np.ndarray | None) -> None:
        if weights is not None:
            raise ValueError(f"{self.name}: calibrate takes no weights (uses_weights is False).")

    def code_shapes(
        self, *, tokens: int, head_dim: int, num_kv_heads: int = 1, dtype: Any
    ) -> Shapes:
        """Shapes of the codes of one page: `[K, ...]` leaves. Allocation and the size formula."""
        x = jax.ShapeDtypeStruct((num_kv_heads, tokens, head_dim), dtype)
        params = self.param_shapes(num_kv_heads=num_kv_heads, head_dim=head_dim)
        return jax.eval_shape(self.encode, x, params)


def code_bytes(shapes: Mapping[str, Any]) -> int:
    """Bytes of codes, from arrays or their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())


def effective_bits(codec: Codec, *, head_dim: int, page_size: int, dtype: Any) -> float:
    """Bits a cached number costs, scales and side tables included."""
    shapes = codec.code_shapes(tokens=page_size, head_dim=head_dim, dtype=dtype)
    return 8 * code_bytes(shapes) / (head_dim * page_size)


def per_head(p: Shaped[Array, "K C"], x: Shaped[Array, "*lead"]) -> Shaped[Array, "*ones K 1 C"]:
    """A param of one layer, shaped to meet `x` of `[..., K, T or G, C]` at equal rank."""
    K, C = p.shape
    return p.reshape((1,) * (x.ndim - 3) + (K, 1, C))


def times_head(
    x: Float[Array, "*lead K T H"], matrix: Float[Array, "K H R"]
) -> Float[Array, "*lead K T R"]:
    """Each KV head's tokens times its matrix, in float32; the dtype of x is kept."""
    wide = jnp.moveaxis(x.astype(jnp.float32), -3, 0)  # K ... T H
    flat = wide.reshape(wide.shape[0], -1, wide.shape[-1])
    y = jnp.matmul(flat, matrix, precision="highest").reshape(*wide.shape[:-1], -1)
    return jnp.moveaxis(y, 0, -3).astype(x.dtype)


def stored_as(dtype: Any) -> Callable[[Array], Array]:
    """`as_scale` of this dtype."""
    return functools.partial(as_scale, dtype=dtype)


def as_scale(s: Float[Array, "*s"], dtype: Any = jnp.float16) -> Float[Array, "*s"]:
    """Stores a scale, norm or minimum: clipped to what `dtype` holds, so never inf.

    Below 6e-8 a float16 becomes 0 and its group decodes to its offset; `divide` makes that safe.
    """
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(s, -top, top).astype(dtype)


def divide(x: Float[Array, "*x"], scale: Float[Array, "*s"]) -> Float[Array, "*x"]:
    """x / scale in float32, with 0/0 = 0: `scale` is the stored one, which may have become 0."""
    scale = scale.astype(jnp.float32)
    return x * jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def need_divides(part: int, whole: int, what: str, of: str, fix: str = "") -> None:
    """Raises ValueError with both numbers unless `part` divides `whole`."""
    if part <= 0 or whole % part:
        raise ValueError(f"{what}: expected a divisor of {of}={whole}, got {part}. {fix}".rstrip())


def need_calibration(codec: Codec) -> ValueError:
    """What `init_params` of a calibrated codec raises."""
    return ValueError(
        f"{codec.name}: no defaults exist for its calibrated arrays; a calibration file is needed. "
        "Make one with codec.calibrate on the model's keys and values and "
        "kvjax.codecs.calibrate.save, or take a codec without one, such as turboquant4."
    )


def need_role(role: str, expected: str, codec: str, instead: str) -> None:
    if role != expected:
        raise ValueError(f"{codec}: expected role {expected!r}, got {role!r}. Use {instead}.")


def need_bits(bits: int, low: int, high: int, codec: str) -> None:
    if not low <= bits <= high:
        raise ValueError(f"{codec}: bits: expected {low} to {high}, got {bits}.")
