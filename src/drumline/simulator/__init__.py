"""Predicted timelines: schedules replayed event by event, and steps drawn from their cost."""

from .cluster_collective import ClusterCollective, replay_on_cluster
from .collective_replay import CollectiveCall, NetworkReplay, replay, replay_together
from .event_loop import EventLoop
from .network import FairNetwork, LinkUse
from .pipeline_replay import bubble, replay_in_thirds, replay_pipeline

__all__ = [
    "ClusterCollective",
    "CollectiveCall",
    "EventLoop",
    "FairNetwork",
    "LinkUse",
    "NetworkReplay",
    "bubble",
    "replay",
    "replay_in_thirds",
    "replay_on_cluster",
    "replay_pipeline",
    "replay_together",
]
