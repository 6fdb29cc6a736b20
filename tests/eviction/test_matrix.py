"""What stacks: every architecture x codec x eviction is built; docs/eviction.md has the outcome.

python tests/eviction/test_matrix.py        # writes the table into docs/eviction.md
"""

from __future__ import annotations

import re
from pathlib import Path

from kvjax import CacheConfig, ModelConfig, eviction
from kvjax.cache.build import group_specs
from kvjax.config import MLAConfig
from kvjax.sharing import cla, yoco

DOC = Path(__file__).parents[2] / "docs" / "eviction.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
SLIDING, FULL = "sliding_attention", "full_attention"
MLA = MLAConfig(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
LATENT = {"num_kv_heads": 4, "mla": MLA}
ARCHITECTURES = {
    "GQA": {},
    "MHA": {"num_kv_heads": 4},
    "MQA": {"num_kv_heads": 1},
    "CLA": cla(4, 2),
    "YOCO (windows, then one global)": yoco(4, window=20),
    "windows and global layers (Gemma 3)": {
        "layer_types": (SLIDING, SLIDING, SLIDING, FULL),
        "sliding_window": 20,
    },
    "windows alone (Mistral)": {"layer_types": (SLIDING,) * 4, "sliding_window": 20},
    "MLA": LATENT,
    "MLA with CLA": LATENT | cla(4, 2),
}
CODECS = (
    "raw", "int8", "int4", "int4-hadamard", "fp8", "turboquant4", "turboquant3.5",
    "turboquant-prod3", "kivi4", "kvquant3", "qjl", "pca3", "klt4", "raw+int8",
)  # fmt: skip
PROMPT = tuple(name for name in eviction.names() if name != "h2o")
COLUMNS = {
    "none": (None,),
    "prompt policies": tuple(f"{name}:48" for name in PROMPT),
    "budget in bytes": tuple(f"{name}:4MiB" for name in PROMPT),
    "streaming": ("streaming:4+60", "streaming:4+60/positions=text"),
    "h2o": ("h2o:48", "h2o:4MiB"),
}


def model_of(architecture: str) -> ModelConfig:
    base = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_layers": 4,
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}  # fmt: skip
    return ModelConfig(**base | ARCHITECTURES[architecture])


def outcome(model: ModelConfig, codec: str, evict: str | None) -> str | None:
    """None where the cache can be made, or the reason why not."""
    try:
        config = CacheConfig.parse(codec, evict=evict, page_size=32)
        group_specs(model, max_len=512, config=config, dtype="float32")
    except ValueError as error:
        return str(error)
    return None


def cell(model: ModelConfig, codec: str, policies: tuple[str | None, ...]) -> str | None:
    """The outcome that all policies of a column share."""
    found = {outcome(model, codec, evict) for evict in policies}
    found = {r and re.sub(r", got .*?\.(?= |$)", ".", r) for r in found}  # names the policy
    assert len(found) == 1, found
    return found.pop()


def table() -> str:
    """A row an architecture and codecs that fare alike; reasons below."""
    reasons: list[str] = []

    def mark(reason: str | None) -> str:
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"({reasons.index(reason) + 1})"

    lines = [f"| | {' | '.join(['codecs', *COLUMNS])} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in ARCHITECTURES:
        model, rows = model_of(name), {}
        for codec in CODECS:
            cells = tuple(mark(cell(model, codec, policies)) for policies in COLUMNS.values())
            rows.setdefault(cells, []).append(codec)
        lines += [f"| {name} | {', '.join(c)} | {' | '.join(r)} |" for r, c in rows.items()]
    lines += ["", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]
    return "\n".join(lines)


def test_the_doc_has_the_matrix():
    found = re.search(f"{BEGIN}\n(.*?)\n{END}", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "docs/eviction.md has no matrix"
    assert found[1] == table(), "run: python tests/eviction/test_matrix.py"


def write() -> None:
    text = DOC.read_text(encoding="utf-8")
    whole = re.compile(f"{BEGIN}\n.*?{END}", re.DOTALL)
    DOC.write_text(whole.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    write()
