"""Loading never holds the model twice: measured, as anonymous memory of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
PROGRAM = """
import gc, json, sys, threading, time
import jax, jax.numpy as jnp
from flax import nnx
import kvjax

def anonymous():
    with open("/proc/self/status") as file:
        return next(1024 * int(x.split()[1]) for x in file if x.startswith("RssAnon"))

class Peak(threading.Thread):
    def __enter__(self):
        self.going, self.base = True, anonymous()
        self.peak = self.base
        self.start()
        return self

    def run(self):
        while self.going:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.001)

    def __exit__(self, *_):
        self.going = False
        self.join()
        self.peak = max(self.peak, anonymous())

def load(form, dtype):
    return jax.block_until_ready(nnx.state(kvjax.load(sys.argv[1], dtype, form=form)[0]))

out = {}
for form, dtype in (("unrolled", "float32"), ("stacked", "float32"), ("unrolled", "bfloat16")):
    with Peak(daemon=True) as seen:
        state = load(form, dtype)
    out[f"{form} {dtype}"] = seen.peak - seen.base, sum(x.nbytes for x in jax.tree.leaves(state))
    del state
    gc.collect()
print(json.dumps(out))
"""


def write_shards(folder: Path, shards: int = 3) -> None:
    """A checkpoint of zeros in bfloat16, as holes of sparse files: nothing is written to disk."""
    c = CONFIG
    D, F, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], D), "model.norm.weight": (D,)}
    for n in range(c["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (D, D),
            "self_attn.k_proj": (kv, D),
            "self_attn.v_proj": (kv, D),
            "self_attn.o_proj": (D, D),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }.items():
            shapes[f"model.layers.{n}.{name}.weight"] = shape
    weight_map = {}
    for i in range(shards):
        file, header, end = f"model-{i + 1:05}-of-{shards:05}.safetensors", {}, 0
        for name, shape in list(shapes.items())[i::shards]:
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            weight_map[name], end = file, end + size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_loading_holds_the_model_once(tmp_path):
    """Three shards of bfloat16, 122 MB; 243 MB as float32. Measured: 1.21, 1.17 and 1.15 times the
    model above what there was before; what is over is a tensor or two as they are read."""
    write_shards(tmp_path)
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back at once
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, (peak, model) in json.loads(done.stdout).items():
        assert model < peak < 1.3 * model, (case, peak / model)
