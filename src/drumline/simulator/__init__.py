"""Predicted timelines: schedules replayed event by event, and steps drawn from their cost."""

from .event_loop import EventLoop
from .replay import bubble, replay, replay_in_thirds, replay_pipeline

__all__ = ["EventLoop", "bubble", "replay", "replay_in_thirds", "replay_pipeline"]
