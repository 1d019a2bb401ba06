"""The speculative worker: SGLang's STANDALONE, with gamma chosen anew for every step."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from spec_stack.sglang import hooks
from spec_stack.sglang.batch_policy import BatchPolicy
from spec_stack.sglang.server_args import ServerConfig

_SWITCH = "Switch adaptive runtime state"


class SpecStackWorker(StandaloneWorkerV2):  # type: ignore[misc]
    """Made by SGLang in each scheduler process. Raises RuntimeError where the plugin's hooks are not in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        hooks.check()
        super().__init__(*args, **kwargs)
        runner = self._target_worker.model_runner
        self.batch_policy = BatchPolicy(
            ServerConfig.from_environment(),
            precision=str(runner.dtype).removeprefix("torch."),
            agree=_first_ranks_choice(get_tp_group()),
        )
        self.adaptive_controller = AdaptiveController(self, self.batch_policy)
        # SGLang logs every change of gamma, which it expects now and then; here it is every step's business.
        logging.getLogger(eagle_worker_v2.__name__).addFilter(lambda entry: not entry.getMessage().startswith(_SWITCH))

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.batch_policy.something_else_runs()
        else:
            self.batch_policy.begin_step(batch.reqs)
        return super().forward_batch_generation(batch, *args, **kwargs)


def _first_ranks_choice(group: Any) -> Any:
    """Policies read clocks, so ranks would differ; the first rank of a tensor-parallel group decides for all."""
    if group.world_size == 1:
        return lambda gamma: gamma

    def agree(gamma: int) -> int:
        chosen = torch.tensor([gamma])
        torch.distributed.broadcast(chosen, src=group.ranks[0], group=group.cpu_group)
        return int(chosen)

    return agree
