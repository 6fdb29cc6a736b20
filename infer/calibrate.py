"""Makes the calibration file that some codecs need, for one model, from a text.

    python infer/calibrate.py --kv-cache-dtype kvquant3 --out smollm2.kvquant3.safetensors
    python infer/calibrate.py --model ./mine --kv-k pca3 --kv-v int4 --text a.txt --out mine.cal

Then, in Python: CacheConfig.parse("kvquant3", calibration="smollm2.kvquant3.safetensors"). Expect
one to three minutes for the default model on two cores, and a file of a few MB.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    import kvjax
    from kvjax import calibration
    from kvjax.config import CacheConfig
    from kvjax.evaluation import texts

    fields = {name: getattr(args, name) for name in ("page_size", "sinks")}
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        config = CacheConfig.parse(
            args.kv_cache_dtype, k=args.kv_k, v=args.kv_v, layers=args.kv_layers, **fields
        )
        began = time.perf_counter()
        model, tokenizer = kvjax.load(args.model, form="stacked")
        rows = texts.windows(
            tokenizer, args.text, count=max(1, args.tokens // args.row), length=args.row
        )
        print(f"{rows.shape[0]} rows of {args.row} tokens of {args.text}", file=sys.stderr)
        made = calibration.calibrate(model, rows, config, fisher=False if args.no_fisher else None)
        calibration.save(args.out, model, config, made)
    except ValueError as error:
        print(f"calibrate: error: {error}", file=sys.stderr)
        return 2
    seconds, size = time.perf_counter() - began, Path(args.out).stat().st_size
    print(f"{args.out}: {size / 2**20:.2f} MiB in {seconds:.0f} s, for model", end=" ")
    print(calibration.model_fingerprint(model))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="as for kvjax.infer (default: smollm2)")
    add("--kv-cache-dtype", default="kvquant3", metavar="CODEC", help="default: kvquant3")
    add("--kv-k", metavar="CODEC", help="keys only")
    add("--kv-v", metavar="CODEC", help="values only")
    add("--kv-layers", metavar="RULES", help="other codecs for some layers, 0-1:raw,2-5:pca4")
    add("--page-size", type=int, metavar="N", help="of the cache (default: 128)")
    add("--sinks", type=int, metavar="N", help="first tokens, left out (default: 4)")
    add(
        "--text",
        default="docstrings+licences",
        metavar="FILE",
        help="a file, or topics, docstrings, licences (joined by +; default: docstrings+licences,"
        " which come with Python and kvjax's packages)",
    )
    add("--tokens", type=int, default=4096, metavar="N", help="default: 4096")
    add("--row", type=int, default=1024, metavar="N", help="tokens of a row (default: 1024)")
    add("--no-fisher", action="store_true", help="weigh every error alike: no backward pass")
    add("--out", required=True, metavar="FILE", help="the safetensors file to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
