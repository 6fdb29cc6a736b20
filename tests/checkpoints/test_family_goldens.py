"""Every family against transformers' logits, in and out; and the README's table of families.

python tests/checkpoints/test_family_goldens.py        # writes the table into README.md
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig
from kvjax.checkpoints.export import export
from kvjax.checkpoints.families import model_config
from kvjax.checkpoints.family_table import FAMILIES
from kvjax.checkpoints.gguf_architectures import ARCHITECTURES
from kvjax.checkpoints.hf import read_json, read_tensors

ROOT = Path(__file__).parents[2]
LARGE, SMALL = ROOT / "tests/data/goldens", ROOT / "tests/data/families"
GOLDENS = sorted(p for folder in (LARGE, SMALL) for p in folder.iterdir())
NEW = sorted(SMALL.iterdir())
NAME = {"ids": lambda p: p.name}
README, BEGIN, END = ROOT / "README.md", "<!-- families: begin -->", "<!-- families: end -->"


def error(logits, golden) -> float:
    return float(np.abs(np.asarray(logits) - golden["logits"]).max() / golden["logits"].std())


@pytest.mark.parametrize("folder", NEW, **NAME)
def test_logits_and_export(folder, tmp_path):
    """Full; then out as a family whose config says all of it, and in again."""
    model, _ = kvjax.load(folder, form="stacked")
    golden = np.load(folder / "golden.npz")
    assert error(model(golden["ids"])[0], golden) < 1e-4
    export(model, tmp_path / "out")
    assert exported_type(tmp_path / "out", model.config) == read_json(folder / "config.json")[
        "model_type"
    ].replace("phi3", "mistral")  # the same module, with its projections apart
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    if "phi3" not in folder.name:
        assert set(before) == set(after)
        for name, tensor in before.items():
            np.testing.assert_array_equal(tensor.read(), after[name].read())


@pytest.mark.parametrize(
    "folder",
    [p if p.name in ("gemma2", "cohere") else pytest.param(p, marks=pytest.mark.slow) for p in NEW],
    **NAME,
)
def test_cached_logits(folder):
    """In chunks and token by token, tiny pages."""
    model, _ = kvjax.load(folder, form="stacked")
    golden = np.load(folder / "golden.npz")
    cache = model.init_cache(batch=2, max_len=40, config=CacheConfig(page_size=4, recent=3))
    parts = []
    for first, end in ((0, 18), (18, 36), (36, 37), (37, 38), (38, 39), (39, 40)):
        logits, cache = model(golden["ids"][:, first:end], cache)
        parts.append(np.asarray(logits))
    assert error(np.concatenate(parts, axis=1), golden) < 1e-4


def exported_type(folder: Path, config) -> str:
    raw = read_json(folder / "config.json")
    assert model_config(raw, read_json(folder / "generation_config.json")) == config
    return raw["model_type"]


@pytest.mark.parametrize("folder", sorted(LARGE.iterdir()), **NAME)
def test_configs_and_back(folder):
    """The larger goldens, whose logits tests/test_model.py checks."""
    from kvjax.checkpoints.families import _plain, hf_config

    raw = read_json(folder / "config.json")
    config = model_config(raw)
    written = json.loads(json.dumps(hf_config(config)))
    assert written["model_type"] == raw["model_type"]
    assert _plain(model_config(written)) == _plain(config)


@pytest.mark.slow
@pytest.mark.parametrize("folder", GOLDENS, **NAME)
def test_exports_load_in_transformers(folder, tmp_path):
    """With the same logits, nothing missing and nothing unexpected (case 125)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    export(kvjax.load(folder)[0], tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    golden = np.load(folder / "golden.npz")
    with torch.no_grad():
        logits = model(torch.from_numpy(golden["ids"].astype(np.int64)), use_cache=False).logits
    assert error(logits.numpy(), golden) < 1e-4


QWEN = read_json(SMALL / "qwen3_window" / "config.json")
GEMMA = read_json(LARGE / "gemma3" / "config.json")
V2 = read_json(LARGE / "deepseek_v2" / "config.json")


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (QWEN, "layer_types", ["chunked_attention"] * 3),
        (QWEN, "layer_types", ["full_attention"]),
        (QWEN, "use_sliding_window", False),
        (GEMMA, "use_bidirectional_attention", True),
        (GEMMA, "rope_parameters", {"full_attention": {"rope_type": "longrope"}}),
        (V2, "topk_method", "noaux_tc"),
        (V2, "scoring_func", "sigmoid"),
        (V2, "moe_layer_freq", 2),
        (V2, "qk_head_dim", 25),
    ],
)
def test_values_that_change_results_are_refused(config, key, value):
    match = "rope_type" if key == "rope_parameters" else "layer_types" if config is QWEN else key
    with pytest.raises(ValueError, match=match):
        model_config({**config, key: value})


def test_an_absent_window_is_transformers_default():
    """Mistral: null is none, absent is 4096; Gemma 2: absent caps are 50 and 30, null is none."""
    raw = read_json(LARGE / "mistral_window" / "config.json")
    assert model_config({**raw, "sliding_window": None}).sliding_window is None
    del raw["sliding_window"]
    assert model_config(raw).sliding_window == 4096
    raw = read_json(SMALL / "gemma2" / "config.json")
    assert model_config({**raw, "attn_logit_softcapping": None}).attn_logit_softcap is None
    del raw["attn_logit_softcapping"]
    assert model_config(raw).attn_logit_softcap == 50.0


def test_layers_for_drafting_are_left_out(tmp_path):
    """DeepSeek-V3 ships one more layer than it has; a second one is unexpected."""
    from kvjax.checkpoints.tensors import LazyTensor

    folder = SMALL / "deepseek_v3_groups"
    tensors = read_tensors(folder)
    loaded = kvjax.load(folder)[0].config.num_layers
    assert loaded == 2
    for layer, fine in ((2, True), (3, False)):
        more = {**tensors, f"model.layers.{layer}.enorm.weight": tensors["model.norm.weight"]}
        assert isinstance(more["model.norm.weight"], LazyTensor)
        copy = shutil.copytree(folder, tmp_path / str(layer))
        write_tensors(copy / "model.safetensors", more)
        if fine:
            kvjax.load(copy)
        else:
            with pytest.raises(ValueError, match=r"unexpected 1: model\.layers\.3\.enorm"):
                kvjax.load(copy)


def write_tensors(path: Path, tensors) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(t.read()) for name, t in tensors.items()}, path)


def test_older_spelling_of_gemma3():
    """transformers 4: rope_theta, rope_local_base_freq and a pattern, not lists."""
    old = {k: v for k, v in GEMMA.items() if k not in ("rope_parameters", "layer_types")}
    del old["_sliding_window_pattern"]
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    assert model_config(old) == model_config(GEMMA)
    scaled = model_config({**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope.factor == 8.0
    assert scaled.rope_local is not None
    assert scaled.rope_local.type == "default"


# -- the table -----------------------------------------------------------------------------------


def table() -> str:
    """A row a family, of what the tests of this file and of test_model.py check."""
    rows: dict[str, list[str]] = {}
    for folder in GOLDENS:
        rows.setdefault(read_json(folder / "config.json")["model_type"], []).append(folder.name)
    gguf = {a.model_type: name for name, a in ARCHITECTURES.items()}
    lines = ["| `model_type` | architecture | checked against `transformers` | GGUF |"]
    lines.append("|---|---|---|---|")
    for name, family in FAMILIES.items():
        checked = ", ".join(f"`{golden}`" for golden in rows[name])
        lines.append(f"| `{name}` | {family.architecture} | {checked} | {gguf.get(name, '')} |")
    return "\n".join(lines)


def test_every_family_has_a_golden_and_the_readme_says_so():
    found = re.search(f"{BEGIN}\n(.*?)\n{END}", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "README.md has no table of families"
    assert found[1] == table(), "run: python tests/checkpoints/test_family_goldens.py"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    new = f"{BEGIN}\n{table()}\n{END}"
    README.write_text(
        re.sub(f"{BEGIN}.*?{END}", lambda _: new, text, flags=re.DOTALL), encoding="utf-8"
    )
