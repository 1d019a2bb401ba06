"""Scores and prunes one synthetic prompt at launch.

A model, cache or device that scoring cannot work with fails here, not at the first long prompt, hours later.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import needs_attention
from spec_stack.sglang.decide import CachedPrefix, KnownTexts, NeedsScore, Prompt, plan_scored
from spec_stack.sglang.scoring import Scorer
from spec_stack.sglang.server_args import NAME

_NUM_CHUNKS = 6
_TEXT = "The quick brown fox jumps over the lazy dog.\n"
_TENANT = "spec_stack's own test"


def run(scheduler: Any, known: KnownTexts, scorer: Scorer, config: PrefillConfig) -> float:
    """Prune a prompt of a few chunks by this server's own models and caches; the seconds that it took.

    Raises RuntimeError, saying what is wrong with the installed SGLang. The draft's prefill is forgotten again.
    """
    begun = perf_counter()
    try:
        prompt = Prompt(_token_ids(scheduler, config), _TENANT, None, config, "recall")
        known.num_cached(prompt)
        importance = _importance(scheduler, scorer, prompt) if needs_attention(config.scorer) else None
        plan_scored(NeedsScore(prompt, CachedPrefix(), True, False, ""), importance, len(prompt.token_ids), known)
    except Exception as error:
        raise RuntimeError(
            f"{NAME} cannot serve: a synthetic prompt failed at launch ({type(error).__name__}: {error}). "
            "The installed SGLang is not one that the plugin was tested with, or is changed by another plugin"
        ) from error
    finally:
        scorer.forget()
    return perf_counter() - begun


def _token_ids(scheduler: Any, config: PrefillConfig) -> tuple[int, ...]:
    """A text's, which a scoring model with another tokenizer reads too; without a tokenizer any."""
    room = min(int(scheduler.model_config.context_len) // 2, _NUM_CHUNKS * config.chunk_size)
    if scheduler.tokenizer is not None:
        return tuple(scheduler.tokenizer(_TEXT * room, add_special_tokens=False).input_ids[:room])
    return tuple(at * 7 % min(int(scheduler.model_config.vocab_size), 1000) for at in range(room))


def _importance(scheduler: Any, scorer: Scorer, prompt: Prompt) -> Any:
    """By all parts of a scoring, as in the scheduler's rounds."""
    work = scorer.score(prompt, lambda chunk: chunk)
    while True:
        with scorer.working(scheduler):
            try:
                next(work)
            except StopIteration as end:
                return end.value.importance
