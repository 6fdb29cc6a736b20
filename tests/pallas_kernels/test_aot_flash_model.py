"""Prompts and training steps with flash attention's kernels in them, compiled by libtpu: the heads
of real models, their other widths small, as they are not in question."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import CacheConfig, MLAConfig, ModelConfig, RopeConfig, Transformer
from kvjax.cache import init_cache
from kvjax.training.loss import next_token_loss
from pallas_kernels import aot
from pallas_kernels.devices import UnpartitionedKernelWarning
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.softmax import finish

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]"),
    pytest.mark.usefixtures("libtpu_environment"),
]

SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "qwen3-0.6b": {
        "num_layers": 2,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "qk_norm": "head",
        "rope": RopeConfig(theta=1e6),
    },
    "gemma-3-1b": {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "qk_norm": "head",
        "rope": RopeConfig(theta=1e6),
        "rope_local": RopeConfig(theta=1e4),
        "sliding_window": 512,
        "layer_types": (SLIDING, FULL),
    },
    "deepseek-v3": {
        "num_layers": 2,
        "num_heads": 128,
        "num_kv_heads": 128,
        "head_dim": 192,
        "rope_interleave": True,
        "mla": MLAConfig(
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    },
}


def config_of(name):
    small = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    return ModelConfig(**MODELS[name] | small | {"max_position_embeddings": 4096})


def kernels(step):
    """Which of the kernels a compiled program calls, one name a call."""
    calls = [line for line in step.as_text().splitlines() if '"tpu_custom_call"' in line]
    names = [re.search(r"/(flash_attention\w*)/pallas_call", line) for line in calls]
    return sorted(name[1] for name in names if name)


def lowered(chip, f, *args):
    """As `aot.compile_for`, but not compiled yet."""
    mesh = aot.mesh(chip)
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    with jax.set_mesh(mesh):
        return jax.jit(f).lower(*shapes)


def prompt(name, chip, tokens):
    """A chunk of a prompt of one row on a cache: a function and its operands."""
    config = config_of(name)

    def make():
        return Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16", form="stacked")

    def empty():
        pages = CacheConfig(k="int8", v="int8", kernel=f"tpu-{chip}")
        return init_cache(config, batch=1, max_len=4096, config=pages, dtype="bfloat16")

    graphdef, state = nnx.split(nnx.eval_shape(make))

    def step(state, ids, cache):
        model = nnx.merge(graphdef, state)
        x, cache = model.hidden(ids, cache, jnp.full((1,), tokens), at=jnp.full((1, 1), tokens - 1))
        return model.logits(x[:, 0]), cache

    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    return step, state, ids, jax.eval_shape(empty)


def training(name, *, dtype="bfloat16", remat=True):
    """The gradient of the loss of two rows of 640 tokens: a function and its operands."""
    config, T = config_of(name), 640

    def make():
        return Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, form="stacked")

    graphdef, state = nnx.split(nnx.eval_shape(make))

    def loss(state, ids):
        return next_token_loss(nnx.merge(graphdef, state), ids, remat=remat)[0]

    return jax.value_and_grad(loss), state, jax.ShapeDtypeStruct((2, T + 1), jnp.int32)


FORWARD, BACKWARD = ["flash_attention"], ["flash_attention_dkv", "flash_attention_dq"]


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        *[(name, "v5e") for name in MODELS],
        *[pytest.param(name, "v6e", marks=pytest.mark.slow) for name in MODELS],
    ],
)
def test_a_prompt(name, chip):
    """One call of equal layers, which are scanned; Gemma's two kinds have one each."""
    step = aot.compile_for(chip, *prompt(name, chip, 512))
    assert kernels(step) == FORWARD * (2 if name == "gemma-3-1b" else 1)


def test_a_training_step():
    """Layers are computed again in the backward pass, and their forward kernel with them."""
    step = aot.compile_for("v5e", *training("qwen3-0.6b"))
    assert kernels(step) == FORWARD * 2 + BACKWARD
    assert ",640,640]" not in step.as_text()  # the scores of all tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chip"),
    [(name, "v6e") for name in MODELS] + [(name, "v5e") for name in list(MODELS)[1:]],
)
def test_training_steps_of_all(name, chip):
    """The kernels are looked for before it is compiled: jaxlib 0.10.2 cannot print what libtpu
    0.0.52 makes of it for a v6e."""
    step = lowered(chip, *training(name))
    names = set(re.findall(r'kernel_name = "(\w+)"', step.as_text()))
    assert names == {*FORWARD, *BACKWARD}
    step.compile()


@pytest.mark.slow
def test_a_training_step_that_keeps_its_layers():
    step = aot.compile_for("v5e", *training("qwen3-0.6b", remat=False))
    assert kernels(step) == FORWARD + BACKWARD


def test_where_the_kernel_is_not_taken():
    """A few tokens (speculation), and float32."""
    for taken, call in (
        (True, prompt("qwen3-0.6b", "v5e", 128)),
        (False, prompt("qwen3-0.6b", "v5e", 64)),
        (True, training("qwen3-0.6b")),
        (False, training("qwen3-0.6b", dtype="float32")),
    ):
        assert ('kernel_name = "flash_attention"' in lowered("v5e", *call).as_text()) == taken


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p"])
@pytest.mark.parametrize(
    ("groups", "key", "value"),
    [(16, 256, 256), (16, 8, 8), (1, 64, 64), (2, 80, 80), (3, 96, 96), (7, 40, 40), (1, 192, 128)],
)
def test_the_bounds_of_what_is_taken(groups, key, value, chip):
    """With everything that makes a kernel larger: a window, a soft cap, the gradients."""
    T, K = 640, 2
    shapes = [(1, T, K, groups, key), (1, T, K, key), (1, T, K, value)]
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def loss(q, k, v, lengths):
        how = {"lengths": lengths, "scale": 0.1, "window": 300, "softcap": 50.0}
        return jnp.sum(finish(flash_attention(q, k, v, **how)) ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    step = aot.compile_for(chip, gradients, q, k, v, jax.ShapeDtypeStruct((1,), jnp.int32))
    assert kernels(step) == FORWARD + BACKWARD


def test_several_devices():
    """Rows on four chips: plain XLA, with a warning; in a `shard_map` the kernels on each. Neither
    fetches anything of another chip."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh, rows = Mesh(np.array(topology.devices), ("rows",)), PartitionSpec("rows")

    def loss(q, k, v, lengths):
        return jnp.sum(finish(flash_attention(q, k, v, lengths=lengths, scale=0.1)) ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    shapes = [((4, 256, 2, 2, 64), jnp.bfloat16)] + [((4, 256, 2, 64), jnp.bfloat16)] * 2
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows))
        for shape, dtype in [*shapes, ((4,), jnp.int32)]
    ]

    def compiled(f):
        with jax.set_mesh(mesh):
            step = jax.jit(f).lower(*operands).compile()
        assert not re.search("all-(gather|reduce|to-all)", step.as_text())
        return kernels(step)

    with pytest.warns(UnpartitionedKernelWarning, match="the program is for 4 devices"):
        assert compiled(gradients) == []
    each = jax.shard_map(gradients, mesh=mesh, in_specs=(rows,) * 4, out_specs=(rows,) * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnpartitionedKernelWarning)
        assert compiled(each) == FORWARD + BACKWARD
