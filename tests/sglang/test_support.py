"""What a scoring model may stand beside. No SGLang here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack.sglang.support import BESIDE, draft_positions_are_mapped, scoring_refusal


def _model(context_len: int = 4096, architecture: str = "LlamaForCausalLM", is_generation: bool = True) -> Any:
    return SimpleNamespace(
        context_len=context_len,
        is_generation=is_generation,
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=SimpleNamespace(),
    )


def _args(**changed: Any) -> Any:
    return SimpleNamespace(pp_size=1, enable_dp_attention=False, dllm_algorithm=None, **changed)


@pytest.mark.parametrize("algorithm", ["", *BESIDE])
def test_a_model_scores_beside_none_and_beside_those_that_verify_slots(algorithm: str) -> None:
    assert scoring_refusal(_args(), algorithm, _model(), _model()) is None


@pytest.mark.parametrize(
    ("algorithm", "args", "target", "scoring", "named"),
    [
        ("DSPARK", {}, {}, {}, "--speculative-algorithm DSPARK"),
        ("", {"pp_size": 2}, {}, {}, "--pp-size"),
        ("NGRAM", {"enable_dp_attention": True}, {}, {}, "--enable-dp-attention"),
        ("NGRAM", {"attn_dp_size": 2}, {}, {}, "--attn-dp-size"),
        ("", {"dllm_algorithm": "LowConfidence"}, {}, {}, "--dllm-algorithm"),
        ("", {}, {"is_generation": False}, {}, "does not generate"),
        ("", {}, {"context_len": 8192}, {}, "add --context-length 4096"),
        ("", {}, {"architecture": "DeepseekV3ForCausalLM"}, {}, "the target is a DeepseekV3ForCausalLM"),
        ("NGRAM", {"enable_hierarchical_cache": True}, {}, {}, "--enable-hierarchical-cache"),
    ],
)
def test_what_a_model_cannot_score_beside_is_refused_by_name(
    algorithm: str, args: dict[str, Any], target: dict[str, Any], scoring: dict[str, Any], named: str
) -> None:
    changed = SimpleNamespace(**{**vars(_args()), **args})
    refusal = scoring_refusal(changed, algorithm, _model(**target), _model(**scoring))
    assert refusal is not None
    assert named in refusal


@pytest.mark.parametrize(("algorithm", "mapped"), [("SPEC_STACK", True), ("spec_stack", True), ("EAGLE3", False)])
def test_only_drafts_whose_lengths_are_protected_leave_their_slots(algorithm: str, mapped: bool) -> None:
    """SGLang's own Triton and FlashInfer drafts take positions for lengths."""
    args = SimpleNamespace(speculative_algorithm=algorithm, speculative_draft_attention_backend=None)
    runner: Any = SimpleNamespace(is_draft_worker=True, server_args=args, decode_attention_backend_str="triton")
    assert draft_positions_are_mapped(runner) is mapped
