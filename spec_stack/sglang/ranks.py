"""Collectives of a tensor-parallel group; all ranks must call each function together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.utils.common import get_available_gpu_memory

from spec_stack.prefill.importance import Ranks
from spec_stack.sglang.errors import log_and_continue


def own_rank() -> int:
    """This rank's number; the heads are sharded in this order."""
    return int(get_tp_group().rank_in_group)


def num_ranks() -> int:
    return int(get_tp_group().world_size)


def first_ranks_choice(gamma: int, knows: bool) -> tuple[int, bool]:
    """The first rank's gamma, since policies read clocks, and whether all ranks know their requests' caps."""
    others = torch.iinfo(torch.int64).max
    chosen, all_know = _least(gamma if own_rank() == 0 else others, int(knows))
    return chosen, bool(all_know)


def all_say_yes(answer: bool) -> bool:
    """Return whether all ranks say so: one that failed by itself would prune, or draft, alone."""
    return bool(_least(int(answer))[0])


def same_on_all(answers: Sequence[bool]) -> bool:
    """Return whether every answer is the same on all ranks."""
    return sum(_least(*map(int, answers), *(int(not answer) for answer in answers))) == len(answers)


def contained(what: str, instead: str) -> AbstractContextManager[None]:
    """`log_and_continue` on one rank. With several the server ends: the others would hang in other batches."""
    return log_and_continue(what, instead) if num_ranks() == 1 else nullcontext()


def _least(*numbers: int) -> list[int]:
    """The least of every number over the ranks, on the host."""
    group = get_tp_group()
    if group.world_size == 1:
        return list(numbers)
    least = torch.tensor(numbers)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [int(number) for number in least]


def least_free_bytes(device: str, gpu_id: int) -> int:
    """The least free memory of all ranks."""
    group = get_tp_group()
    is_shared = group.world_size > 1
    return int(2**30 * get_available_gpu_memory(device, gpu_id, distributed=is_shared, cpu_group=group.cpu_group))


class TensorParallel(Ranks):
    """The ranks of the group, for scoring; its sums and maxima are collectives."""

    def __init__(self) -> None:
        group = get_tp_group()
        self.rank, self.num = int(group.rank_in_group), int(group.world_size)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, by: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
        if self.num > 1:
            torch.distributed.all_reduce(values, op=by, group=get_tp_group().device_group)
        return values
