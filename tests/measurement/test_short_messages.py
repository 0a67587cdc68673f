"""L, o and g of LogP measured between two real ranks."""

from __future__ import annotations

from typing import Any

import torch

from drumline.launchers import run_ranks


def measured_times(emit: Any) -> dict[str, float]:
    """On every rank: o, g, and one way of a short message."""
    from drumline.comm.environment import connect
    from drumline.measurement.links import TRAINS, find_host_groups, measure_short_messages

    where = connect()
    pair = find_host_groups().near_pair
    assert pair == (0, 1) and TRAINS[0] < TRAINS[1]
    o, g = measure_short_messages(where.rank, torch.device("cpu"), pair)
    return {"o": o, "g": g}


def test_the_first_rank_measures_overhead_and_gap() -> None:
    first, other = run_ranks(measured_times, ranks=2)
    assert first["o"] > 0 and first["g"] >= 0
    assert other == {"o": 0.0, "g": 0.0}
