"""The batch sizes that CUDA graphs are captured for: SGLang's own list, asked where its runners ask; no server."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

_SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]


@pytest.fixture
def capture() -> Iterator[Any]:
    """SGLang's settings as a launch with graphs leaves them, and a runner; called with flags of decode's graphs."""
    from sglang.srt.model_executor.cuda_graph_config import Phase, default_cuda_graph_config, with_phase
    from sglang.srt.runtime_context import get_context

    override = get_context().override_server_args()
    override.install()

    def publish(**decode: Any) -> Any:
        config = with_phase(default_cuda_graph_config(), Phase.DECODE, **decode)
        get_context().override("test", cuda_graph_config=config)
        return SimpleNamespace(req_to_token_pool=SimpleNamespace(size=48), server_args=get_context().server_args)

    yield publish
    override.restore()


class _Worker:
    """In the place of SGLang's worker: captures nothing, and notes for which sizes it would."""

    speculative_num_steps = 8

    def __init__(self, runner: Any) -> None:
        self.target_worker = SimpleNamespace(model_runner=runner)
        self.captured: dict[int, list[int]] = {}

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None = None
    ) -> object:
        from spec_stack.sglang.worker import captured_at, sizes_to_capture

        with captured_at(cuda_graph_bs):
            sizes = sizes_to_capture(self.target_worker.model_runner)
        self.captured[speculative_num_steps] = [] if sizes is None else sizes
        return object()

    def apply_runtime_state(self, state: object) -> None:
        pass


def _launch(runner: Any, **settings: Any) -> tuple[Any, dict[int, list[int]]]:
    from spec_stack.sglang.batch_policy import BatchPolicy
    from spec_stack.sglang.server_args import ServerConfig
    from spec_stack.sglang.worker import GraphedController

    policy, worker = BatchPolicy(ServerConfig(**settings), "fp32"), _Worker(runner)
    controller = GraphedController(worker, policy)
    controller.register(object(), steps=8)
    # As SGLang calls it where no --cuda-graph-bs-decode is given.
    controller.init_states(cuda_graph_bs=None)
    return policy, worker.captured


def test_each_gamma_is_captured_for_the_batches_that_may_meet_it(capture: Any) -> None:
    from sglang.srt.runtime_context import get_exec

    runner = capture(bs=_SIZES)
    policy, captured = _launch(runner)
    assert policy.graph_sizes == _SIZES
    assert captured == {0: _SIZES, 1: _SIZES, 2: _SIZES, 4: [size for size in _SIZES if size < 33]}
    assert get_exec().graph.cuda_graph_config.decode.bs == _SIZES


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([40, 48], []), ([8, 64], [8]), ([1], [1]), ([32, 33], [32]), ([16, 160], [16])],
)
def test_a_gamma_that_no_batch_may_use_has_no_graph(capture: Any, sizes: list[int], expected: list[int]) -> None:
    policy, captured = _launch(capture(bs=sizes))
    assert captured[4] == expected
    # SGLang adds the most requests that may run where a size is over it.
    assert policy.graph_sizes == sorted({min(size, 48) for size in sizes})


def test_without_graphs_there_are_no_sizes(capture: Any) -> None:
    policy, captured = _launch(capture(backend="disabled", bs=_SIZES))
    assert policy.graph_sizes is None
    assert set(captured) == {0, 1, 2, 4}
    assert not any(captured.values())
