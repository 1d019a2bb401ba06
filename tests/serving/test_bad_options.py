"""Bad request options that reach the scheduler, past the tokenizer's process, which refuses them over HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from .test_pool_size import runner_of


def _request(custom_params: Any) -> Any:
    """SGLang's request, as far as a decision looks at it."""
    return SimpleNamespace(
        rid="0",
        origin_input_ids=list(range(50)),
        output_ids=[],
        extra_key=None,
        cache_salt=None,
        logprob_start_len=-1,
        customized_info=None,
        sampling_params=SimpleNamespace(custom_params=custom_params, ignore_eos=False),
    )


@pytest.mark.parametrize("on_failure", ["dense", "raise"])
@pytest.mark.parametrize("custom_params", [{"spec_stack": {"gamma": 4.0}}, {"spec_stack": 3}, {"keep_rate": 0.2}])
def test_bad_options_cost_their_request_a_dense_prompt_and_never_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, custom_params: Any, on_failure: str
) -> None:
    """Under on_scoring_failure="raise" an error in scoring ends the server, and a client's mistake is none."""
    from spec_stack.sglang import ranks
    from spec_stack.sglang.draft_pool import DraftScoringRunner
    from spec_stack.sglang.errors import num_failures
    from spec_stack.sglang.launch import Launch
    from spec_stack.sglang.manager import SparsePrefillManager
    from spec_stack.sglang.scoring import DraftScorer
    from spec_stack.sglang.server_args import ServerConfig

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    settings = f'{{"calibration": "none", "prefill": {{"on_scoring_failure": "{on_failure}"}}}}'
    monkeypatch.setenv("SPEC_STACK_SGLANG", settings)
    scheduler = SimpleNamespace(
        draft_worker=None,
        model_config=SimpleNamespace(hf_eos_token_id=None),
        server_args=SimpleNamespace(chat_template=None, prefill_decode_interval=None),
        tokenizer=None,
        tree_cache=SimpleNamespace(reset=lambda: None),
        prefill_decode_interval=1,
    )
    refusal = "nothing is pruned in this test"
    args = SimpleNamespace(
        **{"decode_attention_backend": "", "attention_backend": "", "disable_radix_cache": False},
        **{"enable_metrics": False, "enable_session_radix_cache": False},
    )
    target = SimpleNamespace(vocab_size=8, context_len=4096)
    launch = Launch("", args, target, None, ServerConfig.from_environment(), refusal)
    scorer = DraftScorer(launch, DraftScoringRunner(runner_of(2, 2, 8), 100))
    manager, request, before = SparsePrefillManager(scheduler, scorer), _request(custom_params), num_failures()
    scheduler.waiting_queue = [request]
    manager.on_request(request)
    manager.step()
    assert request.customized_info["spec_stack"][0]["outcome"] == "disabled"
    assert request.origin_input_ids == list(range(50))
    assert num_failures() == before
    assert "options are left aside" in caplog.text
