"""GGUF files written here from a golden checkpoint, as llama.cpp's converter writes them."""

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from kvjax.checkpoints import open_checkpoint
from kvjax.checkpoints.gguf import half_split_rows, interleave_rows, llama3_factors
from kvjax.checkpoints.gguf_tokenizer import tokenizer_from_gguf

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name, block=BLOCK):
    module, leaf = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{block[part]}.{leaf}"


def write(path, golden="llama", *, quant=Q.F32, extra=None, factors=None, arch="llama"):
    """Writes a golden as GGUF. Returns its tensors by Hugging Face name."""
    checkpoint = open_checkpoint(GOLDENS / golden)
    config, out = checkpoint.config, gguf.GGUFWriter(path, arch)
    out.add_block_count(config.num_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_heads)
    out.add_head_count_kv(config.num_kv_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_rope_dimension_count(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope.theta)
    out.add_vocab_size(config.vocab_size)
    out.add_bos_token_id(config.bos_token_id)
    out.add_eos_token_id(config.eos_token_ids[0])
    out.add_pad_token_id(config.pad_token_id)
    for key, (value, kind) in (extra or {}).items():
        out.add_key_value(key, value, kind)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    block = BLOCK | QK_NORMS | (SANDWICH if arch == "gemma3" else {})
    for name, tensor in checkpoint.tensors.items():
        value = tensor.read()
        turned = next((n for part, n in heads.items() if part in name), None)
        if turned is not None and arch == "llama":
            value = interleave_rows(value, turned)
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        kind = quant if value.ndim == 2 else Q.F32
        out.add_tensor(gguf_name(name, block), gguf.quantize(value, kind), raw_dtype=kind)
    if factors is not None:
        out.add_tensor("rope_freqs.weight", factors)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return checkpoint


def llama_cpp_permute(weights, n_head):
    """llama.cpp's convert_hf_to_gguf.py, in its own words."""
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def test_row_order():
    rows = np.arange(16.0)
    assert interleave_rows(rows, 2).tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    for value, heads in ((rows, 2), (np.arange(96.0).reshape(24, 4), 3)):
        np.testing.assert_array_equal(
            half_split_rows(llama_cpp_permute(value, heads), heads), value
        )


@pytest.mark.parametrize("golden", ["llama", "llama_mha", "llama_mqa", "llama_bias"])
def test_round_trip(golden, tmp_path):
    truth = write(tmp_path / "m.gguf", golden)
    back = open_checkpoint(tmp_path / "m.gguf")
    assert back.config == truth.config
    assert set(back.tensors) == set(truth.tensors)
    for name, tensor in truth.tensors.items():
        assert back.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(back.tensors[name].read(), tensor.read(), err_msg=name)
    assert back.tokenizer is None


@pytest.mark.parametrize("golden", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures(golden, tmp_path):
    """Rows as Hugging Face has them; Gemma's norms with 1 added, its pattern of layers implied."""
    extra = {}
    if golden == "gemma3":
        extra["gemma3.attention.sliding_window"] = (16, gguf.GGUFValueType.UINT32)
    truth = write(tmp_path / "m.gguf", golden, arch=golden, extra=extra)
    back = open_checkpoint(tmp_path / "m.gguf")
    assert back.config == dataclasses.replace(truth.config, initializer_range=0.02)
    assert set(back.tensors) == set(truth.tensors)
    for name, tensor in truth.tensors.items():
        np.testing.assert_allclose(back.tensors[name].read(), tensor.read(), atol=1e-6)


@pytest.mark.parametrize("quant", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_quantised(quant, tmp_path):
    truth = write(tmp_path / "m.gguf", quant=quant)
    back = open_checkpoint(tmp_path / "m.gguf")
    levels = {Q.F16: 2**10, Q.BF16: 2**7, Q.Q8_0: 127}.get(quant, 31 if "5" in quant.name else 15)
    for name, tensor in truth.tensors.items():
        got, want = back.tensors[name].read(), tensor.read()
        assert got.dtype == back.tensors[name].dtype == np.float32
        assert got.shape == want.shape
        # a step of the widest block, with room for float16 scales; a wrong row order is far off
        step = np.ptp(want) / levels
        assert np.abs(got - want).max() <= 1.1 * step + 1e-6, name


def q6_k(block):
    """One Q6_K block of 256, from ggml's C: 4 low bits, 2 high bits, 16 scales, one float16."""
    low, high = block[:128].astype(int), block[128:192].astype(int)
    scales, d = block[192:208].view(np.int8), float(block[208:210].view(np.float16)[0])
    out = np.empty(256)
    for half in range(2):
        for i in range(32):
            h, a, b = high[32 * half + i], low[64 * half + i], low[64 * half + 32 + i]
            for quarter, (nibble, shift) in enumerate(
                [(a & 15, 0), (b & 15, 2), (a >> 4, 4), (b >> 4, 6)]
            ):
                code = (nibble | ((h >> shift) & 3) << 4) - 32
                scale = scales[8 * half + 2 * quarter + i // 16]
                out[128 * half + 32 * quarter + i] = d * scale * code
    return out


def q4_k(block):
    """One Q4_K block of 256: float16 d and dmin, 8 packed 6-bit scales and minima, 128 bytes."""
    d, dmin = (float(x) for x in block[:4].view(np.float16))
    packed, codes = block[4:16].astype(int), block[16:].astype(int)
    out = np.empty(256)
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            low = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        group = codes[32 * (j // 2) : 32 * (j // 2) + 32]
        out[32 * j : 32 * j + 32] = d * scale * (group >> 4 if j % 2 else group & 15) - dmin * low
    return out


@pytest.mark.parametrize(("quant", "decode"), [(Q.Q6_K, q6_k), (Q.Q4_K, q4_k)])
def test_k_quants(quant, decode, tmp_path):
    """gguf cannot write K-quants, so random blocks are decoded here as ggml's C does."""
    size = gguf.GGML_QUANT_SIZES[quant][1]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (4, size), np.uint8)
    halves = slice(208, 210) if quant == Q.Q6_K else slice(0, 4)
    blocks[:, halves] = np.full((4, (halves.stop - halves.start) // 2), 0.01, np.float16).view(
        np.uint8
    )
    path = tmp_path / "m.gguf"
    out = gguf.GGUFWriter(path, "llama")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 256)):
        out.add_uint32(f"llama.{key}", value)
    out.add_feed_forward_length(64)
    out.add_head_count(4)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tensor("token_embd.weight", blocks, raw_dtype=quant)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    got = open_checkpoint(path).tensors["model.embed_tokens.weight"].read()
    np.testing.assert_allclose(got, [decode(b) for b in blocks], rtol=1e-5, atol=1e-5)


def test_unread_quantisations_are_refused(tmp_path):
    truth = open_checkpoint(GOLDENS / "llama").tensors["model.embed_tokens.weight"].read()
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    out.add_tensor("token_embd.weight", gguf.quantize(truth, Q.MXFP4), raw_dtype=Q.MXFP4)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(ValueError, match=r"token_embd.weight: expected one of F32.*got MXFP4"):
        open_checkpoint(tmp_path / "m.gguf")


def test_tensors_without_a_place_are_refused(tmp_path):
    write(tmp_path / "m.gguf", factors=np.ones(8, np.float32))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(
        data.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gatX.weight")
    )
    with pytest.raises(ValueError, match=r"got 'blk.1.ffn_gatX.weight'"):
        open_checkpoint(tmp_path / "m.gguf")


def test_llama3_factors(tmp_path):
    """rope_freqs of Llama 3.1 and 3.2 become llama3 parameters; other factors are refused."""
    for factor in (8.0, 32.0, 16.0):
        computed = llama3_factors(head_dim=16, theta=5e5, factor=factor, original=8192)
        assert computed.min() == 1.0
        assert computed.max() == factor
        write(tmp_path / "m.gguf", "llama3_rope", factors=computed)
        back = open_checkpoint(tmp_path / "m.gguf")
        rope = back.config.rope
        assert (rope.type, rope.factor, rope.theta) == ("llama3", factor, 5e5)
        assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
        assert rope.original_max_position_embeddings == 8192
        assert back.config.tie_word_embeddings
        assert "lm_head.weight" not in back.tensors
    write(tmp_path / "m.gguf", factors=np.ones(8, np.float32))
    assert open_checkpoint(tmp_path / "m.gguf").config.rope.type == "default"
    write(tmp_path / "m.gguf", factors=np.linspace(1, 8, 8, dtype=np.float32))
    with pytest.raises(ValueError, match=r"rope_freqs.weight: expected the factors of Llama 3"):
        open_checkpoint(tmp_path / "m.gguf")


def test_llama3_factors_follow_transformers():
    """Against the published formula, in transformers' words."""
    inv_freq = 1 / 5e5 ** (np.arange(0, 128, 2) / 128)
    wavelen = 2 * np.pi / inv_freq
    low, high, factor = 8192 / 1.0, 8192 / 4.0, 8.0
    scaled = np.where(wavelen > low, inv_freq / factor, inv_freq)
    smooth = (8192 / wavelen - 1.0) / (4.0 - 1.0)
    smoothed = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    expected = np.where((wavelen >= high) & (wavelen <= low), smoothed, scaled)
    got = inv_freq / llama3_factors(head_dim=128, theta=5e5, factor=8.0, original=8192)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


F32, U32, STR, BOOL = (gguf.GGUFValueType[n] for n in ("FLOAT32", "UINT32", "STRING", "BOOL"))


def test_rope_scaling(tmp_path):
    linear = {
        "llama.rope.scaling.type": ("linear", STR),
        "llama.rope.scaling.factor": (4.0, F32),
    }
    write(tmp_path / "m.gguf", extra=linear)
    rope = open_checkpoint(tmp_path / "m.gguf").config.rope
    assert (rope.type, rope.factor) == ("linear", 4.0)
    yarn = {
        "llama.rope.scaling.type": ("yarn", STR),
        "llama.rope.scaling.factor": (2.0, F32),
        "llama.rope.scaling.original_context_length": (256, U32),
    }
    write(tmp_path / "m.gguf", extra=yarn)
    rope = open_checkpoint(tmp_path / "m.gguf").config.rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 2.0, 256)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("llama.logit_scale", 2.0, F32),
        ("llama.expert_count", 8, U32),
        ("llama.attention.sliding_window", 64, U32),
        ("llama.rope.scaling.type", "longrope", STR),
        ("llama.rope.scaling.attn_factor", 2.0, F32),
        ("llama.attention.causal", False, BOOL),
        ("split.count", 3, U32),
        ("general.type", "adapter", STR),
    ],
)
def test_metadata_that_changes_results_is_refused(key, value, kind, tmp_path):
    write(tmp_path / "m.gguf", extra={key: (value, kind)})
    with pytest.raises(ValueError, match=key.removeprefix("llama.")):
        open_checkpoint(tmp_path / "m.gguf")


def test_other_architectures_and_files(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, arch="mamba")
    with pytest.raises(ValueError, match=r"general.architecture: expected one of .*got 'mamba'"):
        open_checkpoint(path)
    write(path)
    whole = path.read_bytes()
    for length in (0, 10, 30, 200, 700, 2000, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"complete GGUF"):
            open_checkpoint(path)
    path.write_bytes(whole[:4] + b"\0\0\0\3" + whole[8:])
    with pytest.raises(ValueError, match=r"version 2 or 3, little-endian"):
        open_checkpoint(path)
    path.write_bytes(b"not a model at all, only text")
    with pytest.raises(ValueError, match=r"complete GGUF"):
        open_checkpoint(path)


# Tokenizers


def byte_level_metadata(backend, pre="smollm", **extra):
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {"<|end|>", "<|start|>", "<pad>"}
    data = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if t in special else 1 for t in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": tokens.index("<|start|>"),
        "eos_token_id": tokens.index("<|end|>"),
        **extra,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in data.items()}


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
def test_byte_level_tokenizer(pre, byte_level):
    metadata = byte_level_metadata(byte_level._backend, pre)
    tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.chat_template": "x"})
    text = "It's 12345 naïve 你好 😀!?\n\n  two  spaces<|end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[-1] == tokenizer.eos_ids[0] == byte_level.eos_ids[0]
    assert tokenizer.chat_template == "x"
    adds_bos = tokenizer.encode("a")[0] == tokenizer.bos_id
    assert adds_bos == (pre == "llama-bpe")
    if pre == "gpt-2":
        assert ids == byte_level.encode(text)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["ab", "1", "2", "3", "4", "Ġcd", "'s"]),
        ("gpt-2", ["ab", "1234", "Ġcd", "'s"]),
        ("default", ["ab", "123", "4", "Ġcd", "'", "s"]),
        ("llama-bpe", ["ab", "123", "4", "Ġcd", "'s"]),
        ("qwen2", ["ab", "1", "2", "3", "4", "Ġcd", "'s"]),
    ],
)
def test_word_splitting(pre, words, byte_level):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(byte_level._backend, pre))
    split = tokenizer._backend.pre_tokenizer.pre_tokenize_str("ab1234 cd's")
    assert [word for word, _ in split] == words


def test_sentencepiece_tokenizer(sentencepiece):
    vocab = sentencepiece._backend.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    data = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [-float(i) for i in range(len(tokens))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": 5,
        "unknown_token_id": 0,
    }
    metadata = {f"tokenizer.ggml.{k}": v for k, v in data.items()}
    tokenizer = tokenizer_from_gguf(metadata)
    for text in ("the cat", " the 你 é 😀", "", "thethe"):
        ids = tokenizer.encode(text)
        assert ids == sentencepiece.encode(text)  # bos in front by default
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == (2, 5)
    plain = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert plain.decode(plain.encode("the cat")) == "the cat"
    assert len(plain.encode("the")) > len(tokenizer.encode("the"))


def test_runs_of_spaces_are_tokens_of_their_own():
    """Gemma's user-defined tokens: whole runs of spaces, found before words are put together."""
    letters = [f"<0x{b:02X}>" for b in range(256)] + ["▁", "x", "▁x", "▁▁", "▁▁▁"]
    tokens = ["<unk>", *letters]
    data = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, *[6] * 256, 1, 1, 1, 4, 4],
        "scores": [0.0] * 257 + [-3.0, -2.0, -1.0, -1000.0, -1000.0],
        "add_space_prefix": False,
        "add_bos_token": False,
    }
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in data.items()})
    for text, pieces in (
        ("x x", ["x", "▁x"]),
        ("x  x", ["x", "▁▁", "x"]),
        ("   x", ["▁▁▁", "x"]),
    ):
        ids = tokenizer.encode(text)
        assert [tokens[i] for i in ids] == pieces
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join([stream.push([i]) for i in ids] + [stream.finish()]) == text


def test_tokenizers_are_refused_by_name(byte_level):
    metadata = byte_level_metadata(byte_level._backend)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre: .*got 'tekken'"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "tekken"})
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre: expected a value, got none"):
        tokenizer_from_gguf({k: v for k, v in metadata.items() if not k.endswith(".pre")})
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model: .*got 't5'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "t5"})
    with pytest.raises(ValueError, match=r"eos_token_id: expected an id below"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.eos_token_id": 10_000})
    assert tokenizer_from_gguf({}) is None
