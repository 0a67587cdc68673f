"""Plain torch on one device: python torch_one_device.py"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.randn(128, 6)
data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=32)

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}")
