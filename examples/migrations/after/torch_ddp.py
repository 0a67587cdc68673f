"""torch's DistributedDataParallel: torchrun --nproc-per-node 2 torch_ddp.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import drumline as dl
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dl.init_distributed()
torch.manual_seed(0)
points = torch.randn(128, 6)
data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, _, _ = dl.initialize(model=model, optimizer=optimizer, plan=f"dp={dist.get_world_size()},zero=2")
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        model.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"loss {mean.item():.6f}")
