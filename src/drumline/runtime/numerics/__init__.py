"""The arithmetic of a step: precision, loss scaling and weighting, BatchNorm across ranks, element-wise optimizers."""
