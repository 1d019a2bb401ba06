"""Collectives of a tensor-parallel group; all ranks must call each function together."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.utils.common import get_available_gpu_memory


def own_rank() -> int:
    """This rank's number in the group; the heads are sharded in this order."""
    return int(get_tp_group().rank_in_group)


def num_ranks() -> int:
    return int(get_tp_group().world_size)


def first_ranks_choice(gamma: int, knows: bool) -> tuple[int, bool]:
    """The first rank's gamma, since policies read clocks, and whether all ranks know their requests' caps."""
    group = get_tp_group()
    if group.world_size == 1:
        return gamma, knows
    others = torch.iinfo(torch.int64).max
    chosen = torch.tensor([gamma if group.rank_in_group == 0 else others, int(knows)])
    torch.distributed.all_reduce(chosen, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(chosen[0]), bool(chosen[1])


def all_say_yes(answer: bool) -> bool:
    """Return whether all ranks say so: one that failed by itself would prune, or draft, alone."""
    group = get_tp_group()
    if group.world_size == 1:
        return answer
    answers = torch.tensor([int(answer)])
    torch.distributed.all_reduce(answers, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(answers)


def least_free_bytes(device: str, gpu_id: int) -> int:
    """The least free memory of all ranks."""
    group = get_tp_group()
    is_shared = group.world_size > 1
    return int(2**30 * get_available_gpu_memory(device, gpu_id, distributed=is_shared, cpu_group=group.cpu_group))


def largest_of_all(values: torch.Tensor) -> torch.Tensor:
    """Element-wise maximum over the ranks' heads; mutates and returns values."""
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group.device_group)
    return values


def sum_of_all(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum; mutates and returns values."""
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.SUM, group=group.device_group)
    return values
