"""Calibration files: the params of every layer's codecs, tied to the model they were made from.

A safetensors file with tensors `<layer>.<role>.<param>` and, in its metadata, a fingerprint of the
model and the codecs. Levels from another model give fluent nonsense, so a mismatch is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.codecs.base import Codec, Params

Layers = Mapping[int, Mapping[str, Params]]
_FORMAT = "kvjax-calibration-1"


def save(
    path: str | Path, layers: Layers, *, fingerprint: str, codecs: Mapping[str, Codec]
) -> None:
    """Writes `layers[layer][role]`, role "k" or "v", for the codecs of each role."""
    tensors = {
        f"{layer}.{role}.{name}": np.asarray(array)
        for layer, roles in layers.items()
        for role, params in roles.items()
        for name, array in params.items()
    }
    metadata = {"format": _FORMAT, "fingerprint": fingerprint}
    metadata |= {role: repr(codec) for role, codec in codecs.items()}
    temporary = Path(f"{path}.tmp")
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)  # whole or not at all


def load(
    path: str | Path, *, fingerprint: str, codecs: Mapping[str, Codec]
) -> dict[int, dict[str, Params]]:
    """The inverse of `save`; refuses a file of another model or for other codecs."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"calibration file {path}: not a safetensors file ({error}).") from error
    _match(path, "format", _FORMAT, metadata.get("format"))
    _match(path, "fingerprint", fingerprint, metadata.get("fingerprint"))
    for role, codec in codecs.items():
        _match(path, f"codec for {role!r}", repr(codec), metadata.get(role))
    layers: dict[int, dict[str, Params]] = {}
    for key, array in tensors.items():
        layer, role, name = key.split(".", 2)
        if role in codecs:
            layers.setdefault(int(layer), {}).setdefault(role, {})[name] = jnp.asarray(array)
    return dict(sorted(layers.items()))


def check_params(codec: Codec, params: Params, *, num_kv_heads: int, head_dim: int) -> None:
    """Raises ValueError unless params are what `codec` needs for heads of this shape."""
    want = codec.param_shapes(num_kv_heads=num_kv_heads, head_dim=head_dim)
    expected = {name: (s.shape, str(s.dtype)) for name, s in want.items()}
    got = {name: (a.shape, str(a.dtype)) for name, a in params.items()}
    if expected != got:
        raise ValueError(f"{codec.name}: params: expected {expected}, got {got}.")


def _match(path: str | Path, what: str, expected: str, got: str | None) -> None:
    if expected != got:
        raise ValueError(
            f"calibration file {path}: {what}: expected {expected!r}, got {got!r}. "
            "Calibrate again with this model and these codecs."
        )
