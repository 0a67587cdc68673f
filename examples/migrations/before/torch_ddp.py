"""torch's DistributedDataParallel: torchrun --nproc-per-node 2 torch_ddp.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(128, 6)
data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = DistributedDataParallel(model)
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"loss {mean.item():.6f}")
