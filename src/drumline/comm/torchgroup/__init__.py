"""Process groups of torch.distributed in Python, over an engine that moves contiguous tensors."""
