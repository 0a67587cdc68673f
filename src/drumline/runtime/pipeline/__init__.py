"""Runs pipelines: one rank's lane of a pipeline order, with messages between the stages."""
