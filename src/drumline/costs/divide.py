"""One rank's part of a model under a plan: tiles, then tokens, then features, as the engine spreads its graph."""

from __future__ import annotations

from ..models.profile import Profile
from ..plans import Plan
from .context import by_context
from .local import Local, whole
from .tensor import by_tensors
from .tiles import by_tiles

BY_ORDER = (
    "tp: which products are columns and rows is told from their order and sizes, not from the graph",
    "tp: of activations beside products, what is kept is told from what operators give",
)
BY_LAYER = "pp: stages begin at layers of the profile; the engine may begin one inside a layer"
NO_SKIPS = "pp: a stage is taken to hand on its last layer's output alone"


def divide(profile: Profile, plan: Plan) -> Local:
    """The part of the busiest rank; stages are cut from it."""
    local = by_tensors(by_context(by_tiles(whole(profile), plan.tile, halo=plan.halo), plan.cp), plan.tp)
    notes = (BY_ORDER if plan.tp > 1 else ()) + ((BY_LAYER, NO_SKIPS) if plan.pp > 1 else ())
    return Local(local.profile, local.talks, (*local.notes, *notes))
