"""Exact bytes of a cache, by part: what is counted is what is in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import codecs
from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec
from kvjax.eviction import describe

if TYPE_CHECKING:
    from kvjax.cache.kv_cache import KVCache

#: parts of `cache_report(...)["bytes"]`, with what each is
PARTS = {
    "codes": "sealed keys and values, packed",
    "scales": "what travels with them: scales, norms, outliers",
    "exact": "first and recent tokens, in the model's dtype",
    "calibration": "calibrated arrays of the codecs",
    "states": "of layers with gated retention: one a row, float32, for all tokens",
    "tables": "page ids, lengths; positions and scores of what eviction left",
}


def cache_report(cache: KVCache) -> dict[str, Any]:
    """Bytes of each part of a cache, and the tokens that it can hold.

    total_bytes is the sum of the leaves' `nbytes`, bytes its parts (`PARTS`). page_slack_bytes:
    pages that no token has been sealed into yet, a share of codes and scales. effective_bits of
    "k", "v" and their "mean": what a sealed number costs, with its scales. bytes_per_token: total
    over the tokens of all rows at capacity (of a stream: that it has had so far). raw_bytes,
    bf16_bytes: the same capacity as one dense array in the model's dtype, in bfloat16; ratio and
    bf16_ratio: how many times smaller the cache is. evict: the policy, or None. codecs: the groups;
    "rows": tokens of each row that one has; "judged": whether eviction takes tokens of it.
    """
    parts = dict.fromkeys(PARTS, 0) | {"tables": cache.length.nbytes}
    slack, lengths, kept = 0, np.asarray(cache.length), []
    for group in cache.groups:
        for pages in (*group.pool.k, *group.pool.v):
            code, side = _split_pages(group.spec, pages)
            parts["codes"] += code
            parts["scales"] += side
        pool = _nbytes(group.pool)
        rows = lengths if group.evicted is None else lengths - np.asarray(group.evicted)
        slack += pool * _free_pages(group.spec, rows) // max(1, group.table.size)
        kept.append(_held(group.spec, rows))
        parts["exact"] += _nbytes((group.k_exact, group.v_exact))
        parts["calibration"] += _nbytes((group.k_params, group.v_params))
        parts["tables"] += _nbytes((group.table, group.evicted, group.positions, group.scores))
    parts["states"] = _nbytes(cache.states)
    total = _nbytes(cache)
    capacity = cache.batch * _capacity(cache, lengths)
    specs = [g.spec for g in cache.groups]
    numbers = capacity * sum(len(s.layers) * numbers_of(s) for s in specs)
    raw = numbers * specs[0].dtype.itemsize
    return {
        "total_bytes": total,
        "bytes": parts,
        "page_slack_bytes": slack,
        "effective_bits": mean_bits(specs),
        "batch": cache.batch,
        "max_len": cache.max_len,
        "tokens": [int(n) for n in lengths],
        "bytes_per_token": total / capacity,
        "raw_bytes": raw,
        "bf16_bytes": 2 * numbers,
        "ratio": raw / total,
        "bf16_ratio": 2 * numbers / total,
        "evict": _evict(cache),
        "codecs": [
            _group(spec) | {"rows": rows.tolist()} for spec, rows in zip(specs, kept, strict=True)
        ],
    }


def numbers_of(spec: GroupSpec) -> int:
    """Cached numbers of a token and layer."""
    return spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)


def split_bytes(pages: Mapping[str, Any]) -> tuple[int, int]:
    """(codes, side arrays) in bytes, of pages or their shapes: `words*` and `x` are codes."""
    code = side = 0
    for name, leaf in pages.items():
        size = leaf.size * leaf.dtype.itemsize
        if name == "x" or name.startswith("words"):
            code += size
        else:
            side += size
    return code, side


def _split_pages(spec: GroupSpec, pages: Mapping[str, Any]) -> tuple[int, int]:
    if spec.packed is None:
        return split_bytes(pages)
    total = _nbytes(pages)
    code = total // spec.packed.page_bytes * spec.packed.code_bytes
    return code, total - code


def bits_of(
    codec: Codec, spec: GroupSpec, *, role: str = "k", dtype: Any = None
) -> tuple[float, float]:
    """Bits of a sealed number: (of its codes alone, with its scales and outliers)."""
    if spec.packed is not None:
        at = "kv".index(role)
        return float(spec.packed.code_bits[at]), spec.packed.bits()[at]
    dim = spec.head_dim if role == "k" else spec.v_head_dim
    shapes = codec.code_shapes(tokens=spec.page_size, head_dim=dim, dtype=dtype or spec.dtype)
    code, side = split_bytes(shapes)
    numbers = spec.page_size * dim
    return 8 * code / numbers, 8 * (code + side) / numbers


def mean_bits(specs: list[GroupSpec], *, dtype: Any = None) -> dict[str, float]:
    """Effective bits of keys, of values and of both, over all layers that own them."""

    def total(role: str) -> tuple[float, int]:
        bits, numbers = 0.0, 0
        for spec in specs:
            codec = spec.k_codec if role == "k" else spec.v_codec
            n = len(spec.layers) * (spec.head_dim if role == "k" else spec.v_head_dim)
            bits += n * bits_of(codec, spec, role=role, dtype=dtype)[1]
            numbers += n
        return bits, numbers

    (k, k_numbers), (v, v_numbers) = total("k"), total("v")
    mean = (k + v) / (k_numbers + v_numbers)
    return {"k": k / k_numbers, "v": v / v_numbers, "mean": mean}


def format_report(report: dict[str, Any]) -> str:
    """The report as a small table."""
    total = report["total_bytes"]
    lines = [f"cache  {human(total)}  for {report['batch']} x {report['max_len']} tokens"]
    for name, n in report["bytes"].items():
        lines.append(f"  {name:<12}{human(n):>12}  {n / total:6.1%}  {PARTS[name]}")
    slack = report["page_slack_bytes"]
    lines.append(
        f"  {'page slack':<12}{human(slack):>12}  {slack / total:6.1%}  pages not yet used"
    )
    lines.append(f"  {'per token':<12}{human(report['bytes_per_token']):>12}")
    lines.extend(_describe(group) for group in report["codecs"])
    if report["evict"]:
        judged = [group for group in report["codecs"] if group["judged"]]
        held = [max(group["rows"], default=0) for group in judged]
        others = [n for group in report["codecs"] if not group["judged"] for n in group["layers"]]
        tail = f"; layers {ranges(sorted(others))} keep their windows" if others else ""
        lines.append(
            f"  evict {report['evict']}: {min(held)} to {max(held)} of"
            f" {max(report['tokens'])} tokens are here{tail}"
        )
    ratio = report["bf16_ratio"]
    size = f"{ratio:.2f} times smaller than" if ratio >= 1 else f"{1 / ratio:.2f} times the size of"
    lines.append(f"  {size} bfloat16 of the same capacity")
    return "\n".join(lines)


def ranges(layers: Sequence[int]) -> str:
    """`0-4,6`: runs of consecutive numbers."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True))


def _describe(group: dict[str, Any]) -> str:
    """What a group of layers is made of."""
    bits, first = group["effective_bits"], f"  layers {ranges(group['layers'])}: "
    if group["slots"] and not group["pages"]:
        return f"{first}exact, {group['slots']} slots a head, one token each"
    if not group["pages"]:
        last = group["window"] or group["recent"] + group["page_size"]
        tail = "" if group["k"] == group["v"] == "raw" else "; nothing is sealed: no codec is used"
        return f"{first}exact, the first {group['sinks']} and the last {last}{tail}"
    k, v = ("latents", "rotated keys") if group["latent"] else ("keys", "values")
    line = f"{first}{k} {group['k']} {bits['k']:.3g} bits, {v} {group['v']} {bits['v']:.3g} bits;"
    if group["slots"]:
        slots = f"{group['slots']} slots a head, one token each"
        return f"{line} {slots}, the newest {group['recent']} exact"
    line += (
        f" exact: first {group['sinks']}, last {group['recent']} and a page of"
        f" {group['page_size']} that fills"
    )
    if group["window"] is not None:
        line = f"{line}\n    a window of {group['window']}: {group['pages']} pages a row"
    return f"{line}\n    read by {_reader(group)}"


def _reader(group: dict[str, Any]) -> str:
    """What reads a group's sealed pages on this machine."""
    kernel, name = group["kernel"], group["kernel"].upper()
    if kernel == "xla":
        return "plain XLA" + (f" ({group['why_xla']})" if group["why_xla"] else "")
    here = jax.default_backend() == kernel
    return f"the {name} kernel" if here else f"plain XLA, in place of the {name} kernel"


def human(n: float) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


def _group(spec: GroupSpec) -> dict[str, Any]:
    return {
        "layers": list(spec.layers),
        "k": codecs.name_of(spec.k_codec),
        "v": codecs.name_of(spec.v_codec),
        "page_size": spec.page_size,
        "sinks": spec.sinks,
        "recent": spec.recent,
        "window": spec.window,
        "judged": not spec.own_window and (spec.kept is not None or spec.stream is not None),
        "pages": spec.pages_per_row,
        "latent": spec.latent,
        "slots": spec.places if spec.heavy else None,
        "kernel": spec.kernel,
        "why_xla": spec.why_xla,
        "effective_bits": mean_bits([spec]),
    }


def _free_pages(spec: GroupSpec, lengths: np.ndarray) -> int:
    """Pages of all rows and layers that hold no token yet."""
    if spec.heavy:
        slots = np.clip(lengths - spec.ring, 0, spec.heavy_slots)
        return len(spec.layers) * int((spec.pages_per_row + -slots // spec.page_size).sum())
    # spec.sealed_pages in NumPy: a report compiles nothing
    sealed = np.clip((lengths - spec.sinks - spec.recent) // spec.page_size, 0, spec.pages_per_row)
    return len(spec.layers) * int((spec.pages_per_row - sealed).sum())


def _held(spec: GroupSpec, rows: np.ndarray) -> np.ndarray:
    """Tokens that rows of so many have here; what lies past `max_len` was dropped."""
    rows = np.minimum(rows, spec.max_len)
    if spec.stream is None:
        return rows
    assert spec.window is not None
    return np.minimum(rows, spec.sinks + spec.window - 1)


def _capacity(cache: KVCache, lengths: np.ndarray) -> int:
    """Tokens of a row that the cache stands for: of a stream, those it has had so far."""
    stream = cache.groups[0].spec.stream
    if stream is None:
        return cache.max_len
    return min(cache.max_len, max(int(lengths.max()), stream.sinks + stream.recent))


def _evict(cache: KVCache) -> str | None:
    stream = cache.groups[0].spec.stream
    if stream is not None:
        return str(stream)
    return None if cache.policy is None else describe(cache.policy)


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
