"""`deepspeed.ops`: optimizers by DeepSpeed's names."""

from . import adam as adam
