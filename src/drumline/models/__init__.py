"""What the model costs: its layers and operators, traced or by formula."""

from . import zoo
from .profile import KINDS, Affine, Layer, ProfiledOp, Profile

__all__ = ["KINDS", "Affine", "Layer", "ProfiledOp", "Profile", "zoo"]
