"""A model of clicks with bags of tags, counters and an AUC over all trainers, on random data."""

import torch
from torch import nn

import edl.torch as edl
import edl.torch.ps as ps

torch.manual_seed(edl.context().rank)
ps.init(local=True)  # only if there is no launcher
month = ps.Eviction(unseen_s=30 * 86400)
adagrad = ps.Adagrad(0.1)
users = ps.Embedding("users", 8, optimizer=adagrad, eviction=month, weights=ps.WeightFormat.BF16)
tags = ps.EmbeddingBag("tags", 8, mode="mean", optimizer=adagrad, eviction=month)
features = ps.EmbeddingCollection({"user": users, "tags": tags})
deep = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
ps.Dense(deep, optimizer=ps.Adam(1e-2))
counts, auc = ps.Counters("user-counts", eviction=month), ps.Auc()


def batch(size: int = 512) -> tuple[dict[str, torch.Tensor | tuple[torch.Tensor, ...]], torch.Tensor]:
    user, lengths = torch.randint(0, 200, (size,)), torch.randint(0, 6, (size,))
    keys, offsets = torch.randint(0, 100, (int(lengths.sum()),)), lengths.cumsum(0) - lengths
    liked = torch.zeros(size).index_add_(0, torch.arange(size).repeat_interleave(lengths), (keys % 7 < 2).float())
    return {"user": user, "tags": (keys, offsets)}, ((user % 3 == 0) & (liked > 0)).float()


for step in range(400):
    asked, clicked = batch()
    found = features(asked)  # one round trip
    logit = deep(torch.cat([found["user"], found["tags"]], dim=1)).squeeze(-1)
    if step >= 350:
        auc.update(torch.sigmoid(logit), clicked)
    nn.functional.binary_cross_entropy_with_logits(logit, clicked).backward()  # type: ignore[no-untyped-call]
    counts.add(asked["user"], show=1, click=clicked)
    ps.step(wait=False)  # the push is on its way while the next batch is made
auc.push()
ps.rest(wait_for_all=True)
print(f"AUC {auc.compute():.4f}; user 3 was shown and clicked:", counts.read([3]), flush=True)
