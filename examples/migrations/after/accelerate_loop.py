"""Accelerate with accumulation, clipping and a schedule: accelerate launch --num_processes 2 accelerate_loop.py"""

import torch
import torch.nn.functional as F
from drumline.accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
points = torch.randn(124, 6)  # the last round has 12 samples for 16 places
data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
loader = DataLoader(data, batch_size=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for _ in range(2):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        if accelerator.is_main_process:
            print(f"loss {mean.item():.6f}")
    model.eval()
    right = []
    for x, y in loader:
        with torch.no_grad():
            right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    answers = torch.cat(right)
    accelerator.print(f"correct {int(answers.sum())} of {len(answers)}")
