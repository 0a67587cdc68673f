"""Plans that split the model itself: tensor, spatial, context and pipeline parallelism on one captured graph."""

from .model import SplitModel
from .set_up import set_up

__all__ = ["SplitModel", "set_up"]
