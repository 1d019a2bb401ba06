"""Runs one synthetic prompt through every step of a pruned request at launch.

A model, cache or device that scoring cannot work with fails here, not at the first long prompt, hours later.
"""

from __future__ import annotations

from array import array
from time import perf_counter
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import needs_attention
from spec_stack.sglang.decide import Prompt
from spec_stack.sglang.prefix_reuse import CachedPrefix, select_kept
from spec_stack.sglang.request_state import dense_reason
from spec_stack.sglang.required_api import RunningRequest, Scheduler
from spec_stack.sglang.scoring import Scorer
from spec_stack.sglang.server_args import NAME

_NUM_CHUNKS = 6
_TEXT = "The quick brown fox jumps over the lazy dog.\n"
_TENANT = "spec_stack's own test"


def run(scheduler: Scheduler, scorer: Scorer, config: PrefillConfig) -> float:
    """Score and prune a prompt of a few chunks with this server's own models and caches; its seconds.

    Raises RuntimeError, saying what is wrong with the installed SGLang. The draft's prefill is forgotten again.
    """
    begun = perf_counter()
    try:
        _run(scheduler, scorer, config)
    except Exception as error:
        raise RuntimeError(
            f"{NAME} cannot serve: a synthetic prompt failed at launch ({type(error).__name__}: {error}). "
            "The installed SGLang is not one that the plugin was tested with, or is changed by another plugin"
        ) from error
    finally:
        scorer.forget()
    return perf_counter() - begun


def _run(scheduler: Any, scorer: Scorer, config: PrefillConfig) -> None:
    token_ids = _token_ids(scheduler, config)
    request = Req("self-test", "", array("q", token_ids), SamplingParams(max_new_tokens=1))
    _check_fields(scheduler, Scheduler)
    _check_fields(request, RunningRequest)
    dense_reason(request)
    prompt = Prompt(tuple(token_ids), _TENANT, None, config, "recall", end_ids=frozenset())
    scorer.num_cached(prompt)
    importance = _importance(scorer, prompt)
    select_kept(token_ids, CachedPrefix(), importance, True, None, config, ())


def _token_ids(scheduler: Any, config: PrefillConfig) -> list[int]:
    """A text's, which a scoring model with another tokenizer reads too; without a tokenizer any."""
    room = min(int(scheduler.model_config.context_len) // 2, _NUM_CHUNKS * config.chunk_size)
    if scheduler.tokenizer is not None:
        return list(scheduler.tokenizer(_TEXT * room, add_special_tokens=False).input_ids)[:room]
    return [at * 7 % min(int(scheduler.model_config.vocab_size), 1000) for at in range(room)]


def _importance(scorer: Scorer, prompt: Prompt) -> Any:
    """By all parts of a scoring, as in the scheduler's rounds; None without a draft."""
    if not needs_attention(prompt.config.scorer):
        return None
    work = scorer.score(prompt)
    while True:
        with scorer.working():
            try:
                next(work)
            except StopIteration as end:
                return end.value.importance


def _check_fields(owner: object, protocol: type) -> None:
    lacking = [name for name in protocol.__annotations__ if not hasattr(owner, name)]
    if lacking:
        raise AttributeError(f"SGLang's {type(owner).__name__} has no {', '.join(lacking)}")
