"""Runs the GPU kernel in Triton's interpreter on this machine: `python triton_stand_in.py NAME`.

The interpreter wants torch tensors; `Tensor` has the few of their methods it calls, over numpy.
Prints the largest error over the deviation of the expected output.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import jax.numpy as jnp
import numpy as np
import triton.language as tl

from kvjax import codecs
from kvjax.cache.gpu_leaf import gpu_leaf
from pallas_kernels.paged_attention.gpu import constants
from pallas_kernels.paged_attention.gpu_kernel import paged_attention_kernel
from pallas_kernels.paged_attention.xla import paged_partial
from pallas_kernels.softmax import Partial, finish, merge


class Tensor:
    def __init__(self, array):
        self.value = np.ascontiguousarray(np.asarray(array)).copy()
        self.dtype = _Dtype(self.value.dtype.name)

    def data_ptr(self):
        return self.value.ctypes.data

    def untyped_storage(self):
        return _Storage(self.value)

    def storage_offset(self):
        return 0

    def size(self):
        return self.value.shape

    def stride(self, i=None):
        strides = tuple(s // self.value.itemsize for s in self.value.strides)
        return strides if i is None else strides[i]

    def new_empty(self, n, device=None):
        return self

    def set_(self, *storage):
        pass

    @property
    def shape(self):
        return self.value.shape

    def element_size(self):
        return self.value.itemsize

    def numel(self):
        return self.value.size

    def is_contiguous(self):
        return True


class _Storage:
    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        pass  # the same memory


class _Dtype:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return "torch." + self.name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return str(self) == str(other)


def run(name: str) -> float:
    B, K, Q, H, T, M, splits = 3, 2, 5, 64, 128, 2, 2
    rng = np.random.default_rng(0)
    k_codec, v_codec = codecs.pair(name)
    k_leaf, v_leaf = gpu_leaf(k_codec, H), gpu_leaf(v_codec, H)
    pages = []
    for codec, mean in ((k_codec, 0.0), (v_codec, 1.0)):
        x = jnp.asarray(rng.normal(size=(B * M, K, T, H)) + mean, jnp.float32)
        codes = codec.encode(x, {})
        pages.append({n: jnp.pad(c, [(1, 0)] + [(0, 0)] * (c.ndim - 1)) for n, c in codes.items()})
    q = jnp.asarray(rng.normal(size=(B, K, Q, H)), jnp.float32)
    table = jnp.asarray(1 + rng.permutation(B * M).reshape(B, M), jnp.int32)
    used = jnp.asarray([M, 1, 0], jnp.int32)
    expected = paged_partial(
        q, *pages, table, used, scale=0.2, page_size=T,
        decode_k=lambda c, t: k_codec.decode(c, {}, jnp.float32),
        decode_v=lambda c, t: v_codec.decode(c, {}, jnp.float32),
    )  # fmt: skip
    rows = 16
    outs = [Tensor(np.zeros((B, K, splits, rows, *s), np.float32)) for s in ((H,), (), ())]
    arrays = [jnp.pad(q, ((0, 0), (0, 0), (0, rows - Q), (0, 0)))]
    arrays += [*k_leaf.arrays(pages[0]), *v_leaf.arrays(pages[1]), table, used]
    static = constants(
        k_leaf, v_leaf, heads=K, rows=rows, head_dim=H, page_size=T, pages=M, splits=splits
    )
    paged_attention_kernel[(B * K, splits)](
        *map(Tensor, arrays), *outs, FACTOR=0.2 * float(np.log2(np.e)), CT=tl.float32, **static
    )
    values = [jnp.asarray(o.value) for o in outs]
    parts = [Partial(*(x[:, :, i, :Q] for x in values)) for i in range(splits)]
    got, want = finish(merge(*parts)), finish(expected)
    assert float(jnp.abs(got[2]).max()) == 0.0
    return float(jnp.abs(got - want).max() / jnp.std(want))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, run(argument), flush=True)
