"""What will happen when: schedules replayed event by event."""

from .loop import Loop
from .replay import bubble, replay, replay_in_thirds, replay_pipeline

__all__ = ["Loop", "bubble", "replay", "replay_in_thirds", "replay_pipeline"]
