"""Cost of the model: its layers and operators, traced or by formula."""

from . import zoo
from .profile import KINDS, Affine, Layer, Profile, ProfiledOp

__all__ = ["KINDS", "Affine", "Layer", "Profile", "ProfiledOp", "zoo"]
