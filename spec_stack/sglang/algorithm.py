"""SPEC_STACK in SGLang's registry of speculative algorithms."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from spec_stack.sglang import hooks
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, attn_dp_size, check_version

_DEFAULT_RUNNING_REQUESTS = 48
_SKIP_DRAFT_EXTEND = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"


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
    if not server_args.speculative_draft_model_path:
        raise ValueError(f"{NAME} needs a draft model: add --speculative-draft-model-path")
    config = ServerConfig.from_environment()
    if config.scoring_model is not None:
        raise ValueError(
            f"{NAME} scores with its draft; leave --spec-stack-scoring-model out, or decode with another algorithm"
        )
    largest = config.gammas[-1]
    if server_args.speculative_num_steps not in (None, largest):
        raise ValueError(f"{NAME} takes its steps from --spec-stack-gammas; leave --speculative-num-steps out")
    if server_args.speculative_eagle_topk not in (None, 1):
        raise ValueError(f"{NAME} drafts one chain; leave --speculative-eagle-topk out")
    if server_args.speculative_num_draft_tokens not in (None, largest + 1):
        raise ValueError(f"{NAME} takes its widths from --spec-stack-gammas; leave --speculative-num-draft-tokens out")
    for name, value, wanted in (
        ("--speculative-adaptive", server_args.speculative_adaptive, False),
        ("--enable-dp-attention", server_args.enable_dp_attention, False),
        ("--attn-dp-size", attn_dp_size(server_args), 1),
        ("--pp-size", server_args.pp_size, 1),
        # Gamma 0 has no draft probabilities for it, and SGLang's worker ends the server where there are none.
        ("--speculative-use-rejection-sampling", server_args.speculative_use_rejection_sampling, False),
    ):
        if value != wanted:
            raise ValueError(f"{NAME} does not work with {name}; leave it out")
    if os.environ.get(_SKIP_DRAFT_EXTEND, "0").lower() in ("1", "true") and 0 in config.gammas:
        raise ValueError(
            f"{_SKIP_DRAFT_EXTEND} leaves holes in the draft's KV after every step of gamma 0; unset it, or leave 0 "
            "out of --spec-stack-gammas"
        )


def register() -> None:
    @SpeculativeAlgorithm.register(  # type: ignore[untyped-decorator]
        NAME, supports_overlap=True, validate_server_args=validate, spec_class=SpecStackAlgorithm
    )
    def make_worker(server_args: Any) -> type:
        from spec_stack.sglang.worker import SpecStackWorker

        return SpecStackWorker
