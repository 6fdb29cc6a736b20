"""TODO"""

from kvjax.config import ModelConfig
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
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    ),
    data=DataConfig(corpus="stdlib", max_bytes=3_000_000, context=256, batch_size=4),
    optimizer=OptimizerConfig(lr=2e-3, final_lr=2e-4, warmup_steps=50),
    training=TrainingConfig(steps=700, eval_every=100, save_every=100, loss_chunk=128),
)
