"""`deepspeed.moe`: importable; layers of experts are Drumline's own."""

from . import layer as layer
from . import utils as utils
