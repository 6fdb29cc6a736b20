"""The GGUF container: metadata and tensors by name (github.com/ggml-org/ggml, docs/gguf.md).

Read here and not by gguf.GGUFReader, which makes several NumPy objects of each token and merge: 3
seconds where this takes a tenth. The blocks themselves are decoded by gguf.quants.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

QUANTIZATIONS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
_STRING, _ARRAY = 8, 9
# value type -> struct letter
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a GGUF file. `shape` is [out, in], rows first."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def read(self) -> np.ndarray:
        """The values, as float32."""
        data = np.fromfile(self.path, np.uint8, self.nbytes, offset=self.offset)
        rows = data.reshape(*self.shape[:-1], -1)
        return dequantize(rows, self.kind).astype(np.float32, copy=False).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file says, without its tensors' data."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads a GGUF file's metadata and list of tensors."""
    size = path.stat().st_size
    if size < 24:
        raise _broken(path, f"{size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise _broken(path, f"a file that begins with {data[:4]!r}")
        cursor = _Cursor(data, 4)
        version, tensor_count, key_count = (cursor.scalar(c) for c in "IQQ")
        if version not in (2, 3):
            raise ValueError(
                f"{path}: expected GGUF version 2 or 3, little-endian, got {version:#x}."
                " Convert the model again."
            )
        try:
            metadata = {cursor.string(): cursor.value() for _ in range(key_count)}
            infos = [cursor.tensor_info() for _ in range(tensor_count)]
        except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
            raise _broken(path, f"a header cut or damaged at byte {cursor.at}") from error
        alignment = metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
    tensors = {info[0]: _stored(path, *info, start) for info in infos}
    last = max((t.offset + t.nbytes for t in tensors.values()), default=start)
    if last > size:
        raise _broken(path, f"{size} bytes of {last}")
    return GGUFFile(metadata, tensors)


def _stored(
    path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, start: int
) -> StoredTensor:
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(number)
    if kind is None or kind.name not in QUANTIZATIONS:
        raise ValueError(
            f"{path}: {name}: expected one of {', '.join(QUANTIZATIONS)}, got"
            f" {number if kind is None else kind.name}. Use another quantisation of the model."
        )
    if not shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise _broken(path, f"{name} of {kind.name} with shape {shape}")
    return StoredTensor(path, name, shape, kind, start + offset)


def _broken(path: Path, got: str) -> ValueError:
    return ValueError(f"{path}: expected a complete GGUF file, got {got}. Download the file again.")


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self.data, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) != count:
            raise IndexError("end of file")
        self.at += count
        return taken

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.string() if kind == _STRING else self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape rows first, quantisation number, offset in the data)."""
        name = self.string()
        dimensions = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q")
