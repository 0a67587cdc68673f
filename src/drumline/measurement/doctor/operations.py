"""Operations of torch.distributed on an existing group, each with a check of its result.

Values are small whole numbers, so that results are exact in any type and order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

N = 6
"""Elements of one rank's tensor."""

Operation = Callable[[int, int, torch.device], bool]
"""(rank, ranks, device) -> whether the result was right."""

# newer releases of torch have new names for these two
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def given(rank: int, device: torch.device, dtype: torch.dtype = torch.float32, n: int = N) -> Tensor:
    """Input of a rank, different by rank and index."""
    values = torch.arange(n) % 5 + 3 * rank
    made = torch.complex(values.float(), values.float() + 1) if dtype.is_complex else values
    return made.to(device=device, dtype=dtype)


def _sum(p: int, device: torch.device, dtype: torch.dtype = torch.float32, n: int = N) -> Tensor:
    return torch.stack([given(r, device, dtype, n) for r in range(p)]).sum(0).to(dtype)


def _all(p: int, device: torch.device) -> list[Tensor]:
    return [given(r, device) for r in range(p)]


def _equal(results: list[Tensor], expected: list[Tensor]) -> bool:
    return len(results) == len(expected) and all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def _all_reduce(dtype: torch.dtype, r: int, p: int, device: torch.device) -> bool:
    tensor = given(r, device, dtype)
    dist.all_reduce(tensor)
    return torch.equal(tensor, _sum(p, device, dtype))


def _broadcast(r: int, p: int, device: torch.device) -> bool:
    tensor = given(r, device)
    dist.broadcast(tensor, src=p - 1)
    return torch.equal(tensor, given(p - 1, device))


def _reduce(r: int, p: int, device: torch.device) -> bool:
    tensor = given(r, device)
    dist.reduce(tensor, dst=p - 1)
    return r != p - 1 or torch.equal(tensor, _sum(p, device))


def _all_gather(r: int, p: int, device: torch.device) -> bool:
    outs = [torch.zeros(N, device=device) for _ in range(p)]
    dist.all_gather(outs, given(r, device))
    return _equal(outs, _all(p, device))


def _all_gather_single(r: int, p: int, device: torch.device) -> bool:
    out = torch.zeros(p * N, device=device)
    _GATHER(out, given(r, device))
    return torch.equal(out, torch.cat(_all(p, device)))


def _gather(r: int, p: int, device: torch.device) -> bool:
    outs = [torch.zeros(N, device=device) for _ in range(p)] if r == 0 else None
    dist.gather(given(r, device), outs, dst=0)
    return outs is None or _equal(outs, _all(p, device))


def _scatter(r: int, p: int, device: torch.device) -> bool:
    out = torch.zeros(N, device=device)
    dist.scatter(out, _all(p, device) if r == 0 else None, src=0)
    return torch.equal(out, given(r, device))


def _blocks(r: int, p: int, device: torch.device) -> Tensor:
    return given(r, device, n=p * N)


def _block_sum(r: int, p: int, device: torch.device) -> Tensor:
    return _sum(p, device, n=p * N)[r * N : (r + 1) * N]


def _reduce_scatter(r: int, p: int, device: torch.device) -> bool:
    out = torch.zeros(N, device=device)
    dist.reduce_scatter(out, list(_blocks(r, p, device).chunk(p)))
    return torch.equal(out, _block_sum(r, p, device))


def _reduce_scatter_single(r: int, p: int, device: torch.device) -> bool:
    out = torch.zeros(N, device=device)
    _SCATTER(out, _blocks(r, p, device))
    return torch.equal(out, _block_sum(r, p, device))


def _blocks_for(r: int, p: int, device: torch.device) -> list[Tensor]:
    return [_blocks(s, p, device)[r * N : (r + 1) * N] for s in range(p)]


def _all_to_all(r: int, p: int, device: torch.device) -> bool:
    outs = [torch.zeros(N, device=device) for _ in range(p)]
    dist.all_to_all(outs, [block.contiguous() for block in _blocks(r, p, device).chunk(p)])
    return _equal(outs, _blocks_for(r, p, device))


def _all_to_all_single(r: int, p: int, device: torch.device) -> bool:
    out = torch.zeros(p * N, device=device)
    dist.all_to_all_single(out, _blocks(r, p, device))
    return torch.equal(out, torch.cat(_blocks_for(r, p, device)))


def _send_receive(r: int, p: int, device: torch.device) -> bool:
    after, before, out = (r + 1) % p, (r - 1) % p, torch.zeros(N, device=device)
    if r == 0:
        dist.send(given(r, device), dst=after)
        dist.recv(out, src=before)
    else:
        dist.recv(out, src=before)
        dist.send(given(r, device), dst=after)
    return torch.equal(out, given(before, device))


def _batch(r: int, p: int, device: torch.device) -> bool:
    out, mine = torch.zeros(N, device=device), given(r, device)
    both = [dist.P2POp(dist.isend, mine, (r + 1) % p), dist.P2POp(dist.irecv, out, (r - 1) % p)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return torch.equal(out, given((r - 1) % p, device))


def _barrier(r: int, p: int, device: torch.device) -> bool:
    dist.barrier()
    return True


def _new_group(r: int, p: int, device: torch.device) -> bool:
    """A group of the last rank alone, and one of all ranks."""
    alone, everyone = dist.new_group([p - 1]), dist.new_group(list(range(p)))
    right = True
    if r == p - 1:
        mine = given(r, device)
        dist.all_reduce(mine, group=alone)
        right = torch.equal(mine, given(r, device))
    tensor = given(r, device)
    dist.all_reduce(tensor, group=everyone)
    return right and torch.equal(tensor, _sum(p, device))


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce float32": partial(_all_reduce, torch.float32),
    "all_reduce bfloat16": partial(_all_reduce, torch.bfloat16),
    "all_reduce int64": partial(_all_reduce, torch.int64),
    "all_reduce complex64": partial(_all_reduce, torch.complex64),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "send, recv": _send_receive,
    "batch_isend_irecv": _batch,
    "barrier": _barrier,
    "new_group": _new_group,
}
"""Operations by their public names."""
PAIRS = ("send, recv", "batch_isend_irecv")
