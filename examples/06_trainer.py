"""A Trainer of transformers on unequal workers: the import and one argument are motley's.

    torchrun --nproc_per_node=3 examples/06_trainer.py
"""

import os
import sys

import torch
import transformers

from motley.huggingface import Trainer  # from transformers import Trainer

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = sys.argv[1] if len(sys.argv) > 1 else "trainer"


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                            bos_token_id=0, eos_token_id=0)
)
args = transformers.TrainingArguments(
    OUT, use_cpu=True, per_device_train_batch_size=4, max_steps=6, learning_rate=1e-2, logging_steps=2, save_steps=3, report_to=[]
)
trainer = Trainer(model=model, args=args, train_dataset=Text(), eval_dataset=Text(), cluster=f"{HERE}/three.yaml")
trainer.train()
print("evaluated", trainer.evaluate()["eval_loss"])
trainer.save_model(f"{OUT}/model")
