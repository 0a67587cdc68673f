"""Horovod: horovodrun -np 2 python horovod_loop.py"""

import drumline.horovod as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
torch.manual_seed(0)
points = torch.randn(128, 6)
data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(data, batch_size=16, sampler=sampler)

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"loss {mean.item():.6f}")
