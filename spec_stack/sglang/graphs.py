"""The captured batch sizes of SGLang's decode graphs, read and set where its runners read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend, with_phase
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

_SOURCE = "spec_stack.capture"


def sizes_to_capture(runner: Any) -> list[int] | None:
    """The batch sizes of a model runner's graphs; None where it captures none."""
    if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return None
    return list(get_batch_sizes_to_capture(runner)[0])


@contextmanager
def captured_at(sizes: Sequence[int] | None) -> Iterator[None]:
    """Capture graphs for these batch sizes alone inside the block; None changes nothing.

    SGLang's own override of an adaptive step's sizes writes `cuda_graph_bs_decode`, which no runner reads.
    """
    config = get_exec().graph.cuda_graph_config
    if sizes is None:
        yield
        return
    pruned = {"bs": list(sizes)} if sizes else {"backend": Backend.DISABLED}
    get_context().override(_SOURCE, cuda_graph_config=with_phase(config, Phase.DECODE, **pruned))
    try:
        yield
    finally:
        get_context().override(_SOURCE, cuda_graph_config=config)


class GraphedController(AdaptiveController):  # type: ignore[misc]
    """SGLang's, with the captured sizes passed to its policy in place of a rarely set flag."""

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        super().init_states(sizes_to_capture(self.worker.target_worker.model_runner))
