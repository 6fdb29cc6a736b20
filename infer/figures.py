"""Pictures of what a cache keeps.

    python infer/figures.py kept --evict snapkv:25% --out kept.png "text"
    python infer/figures.py kept --evict pyramidkv:96 --prompt-file notes.txt --out kept.png

Draws, for a real prompt (the text as it is, without a chat template), which tokens each layer and
KV head keeps: exact (first and recent, in the model's dtype), sealed (in a page, as the codec
stores them), or gone; and how many each layer keeps. Beside the PNG lies an HTML file that needs
nothing else: the text, each token shaded by the share of heads that kept it, by layer.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

GONE, SEALED, EXACT = 0, 1, 2
COLORS = ("#f4f4f4", "#4c78a8", "#f58518")


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.platform:
        os.environ["JAX_PLATFORMS"] = args.platform  # before jax is imported
    try:
        return _kept(args)
    except (ValueError, OSError) as error:
        print(f"figures: error: {error}", file=sys.stderr)
        return 2


def _kept(args: argparse.Namespace) -> int:
    _need_matplotlib()
    import kvjax
    from kvjax.evaluation.kept import kept

    text = Path(args.prompt_file).read_text() if args.prompt_file else " ".join(args.prompt)
    if not text.strip():
        raise ValueError("prompt: expected words or --prompt-file, got nothing.")
    config = kvjax.CacheConfig.parse(
        args.kv_cache_dtype, evict=args.evict, page_size=args.page_size
    )
    model, tokenizer = kvjax.load(args.model)
    tokens = np.asarray([list(tokenizer.encode(text))], np.int32)
    cache = model.init_cache(batch=1, max_len=tokens.shape[1] + config.max_new, config=config)
    at = kept(model, tokens, config)[:, 0]  # O K C
    states = fates(at, tokens.shape[1], cache)
    out = Path(args.out)
    draw(states, out, f"{model.config.num_layers} layers, {args.evict}, {args.kv_cache_dtype}")
    pieces = [tokenizer.decode([int(t)]) for t in tokens[0]]
    page = out.with_suffix(".html")
    page.write_text(as_html(states, pieces, args.evict, model.config.owners), encoding="utf-8")
    for name, share in zip(("gone", "sealed", "exact"), shares(states), strict=True):
        print(f"{name:<7}{share:6.1%}")
    print(f"{out}\n{page}")
    return 0


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("matplotlib is not installed. pip install 'kvjax[plot]'.") from None


def fates(at: np.ndarray, length: int, cache: Any) -> np.ndarray:
    """`[O, K, T]`: what became of each token, from the places `[O, K, C]` of those that stayed."""
    states = np.zeros((*at.shape[:2], length), np.int8)
    for group in cache.groups:
        spec = group.spec
        for layer in group.spec.layers:
            o = cache.owners.index(layer)
            for head, places in enumerate(at[o]):
                rows = places[places < length]
                if spec.own_window:
                    rows = rows[rows > length - spec.window]  # what the next token sees
                rank = rows if spec.own_window else np.arange(rows.size)
                count = length if spec.own_window else rows.size
                pages = 0 if spec.heavy else int(spec.sealed_pages(np.asarray([count]))[0])
                last = spec.sinks + pages * spec.page_size
                if spec.coded:
                    last = rows.size - spec.ring
                states[o, head, rows] = EXACT
                states[o, head, rows[(rank >= spec.sinks) & (rank < last)]] = SEALED
    return states


def shares(states: np.ndarray) -> list[float]:
    """Of all tokens, heads and layers: gone, sealed, exact."""
    return [float((states == fate).mean()) for fate in (GONE, SEALED, EXACT)]


def draw(states: np.ndarray, path: Path, title: str) -> None:
    """Rows are layers and heads, columns tokens; at the right, what each layer keeps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    O, K, T = states.shape
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, max(3.0, 0.06 * O * K + 1.5)), width_ratios=(5, 1), layout="constrained",
        sharey=True,
    )  # fmt: skip
    left.imshow(
        states.reshape(O * K, T), aspect="auto", interpolation="nearest", vmin=0, vmax=2,
        cmap=ListedColormap(COLORS),
    )  # fmt: skip
    ticks = np.arange(O) * K + (K - 1) / 2
    left.set_yticks(ticks[:: max(1, O // 16)], [str(i) for i in range(0, O, max(1, O // 16))])
    left.set_xlabel("token of the prompt")
    left.set_ylabel(f"layer that owns keys ({K} KV heads each)")
    left.set_title(title, fontsize=10)
    names = zip(COLORS, ("gone", "sealed", "exact"), strict=True)
    patches = [Patch(facecolor=c, edgecolor="#999999", label=name) for c, name in names]
    left.legend(handles=patches, loc="upper center", ncols=3, fontsize=8, framealpha=0.9)
    right.barh(ticks, (states > 0).sum(2).mean(1), height=0.8 * K, color="#72787e")
    right.set_xlabel("tokens kept a head")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def as_html(states: np.ndarray, pieces: list[str], policy: str, owners: tuple[int, ...]) -> str:
    """The prompt as text, once for all layers and once a layer, shaded by the share that stayed."""

    def shaded(share: np.ndarray) -> str:
        span = '<span style="background:rgba(76,120,168,{:.2f})" title="{:.0%}">{}</span>'
        return "".join(
            span.format(s, s, html.escape(p)) for s, p in zip(share, pieces, strict=True)
        )

    every = (states > 0).mean((0, 1))
    parts = [f"<h2>all layers</h2><p>{shaded(every)}</p>"]
    for owner, layer in zip(owners, states, strict=True):
        count = (layer > 0).sum(1).mean()
        head = f"<summary>layer {owner}: {count:.0f} of {len(pieces)} tokens a head</summary>"
        parts.append(f"<details>{head}<p>{shaded((layer > 0).mean(0))}</p></details>")
    style = "body{font:15px/1.7 sans-serif;max-width:60em;margin:2em auto}p{white-space:pre-wrap}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>kept by {html.escape(policy)}</title>'
        f"<style>{style}</style><h1>What {html.escape(policy)} keeps</h1>"
        "<p>Darker: more KV heads kept the token.</p>" + "".join(parts)
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="figure", required=True)
    add = sub.add_parser("kept", help="which tokens stay").add_argument
    add("prompt", nargs="*", help="the prompt")
    add("--prompt-file", metavar="FILE")
    add("--evict", default="snapkv:25%", metavar="POLICY:BUDGET", help="default: snapkv:25%%")
    add("--kv-cache-dtype", default="int8", metavar="CODEC", help="default: int8")
    add("--page-size", type=int, default=32, metavar="N", help="default: 32")
    add("--model", metavar="NAME", help="as for kvjax.infer (default: smollm2)")
    add("--out", default="kept.png", metavar="FILE", help="default: kept.png")
    add("--platform", choices=("cpu", "gpu", "tpu"), help="default: the fastest JAX finds")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
