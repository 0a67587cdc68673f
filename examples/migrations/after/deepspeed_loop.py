"""DeepSpeed, ZeRO stage 2 with accumulation: deepspeed --num_gpus 2 deepspeed_loop.py --deepspeed"""

import argparse
import tempfile

import drumline.deepspeed as deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=2)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

config = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 1000,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
}

deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
torch.manual_seed(0)
points = torch.randn(128, 6)
data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
trained = filter(lambda p: p.requires_grad, model.parameters())
engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=trained, config=config)
device = get_accelerator().device_name(engine.local_rank)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)

total = torch.zeros((), device=device)
for epoch in range(args.epochs):
    for x, y in loader:
        last = engine.is_gradient_accumulation_boundary()
        x, y = x.to(device), y.to(device)
        if engine.fp16_enabled():
            x = x.half()
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / (engine.gradient_accumulation_steps() * engine.world_size)
        if last:
            dist.all_reduce(total)
            if engine.global_rank == 0:
                print(f"loss {total.item():.6f}")
            total.zero_()
    if epoch == 0:  # leave, and come back
        folders = [tempfile.mkdtemp() if engine.global_rank == 0 else None]
        dist.broadcast_object_list(folders)
        engine.save_checkpoint(folders[0], client_state={"epoch": epoch})
        _, state = engine.load_checkpoint(folders[0])
        assert state["epoch"] == epoch
