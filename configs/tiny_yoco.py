"""A small YOCO: two layers with a window of 64 tokens, then two that read one global pair of keys
and values, on Python's own standard library. No download.

    python train/pretrain.py configs/tiny_yoco.py
    python -m kvjax.infer --model runs/tiny_yoco --raw "def " --temperature 0.7 --max-tokens 60

Beyond the windows a token costs 128 numbers for the whole model. Prefill runs the second half for
the last token alone.

Expect, with Python 3.11: loss 8.59 at the start; held-out loss 6.12 at step 100, 5.49, 5.19, 5.03,
4.85, 4.77 and at the end 4.71 nats a token (configs/tiny_gqa.py: 4.74). The run took 708 CPU
seconds on a busy machine.
"""

from kvjax.config import ModelConfig
from kvjax.sharing import yoco
from kvjax.training import DataConfig, OptimizerConfig, TrainConfig, TrainingConfig

config = TrainConfig(
    model=ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        **yoco(4, window=64),
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    ),
    data=DataConfig(corpus="stdlib", max_bytes=3_000_000, context=256, batch_size=4),
    optimizer=OptimizerConfig(lr=2e-3, final_lr=2e-4, warmup_steps=50),
    training=TrainingConfig(steps=700, eval_every=100, save_every=100, loss_chunk=128),
)
