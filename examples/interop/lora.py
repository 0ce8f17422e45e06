"""LoRA by peft on the GPT-2 of gpt2.py: low-rank changes of `c_attn` are trained, and nothing else.

Nothing here knows Stratagem; lora.yaml is the job. `train` is what it replaces.
"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from examples.interop import gpt2, plain_loop

EPOCHS = 2


def build_model(rank: int = 4) -> PeftModel:
    """1,024 of 29,568 parameters are trained."""
    config = LoraConfig(
        r=rank, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return get_peft_model(gpt2.build_model(), config)


def train() -> dict[str, Tensor]:
    """The state after the job's steps, as one process computes it."""
    torch.manual_seed(0)
    model = build_model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-6)
    batches = plain_loop.batches(gpt2.load()["train"], gpt2.pad, EPOCHS)
    return plain_loop.train(model, batches, optimizer)
