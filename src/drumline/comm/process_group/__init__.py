"""Process groups of torch.distributed in Python, over a backend that moves contiguous tensors."""
