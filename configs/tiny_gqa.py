"""A GQA model of 3.3 million parameters, trained on Python's own standard library. No download.

    python train/pretrain.py configs/tiny_gqa.py
    python -m kvjax.infer --model runs/tiny_gqa --raw "def " --temperature 0.7 --max-tokens 60

Expect, with Python 3.11: 728,803 training tokens, of which 700 steps see almost all once; loss 8.6
at the start; held-out loss 6.17 at step 100, 5.55, 5.25, 5.09, 4.90, 4.81 and at the end 4.74 nats
a token (1.36 a byte). The run took 544 CPU seconds, which is 4.5 minutes if it has two cores alone;
on two cores shared with other work it was measured at 13 min 49 s. The model has learnt Python's
shape and little of its sense. The second command prints, after "def ":

    write(self):
            return self.data(self.name):
                return self.data.errors(self._name, port)

            self._map(self, p)

        def __(self):
            self.name = self.__n()

Without --temperature it begins like code and then repeats itself ("Return a list of the list of").
"""

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
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    ),
    data=DataConfig(corpus="stdlib", max_bytes=3_000_000, context=256, batch_size=4),
    optimizer=OptimizerConfig(lr=2e-3, final_lr=2e-4, warmup_steps=50),
    training=TrainingConfig(steps=700, eval_every=100, save_every=100, loss_chunk=128),
)
