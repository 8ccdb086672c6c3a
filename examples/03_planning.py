"""Planning without a cluster: what would this model do on machines that are not here?

    python3 examples/03_planning.py
"""

import torch
from torch import nn

import motley

BATCH, SEQ, VOCAB = 256, 256, 16000


class LanguageModel(nn.Module):
    def __init__(self, width=512, layers=4, heads=8):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, width), nn.Parameter(torch.zeros(SEQ, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, VOCAB)

    def forward(self, tokens):
        mask = torch.full((SEQ, SEQ), float("-inf")).triu(1)
        return self.head(self.layers(self.embed(tokens) + self.position, mask))


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Only shapes matter, so the batch may be on the Meta device, which holds no numbers.
tokens = torch.empty(BATCH, SEQ, dtype=torch.long, device="meta")
graph = motley.capture(LanguageModel(), (tokens, tokens), loss_fn)
print(f"{graph.nodes} nodes captured in {graph.capture_s:.2f} s; batch {graph.batch}")

for cluster in ("hap-a100-p100", "hapt-case", "hap-64"):
    plan = motley.plan(graph, cluster)
    simulated = motley.simulate(plan)
    print(f"\n{plan}")
    print(f"found in {plan.search_s:.2f} s; simulated step {1e3 * simulated['step_s']:.1f} ms")
    for baseline in plan.baselines:
        if baseline["feasible"]:
            print(f"  {baseline['name']}: {baseline['predicted_step_s'] / plan.predicted_step_s:.2f}x slower")
