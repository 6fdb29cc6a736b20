"""A codec's leaves as the GPU kernel reads them: it takes them as they are, unlike a TPU."""

from __future__ import annotations

from kvjax.codecs.base import Codec
from kvjax.codecs.codebook import lloyd_max
from kvjax.codecs.int_codec import Int, Int8
from kvjax.codecs.kivi import KiviKey, KiviValue
from kvjax.codecs.raw import Raw, RawKey
from kvjax.codecs.turboquant import TurboQuant
from pallas_kernels.paged_attention.gpu import Leaf


def gpu_leaf(codec: Codec, head_dim: int) -> Leaf:
    """Raises NotImplementedError, naming the codec, where the GPU kernel does not read it."""
    if isinstance(codec, RawKey):
        return Leaf(tokens_last=True)
    if isinstance(codec, Raw):
        return Leaf()
    if isinstance(codec, Int8):
        return Leaf(mode="token", group=head_dim)
    if isinstance(codec, Int) and codec.bits in (2, 4, 8):
        zero = float(codec._zero) if codec.symmetric else 0.0
        group, low = codec.group or head_dim, not codec.symmetric
        return Leaf("uniform", codec.bits, zero=zero, mode="token", group=group, low=low)
    if isinstance(codec, KiviKey | KiviValue) and codec.bits in (2, 4, 8):
        mode = "channel" if isinstance(codec, KiviKey) else "token"
        return Leaf("uniform", codec.bits, mode=mode, group=codec.group, low=True)
    if isinstance(codec, TurboQuant) and codec.bits in (2, 4):
        table = lloyd_max(codec.bits)
        return Leaf("codebook", codec.bits, table=table, mode="token", group=head_dim)
    raise NotImplementedError(f"{codec.name}: no GPU kernel reads {codec!r}.")
