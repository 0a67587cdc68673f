"""Plans that split the model itself: tensor, spatial, context and pipeline parallelism on one captured graph."""
