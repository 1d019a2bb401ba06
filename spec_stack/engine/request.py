"""One request, planned: everything that a call asked for, checked before any work."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_stack.clock import Clock
from spec_stack.config import (
    DEFAULT_MAX_TOKENS,
    MAX_LOOK_AHEAD,
    PrefillConfig,
    SamplingParams,
    SparsePrefill,
    SpecStackConfig,
    check_logprobs,
)
from spec_stack.controller.base import Policy
from spec_stack.controller.pool import PolicyChoice, PolicyPool
from spec_stack.controller.registry import CLOCK_POLICY_NAMES
from spec_stack.decode.loop import RequestLabels
from spec_stack.decode.registry import PROPOSERS
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.progress import OnProgress, Progress
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
from spec_stack.settings.checks import plain
from spec_stack.settings.registry import check_name
from spec_stack.types import DraftTokenization


@dataclass(frozen=True)
class CallOptions:
    """The options of a call beside its prompt and how tokens are drawn; None is the generator's own way.

    The meaning of each is told at `Answering.generate`.
    """

    keep_rate: float | None = None
    sparse_prefill: SparsePrefill | None = None
    policy: str | Policy | None = None
    gamma: int | None = None
    proposer: str | None = None
    request_id: str | None = None
    task: str = ""
    logits_processor: Any = None
    response_format: Any = None
    tool_choice: Any = None
    logprobs: int | None = None
    sampling: str | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        for name in ("keep_rate", "gamma", "logprobs"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        check_logprobs(self.logprobs)
        if not isinstance(self.proposer, str | None):
            raise ValueError(f"proposer must be a name or None, got {self.proposer!r}")
        for name in ("request_id", "task"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "request_id"):
                raise ValueError(f"{name} must be a string, got {value!r}")
        if not isinstance(self.sampling, str | None) or self.sampling not in (None, "model"):
            raise ValueError(f'sampling must be "model" (the checkpoint\'s own) or None, got {self.sampling!r}')
        if self.on_progress is not None and not callable(self.on_progress):
            raise ValueError(
                f"on_progress must be a callable over (num_done, num_total, phase), got {self.on_progress!r}"
            )


@dataclass(frozen=True)
class StopTokens:
    """Tokens that end a request.

    Parameters
    ----------
    end_ids : frozenset of int
        The model's own; empty where they are ignored.
    stop_ids : frozenset of int
        Those of the call.
    """

    end_ids: frozenset[int]
    stop_ids: frozenset[int]

    @property
    def all_ids(self) -> frozenset[int]:
        return self.end_ids | self.stop_ids


@dataclass(frozen=True)
class Request:
    """A call, planned.

    Parameters
    ----------
    prompt_ids : list of int
        The prompt, N tokens of the target.
    protected : list of (int, int)
        Half-open spans of it that are never pruned.
    params : SamplingParams
        How tokens are drawn, and when it ends.
    prefill : PrefillConfig
        The generator's, with this call's keep_rate and as much look-ahead as the models have positions for.
    scores : bool
        Whether the prompt, or what it adds to a session, is scored, to be pruned.
    reason : str
        Why, or why not.
    can_score : bool
        Whether the draft can score it at all.
    policy : PolicyChoice
        Which policy chooses gamma.
    proposer : str
        Who proposes, one of `decode.registry.PROPOSERS`.
    labels : RequestLabels
        What its records carry.
    tokenization : DraftTokenization or None
        The prompt in the tokens of a draft with another tokenizer, where that draft is of use.
    encoded : EncodedPrompt or None
        The prompt as it was encoded.
    num_cached : int
        Tokens at its beginning that a session has dealt with already.
    processors : list of callable
        What goes over every row of logits.
    grammar : Grammar or None
        What the answer has to keep to.
    stop_tokens : StopTokens
        Tokens that end it.
    stop_strings : list of str
        Texts that do.
    decode_note : str
        What there is to say of the draft's part in decoding.
    parser : AnswerParser or None
        Takes the answer to a chat apart.
    num_logprobs : int or None
        How many likely tokens are given beside each token's log-probability; None gives none of either.
    progress : Progress
        Hears of every chunk of the prefill.
    observer : Observer or None
        Hears how the prompt is selected.
    clock : Clock
        Began with the call, and stands still until the first step.
    """

    prompt_ids: list[int]
    protected: list[Span]
    params: SamplingParams
    prefill: PrefillConfig
    scores: bool
    reason: str
    policy: PolicyChoice
    labels: RequestLabels
    proposer: str = "model"
    can_score: bool = True
    tokenization: DraftTokenization | None = None
    encoded: EncodedPrompt | None = None
    num_cached: int = 0
    processors: list[Processor] = field(default_factory=list)
    grammar: Grammar | None = None
    stop_tokens: StopTokens = field(default_factory=lambda: StopTokens(frozenset(), frozenset()))
    stop_strings: list[str] = field(default_factory=list)
    decode_note: str = ""
    parser: AnswerParser | None = None
    num_logprobs: int | None = None
    progress: Progress = field(default_factory=Progress)
    observer: Observer | None = None
    clock: Clock = field(default_factory=Clock)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prompt that no earlier turn has dealt with."""
        return len(self.prompt_ids) - self.num_cached

    @property
    def question(self) -> Span | None:
        """Half-open span of the last user turn's tokens; None where nobody told."""
        return None if self.encoded is None else self.encoded.question

    @property
    def num_draft_tokens(self) -> int:
        """The prompt's length in the draft's own tokens."""
        return len(self.prompt_ids if self.tokenization is None else self.tokenization.token_ids)

    @property
    def is_shaped(self) -> bool:
        """Return whether anything goes over the logits that looks at the tokens before them."""
        return bool(self.processors) or self.grammar is not None

    @property
    def text(self) -> str:
        """Return what reasons call the part of the prompt that may be pruned."""
        return "new text" if self.num_cached else "prompt"

    @classmethod
    def plan(
        cls,
        pair: ModelPair,
        config: SpecStackConfig,
        pool: PolicyPool,
        source: PromptSource,
        params: SamplingParams,
        options: CallOptions,
        held_ids: Sequence[int] = (),
        known: EncodedPrompt | None = None,
    ) -> Request:
        """Check a call and settle what is done for it. Nothing goes through a model yet.

        held_ids: the tokens that a session has dealt with; known: its last prompt, with the answer. Raises ValueError
        for what the caller can change; the message says how.
        """
        clock = Clock()
        if options.sampling == "model":
            params = complete_sampling(pair.target.generation_config, params)
        processors = check_processors(options.logits_processor)
        stop_tokens, stop_strings = _what_stops(pair, params)
        is_seeded = params.seed is not None and params.temperature > 0
        policy = pool.choose(options.policy, options.gamma, is_seeded)
        # How far a look-up goes is told by the clock, as a clock policy's gamma is.
        by_default = "model" if is_seeded and options.policy is None else config.decode.proposer
        asked = by_default if options.proposer is None else options.proposer
        proposer = choose_proposer(asked, policy.name)
        encoded = encode_prompt(pair.tokenizer, pair.vocab_size, source, known)
        prompt_ids, protected = encoded.token_ids, encoded.protected
        # The last token is always new: what comes after it is asked for.
        num_cached = min(num_shared(held_ids, prompt_ids), len(prompt_ids) - 1)
        prefill = _prefill_of(config.prefill, options)
        tokenization, obstacle = pair.tokenize_for_draft(prompt_ids)
        num_draft_tokens = len(prompt_ids) if tokenization is None else len(tokenization.token_ids)
        scores, reason = decide_scoring(
            prefill,
            len(prompt_ids) - num_cached,
            clip_spans(protected, num_cached),
            num_draft_tokens,
            pair.scoring_limit,
            "new text" if num_cached else "prompt",
        )
        draft_limit = pair.max_positions[1]
        draft_room = max(0, draft_limit - num_draft_tokens)
        notes = [uncopied_note(processors)]
        if num_draft_tokens > draft_limit:
            notes.append(f"the prompt is longer than the draft's {draft_limit} positions, so it proposes nothing")
        can_propose = pair.vocabulary.can_propose and num_draft_tokens <= draft_limit
        if not can_propose:
            policy = pool.choose(gamma=0)
            proposer = "lookup" if proposer == "both" else proposer
        num_behind = MOST_REPEATED if prefill.asks_prompt else 0
        if num_draft_tokens + num_behind > draft_limit and needs_attention(prefill.scorer):
            too_long = f"the prompt has {num_draft_tokens} tokens, and the draft {draft_limit} positions"
            obstacle = obstacle or too_long
        if scores and obstacle:
            scores, reason = False, f"off: {obstacle}"
        if encoded.note:
            reason += f"; {encoded.note}"
        room = _positions_left(pair, len(prompt_ids), params.max_tokens or max(1, params.min_tokens))
        if params.max_tokens is None:
            params = replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))
        in_thought = pair.answer_format.begins_in_thought(encoded.text)
        wanted = _wanted_format(pair, source, options)
        grammar = None
        if wanted is not None:
            grammar = pair.grammars.compile(wanted, stop_tokens.all_ids, len(prompt_ids), in_thought)
        own = make_processors(params, len(prompt_ids), stop_tokens.all_ids, pair.target.device)
        # Where nothing can be proposed there is nothing to look ahead with either.
        most = min(room, draft_room, MAX_LOOK_AHEAD) if can_propose else 0
        clock.pause()
        return cls(
            prompt_ids=prompt_ids,
            protected=protected,
            params=params,
            prefill=prefill if prefill.asks_prompt else replace(prefill, look_ahead=min(prefill.look_ahead, most)),
            scores=scores,
            reason=reason,
            policy=policy,
            labels=RequestLabels(options.request_id or secrets.token_hex(4), pair.precision, options.task),
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
            num_logprobs=options.logprobs,
            progress=Progress(options.on_progress),
            clock=clock,
        )


def _prefill_of(config: PrefillConfig, options: CallOptions) -> PrefillConfig:
    """The configuration with what the call names of it."""
    named = {
        name: getattr(options, name) for name in ("sparse_prefill", "keep_rate") if getattr(options, name) is not None
    }
    return replace(config, **named) if named else config


def _wanted_format(pair: ModelPair, source: PromptSource, options: CallOptions) -> Any:
    """Return the answer's format, None where it may be anything. Raises ValueError where two things are asked of it."""
    forced = pair.answer_format.forced_call(options.tool_choice, source.tools)
    if forced is not None and options.response_format is not None:
        raise ValueError("give response_format or a forced tool_choice, not both")
    return forced or options.response_format


def choose_proposer(asked: str, policy: str) -> str:
    """Who proposes for a request.

    A look-up is taken or left by measured time, so it joins by itself where the policy goes by the clock too. Raises
    ValueError for an unknown name.
    """
    check_name("proposer", asked, ["auto", *PROPOSERS])
    if asked == "auto":
        return "both" if policy in CLOCK_POLICY_NAMES else "model"
    return asked


def _what_stops(pair: ModelPair, params: SamplingParams) -> tuple[StopTokens, list[str]]:
    """The tokens and the texts that end a request: a stop string that is a special token counts as that token.

    Raises ValueError for stop strings without a tokenizer, and for ids that the target does not know.
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
    """Positions that the target has after the prompt. The draft's are no bound.

    Raises ValueError where the request would run past them.
    """
    limit = pair.max_positions[0]
    if num_prompt_tokens + max_tokens > limit:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens + max_tokens={max_tokens} exceed the target's {limit} positions; "
            "shorten the prompt or lower max_tokens"
        )
    return limit - num_prompt_tokens
