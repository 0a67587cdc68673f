"""The sizes of the buckets in which DistributedDataParallel sends gradients.

Written for torch 2.13. Missing public API: DDP reports the buckets that it has built only in its log.
"""

from __future__ import annotations

from torch import nn

__all__ = ["bucket_bytes"]


def bucket_bytes(module: nn.parallel.DistributedDataParallel) -> list[int]:
    """Bytes of every bucket, as rebuilt after the first backward if it was; empty before there are any."""
    logged = module._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return [int(n) for n in str(sizes).replace(",", " ").split()]
