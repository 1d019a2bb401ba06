"""A planned request: all options of a call, checked before any work."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_stack.clock import Clock
from spec_stack.config import (
    DEFAULT_MAX_TOKENS,
    MAX_LOOK_AHEAD,
    DecodeConfig,
    PrefillConfig,
    SamplingParams,
    SpecStackConfig,
)
from spec_stack.controller.pool import PolicyChoice, PolicyPool
from spec_stack.controller.registry import CLOCK_POLICY_NAMES
from spec_stack.decode.loop import RequestLabels
from spec_stack.decode.registry import PROPOSERS
from spec_stack.engine.options import Call, checked, prompt_source, sampling_params
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.progress import Progress
from spec_stack.hf.answer_format import tool_names
from spec_stack.hf.answer_parser import AnswerParser
from spec_stack.hf.model_sampling import complete_sampling
from spec_stack.hf.processors import Processor, check_processors, uncopied_note
from spec_stack.hf.prompt import EncodedPrompt, PromptSource, Span, encode_prompt, num_shared, special_tokens
from spec_stack.hf.sampling import make_processors
from spec_stack.hf.structured import Grammar
from spec_stack.prefill.decide import decide_scoring, sees_whole
from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.prefill.recall import clip_spans
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.rule import Observer
from spec_stack.settings.registry import check_name
from spec_stack.types import DraftTokenization


@dataclass(frozen=True)
class StopTokens:
    """Tokens that end a request: the model's own, empty where they are ignored, and those of the call."""

    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    @property
    def all_ids(self) -> frozenset[int]:
        return self.end_ids | self.stop_ids


@dataclass(frozen=True)
class Request:
    """A planned call: prompt, pruning, drafting, sampling and stopping."""

    # N tokens of the target, and the half-open spans of it that are never pruned.
    prompt_ids: list[int]
    protected: list[Span]
    params: SamplingParams
    # The generator's, with this call's keep_rate and as much look-ahead as the models have positions for.
    prefill: PrefillConfig
    # Whether the prompt, or its part that is new to a session, is scored to be pruned, and why.
    scores: bool
    reason: str
    policy: PolicyChoice
    labels: RequestLabels
    # One of `decode.registry.PROPOSERS`.
    proposer: str = "model"
    # Whether the draft can score the prompt at all.
    can_score: bool = True
    # The prompt in the tokens of a draft with another tokenizer, where that draft can be used.
    tokenization: DraftTokenization | None = None
    encoded: EncodedPrompt | None = None
    # Tokens of the prompt's prefix that a session has prefilled or dropped already.
    num_cached: int = 0
    processors: list[Processor] = field(default_factory=list)
    grammar: Grammar | None = None
    stop_tokens: StopTokens = field(default_factory=StopTokens)
    stop_strings: list[str] = field(default_factory=list)
    # Notes on the draft's part in decoding.
    decode_note: str = ""
    parser: AnswerParser | None = None
    # Likeliest tokens given beside each token's log-probability; None gives neither.
    num_logprobs: int | None = None
    progress: Progress = field(default_factory=Progress)
    observer: Observer | None = None
    # Started with the call, and paused until the first step.
    clock: Clock = field(default_factory=Clock)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prompt that no earlier turn has processed."""
        return len(self.prompt_ids) - self.num_cached

    @property
    def question(self) -> Span | None:
        """Half-open span of the last user turn's tokens; None where unknown."""
        return None if self.encoded is None else self.encoded.question

    @property
    def num_draft_tokens(self) -> int:
        """The prompt's length in the draft's own tokens."""
        return _num_draft_tokens(self.prompt_ids, self.tokenization)

    @property
    def is_shaped(self) -> bool:
        """Return whether a logits processor depends on earlier tokens."""
        return bool(self.processors) or self.grammar is not None

    @property
    def text(self) -> str:
        """The name, in reasons, of the part of the prompt that may be pruned."""
        return "new text" if self.num_cached else "prompt"


def plan_request(
    pair: ModelPair,
    config: SpecStackConfig,
    pool: PolicyPool,
    call: Call,
    held_ids: Sequence[int] = (),
    known: EncodedPrompt | None = None,
) -> Request:
    """Check and plan a call; no model runs yet.

    held_ids: a session's processed tokens; known: its last prompt, with the answer. Raises ValueError for bad options;
    the message names the fix.
    """
    clock = Clock()
    call, source, params = checked(call), prompt_source(call), sampling_params(call)
    if call.get("sampling") == "model":
        params = complete_sampling(pair.target.generation_config, params)
    processors = check_processors(call.get("logits_processor"))
    stop_tokens, stop_strings = _what_stops(pair, params)
    policy, proposer = _who_drafts(pool, config.decode, call, params)
    encoded = encode_prompt(pair.tokenizer, pair.vocab_size, source, known)
    prompt_ids = encoded.token_ids
    # The last token is always new: its logits are needed.
    num_cached = min(num_shared(held_ids, prompt_ids), len(prompt_ids) - 1)
    prefill = _prefill_of(config.prefill, call)

    tokenization, problem = pair.tokenize_for_draft(prompt_ids)
    num_draft_tokens, draft_limit = _num_draft_tokens(prompt_ids, tokenization), pair.max_positions[1]
    obstacle = problem or _no_room_to_score(prefill, num_draft_tokens, draft_limit)
    scores, reason = _decide(pair, prefill, encoded, num_cached, num_draft_tokens, obstacle)
    notes = [uncopied_note(processors)]
    if num_draft_tokens > draft_limit:
        notes.append(f"the prompt is longer than the draft's {draft_limit} positions, so it proposes nothing")
    can_propose = pair.vocabulary.can_propose and num_draft_tokens <= draft_limit
    if not can_propose:
        policy, proposer = pool.choose(gamma=0), "lookup" if proposer == "both" else proposer

    room = _positions_left(pair, len(prompt_ids), params.max_tokens or max(1, params.min_tokens))
    if params.max_tokens is None:
        params = replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))
    if not prefill.asks_prompt:
        # Without any proposal there is no look-ahead either.
        most = min(room, draft_limit - num_draft_tokens, MAX_LOOK_AHEAD) if can_propose else 0
        prefill = replace(prefill, look_ahead=min(prefill.look_ahead, most))
    in_thought = pair.answer_format.begins_in_thought(encoded.text)
    wanted = _wanted_format(pair, source, call)
    grammar = None
    if wanted is not None:
        behind = pair.answer_format.format_start(encoded.text)
        grammar = pair.grammars.compile(wanted, stop_tokens.all_ids, len(prompt_ids), behind)
    own = make_processors(params, len(prompt_ids), stop_tokens.all_ids, pair.target.device)
    clock.pause()
    return Request(
        prompt_ids=prompt_ids,
        protected=encoded.protected,
        params=params,
        prefill=prefill,
        scores=scores,
        reason=reason,
        policy=policy,
        labels=RequestLabels(call.get("request_id") or secrets.token_hex(4), pair.precision, call.get("task", "")),
        proposer=proposer,
        can_score=not obstacle and sees_whole(prefill, num_draft_tokens, pair.scoring_limit),
        tokenization=tokenization,
        encoded=encoded,
        num_cached=num_cached,
        processors=[*own, *processors],
        grammar=grammar,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        decode_note="; ".join(filter(None, notes)),
        parser=AnswerParser(pair.answer_format, tool_names(source.tools), in_thought) if encoded.text else None,
        num_logprobs=call.get("logprobs"),
        progress=Progress(call.get("on_progress")),
        clock=clock,
    )


def _num_draft_tokens(prompt_ids: Sequence[int], tokenization: DraftTokenization | None) -> int:
    return len(prompt_ids if tokenization is None else tokenization.token_ids)


def _no_room_to_score(prefill: PrefillConfig, num_draft_tokens: int, draft_limit: int) -> str:
    """Why the draft has too few positions to score a prompt; empty where it has enough."""
    num_behind = MOST_REPEATED if prefill.asks_prompt else 0
    if num_draft_tokens + num_behind <= draft_limit or not needs_attention(prefill.scorer):
        return ""
    return f"the prompt has {num_draft_tokens} tokens, and the draft {draft_limit} positions"


def _decide(
    pair: ModelPair,
    prefill: PrefillConfig,
    encoded: EncodedPrompt,
    num_cached: int,
    num_draft_tokens: int,
    obstacle: str,
) -> tuple[bool, str]:
    """Whether the prompt is scored to be pruned, and why."""
    scores, reason = decide_scoring(
        prefill,
        len(encoded.token_ids) - num_cached,
        clip_spans(encoded.protected, num_cached),
        num_draft_tokens,
        pair.scoring_limit,
        "new text" if num_cached else "prompt",
    )
    if scores and obstacle:
        scores, reason = False, f"off: {obstacle}"
    return scores, f"{reason}; {encoded.note}" if encoded.note else reason


def _who_drafts(pool: PolicyPool, config: DecodeConfig, call: Call, params: SamplingParams) -> tuple[PolicyChoice, str]:
    """The policy and the proposer of a call."""
    is_seeded = params.seed is not None and params.temperature > 0
    policy = pool.choose(call.get("policy"), call.get("gamma"), is_seeded)
    # The clock decides how far a look-up goes, as it decides a clock policy's gamma.
    by_default = "model" if is_seeded and call.get("policy") is None else config.proposer
    proposer = call.get("proposer")
    return policy, choose_proposer(by_default if proposer is None else proposer, policy.name)


def _prefill_of(config: PrefillConfig, call: Call) -> PrefillConfig:
    """The configuration with the call's overrides."""
    named = {name: call.get(name) for name in ("sparse_prefill", "keep_rate") if call.get(name) is not None}
    return replace(config, **named) if named else config  # type: ignore[arg-type]


def _wanted_format(pair: ModelPair, source: PromptSource, call: Call) -> Any:
    """The answer's format; None for any. Raises ValueError where two formats are requested."""
    forced = pair.answer_format.forced_call(call.get("tool_choice"), source.tools)
    if forced is not None and call.get("response_format") is not None:
        raise ValueError("give response_format or a forced tool_choice, not both")
    return forced or call.get("response_format")


def choose_proposer(asked: str, policy: str) -> str:
    """The proposer of a request. Raises ValueError for an unknown name.

    Look-ups are used by measured time, so they join by default where the policy uses the clock too.
    """
    check_name("proposer", asked, ["auto", *PROPOSERS])
    if asked == "auto":
        return "both" if policy in CLOCK_POLICY_NAMES else "model"
    return asked


def _what_stops(pair: ModelPair, params: SamplingParams) -> tuple[StopTokens, list[str]]:
    """The tokens and texts that end a request; a stop string that is a special token counts as that token.

    Raises ValueError for stop strings without a tokenizer, and for ids outside the target's vocabulary.
    """
    if params.stop_strings and pair.tokenizer is None:
        raise ValueError("stop strings need a tokenizer; this generator was made without one")
    if any(token_id >= pair.vocab_size for token_id in params.token_ids_named):
        names = "stop_token_ids, bad_words_ids and logit_bias"
        raise ValueError(f"the token ids of {names} must lie in 0…{pair.vocab_size - 1}, the target's vocabulary")
    special = special_tokens(pair.tokenizer)
    stop_ids = {*map(int, params.stop_token_ids), *(special[text] for text in params.stop_strings if text in special)}
    end_ids = frozenset() if params.ignore_eos else pair.end_ids
    texts = [text for text in params.stop_strings if text not in special]
    return StopTokens(end_ids, frozenset(stop_ids)), texts


def _positions_left(pair: ModelPair, num_prompt_tokens: int, max_tokens: int) -> int:
    """Positions that the target has after the prompt; raises ValueError where the request exceeds them."""
    limit = pair.max_positions[0]
    if num_prompt_tokens + max_tokens > limit:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens + max_tokens={max_tokens} exceed the target's {limit} positions; "
            "shorten the prompt or lower max_tokens"
        )
    return limit - num_prompt_tokens
