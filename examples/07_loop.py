"""A training loop as accelerate's examples have it: motley.wrap takes the place of accelerator.prepare.

    torchrun --nproc_per_node=3 examples/07_loop.py
"""

import os

import torch
import transformers

import motley

HERE = os.path.dirname(os.path.abspath(__file__))
torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                            bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 20)
texts = torch.randint(0, 64, (48, 16), generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(texts, batch_size=12)  # whole batches, the same on every worker

model = motley.wrap(model, optimizer, f"{HERE}/three.yaml")  # accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for tokens in loader:
        outputs = model(input_ids=tokens, labels=tokens)
        right = (outputs.logits[:, :-1].argmax(-1) == tokens[:, 1:]).float().mean()
        outputs.loss.backward()  # accelerator.backward(outputs.loss)
        model.clip_grad_norm_(1.0)  # accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if model.dist.rank == 0:
        print(f"epoch {epoch}: loss {outputs.loss.item():.3f}, {100 * right.item():.0f}% right")
