"""SPEC_STACK in SGLang's registry of speculative algorithms."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from spec_stack.sglang import hooks
from spec_stack.sglang.server_args import NAME, ServerConfig
from spec_stack.sglang.support import check_version, require_drafting

_DEFAULT_RUNNING_REQUESTS = 48


class SpecStackAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Behaves as STANDALONE in every query, with buffers for the largest gamma."""

    def is_standalone(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Apply what SGLang does for STANDALONE by name, with widths for the largest gamma."""
        largest = ServerConfig.from_environment().gammas[-1]
        server_args.speculative_num_steps = largest
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = largest + 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _DEFAULT_RUNNING_REQUESTS
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
        server_args.enable_mixed_chunk = False

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
        return ServerConfig.from_environment().gammas[-1] + 1

    def __getattr__(self, name: str) -> Any:
        # The scheduler asks built-in algorithms for more than CustomSpecAlgo has (create_future_map, need_topk, …).
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(SpeculativeAlgorithm.STANDALONE, name)


def validate(server_args: Any) -> None:
    """Reject unsupported settings before anything is loaded. Raises ValueError with the fix."""
    check_version()
    hooks.check()
    require_drafting(server_args, ServerConfig.from_environment())


def register() -> None:
    @SpeculativeAlgorithm.register(  # type: ignore[untyped-decorator]
        NAME, supports_overlap=True, validate_server_args=validate, spec_class=SpecStackAlgorithm
    )
    def make_worker(server_args: Any) -> type:
        from spec_stack.sglang.worker import SpecStackWorker

        return SpecStackWorker
