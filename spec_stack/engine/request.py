"""The options of a call, and the request planned from them: all are checked before any work.
`GenerationMixin.generate` documents the options."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypedDict, cast

import torch

from spec_stack.config import (
    DEFAULT_MAX_TOKENS,
    MAX_LOOK_AHEAD,
    DecodeConfig,
    PrefillConfig,
    SamplingParams,
    SparsePrefill,
    SpecStackConfig,
    check_logprobs,
)
from spec_stack.controller.base import Policy
from spec_stack.controller.pool import ObjectPool, PolicyPool
from spec_stack.controller.registry import CLOCK_POLICY_NAMES
from spec_stack.decode.clock import Clock
from spec_stack.decode.proposer import DecodeRequest
from spec_stack.decode.sampler import LogitsProcessors, Sampler
from spec_stack.decode.stopping import StopChecker
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.progress import OnProgress, Progress
from spec_stack.hf.answer_parser import AnswerParser
from spec_stack.hf.processors import (
    ProcessedRows,
    Processor,
    check_processors,
    complete_sampling,
    make_processors,
    make_warp,
    skipped_note,
)
from spec_stack.hf.prompt import (
    EncodedPrompt,
    Message,
    PromptSource,
    encode_prompt,
    open_text_stream,
    special_tokens,
    unpadded,
)
from spec_stack.hf.structured import Grammar
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.turn import scoring_obstacle
from spec_stack.settings.checks import plain, require
from spec_stack.types import DraftTokenization

_OF_PROMPT = {entry.name for entry in fields(PromptSource)}
_OF_PREFILL = ("keep_rate", "sparse_prefill", "max_dropped_attention")
_OF_SAMPLING = {entry.name for entry in fields(SamplingParams)}


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate` and `stream`."""

    # The prompt, where it is no text.
    messages: Sequence[Message] | None
    input_ids: Sequence[int] | torch.Tensor | None
    attention_mask: Sequence[int] | torch.Tensor | None
    protected: Sequence[Span]
    question: str | None
    tools: Sequence[Any] | None
    tool_choice: str | Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    # Sampling and stopping: as one object, or one by one.
    params: SamplingParams | None
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    bad_words_ids: Sequence[Sequence[int]]
    logit_bias: Mapping[int, float] | None
    min_tokens: int
    stop_token_ids: Sequence[int]
    max_time: float | None
    sampling: str | None
    logits_processor: Processor | Sequence[Processor] | None
    response_format: Mapping[str, Any] | type | None
    logprobs: int | None
    # Pruning and drafting.
    keep_rate: float | None
    sparse_prefill: SparsePrefill | None
    max_dropped_attention: float | None
    policy: str | Policy | None
    gamma: int | None
    proposer: str | None
    # Labels and the progress callback.
    request_id: str | None
    task: str
    on_progress: OnProgress | None
    # What kept each part of the prompt.
    explain: bool


class Call(GenerateOptions, total=False):
    """A call's options with its prompt: a text, or an encoded one."""

    prompt: str | None
    encoded: EncodedPrompt | None


@dataclass(frozen=True, kw_only=True)
class Request(DecodeRequest):
    """A planned call: prompt, pruning, drafting, sampling and stopping. Its clock is started with the call, and paused
    until the first step."""

    encoded: EncodedPrompt
    # Reads the prompt, where it may be scored.
    read: Callable[[], PromptText]
    # The generator's, with this call's keep_rate and as much look-ahead as the models have positions for.
    prefill: PrefillConfig
    # Why the draft cannot score the prompt; empty where it can.
    obstacle: str
    # The prompt in the tokens of a draft with another tokenizer, where that draft can be used.
    tokenization: DraftTokenization | None
    params: SamplingParams
    policy: ObjectPool[Policy]
    # Notes on the draft's part in decoding.
    decode_note: str
    parser: AnswerParser | None
    progress: Progress
    # The texts of the prompt's tokens, where the call is to be explained.
    explained: Sequence[str] | None = None


def plan_request(
    pair: ModelPair,
    config: SpecStackConfig,
    pool: PolicyPool,
    call: Call,
    known: EncodedPrompt | None = None,
) -> Request:
    """Check and plan a call; no model runs yet, and what is pruned is decided at the first step.

    known: a session's last prompt, with the answer. Raises ValueError for bad options; the message names the fix.
    """
    clock = Clock()
    _check(call)
    source, params = _prompt_source(call), _sampling_params(call)
    if call.get("sampling") == "model":
        params = complete_sampling(pair.target.generation_config, params)
    processors = check_processors(call.get("logits_processor")) if call.get("logits_processor") is not None else []
    num_logprobs = None if call.get("logprobs") is None else check_logprobs(call["logprobs"])
    end_ids, stop_ids, stop_strings = _what_stops(pair, params)
    policy, proposer = _who_drafts(pool, config.decode, call, params)
    encoded = encode_prompt(pair.tokenizer, pair.vocab_size, source, known)
    prompt_ids = encoded.token_ids
    given: dict[str, Any] = {name: call.get(name) for name in _OF_PREFILL if call.get(name) is not None}
    prefill = replace(config.prefill, **given) if given else config.prefill
    drafting = _drafting(pair, prefill, prompt_ids)
    question = call.get("question")
    prompt_text = None if question is None else pair.read(encoded, question)
    pieces = pair.pieces(prompt_ids) if call.get("explain") else None
    if call.get("explain") and pieces is None:
        raise ValueError("explain=True needs a tokenizer; this generator was made without one")
    notes = [pair.vocabulary.decode_reason, skipped_note(processors) if processors else "", *drafting.notes]
    if not drafting.can_propose:
        policy, proposer = pool.choose(gamma=0), "ngram" if proposer == "both" else proposer
    params, room = _within_positions(pair, len(prompt_ids), params)
    if not prefill.queries_from_prompt:
        # Without any proposal there is no look-ahead either.
        most = min(room, drafting.room, MAX_LOOK_AHEAD) if drafting.can_propose else 0
        prefill = replace(prefill, look_ahead=min(prefill.look_ahead, most))
    is_free = call.get("response_format") is None and call.get("tool_choice") is None
    grammar = None if is_free else _grammar(pair, source, call, end_ids | stop_ids, encoded)
    own = make_processors(params, len(prompt_ids), end_ids | stop_ids, pair.target.device)
    shaper = ProcessedRows([*own, *processors], grammar) if own or processors or grammar is not None else None
    answer = open_text_stream(pair.tokenizer, prompt_ids, pair.answer_format.shown if encoded.text else ())
    request = Request(
        prompt_ids=prompt_ids,
        encoded=encoded,
        read=partial(pair.read, encoded) if prompt_text is None else lambda: prompt_text,
        prefill=prefill,
        obstacle=drafting.obstacle,
        tokenization=drafting.tokenization,
        params=params,
        sampler=_sampler(params, shaper, pair.target.device),
        stopper=StopChecker(
            cast(int, params.max_tokens),
            end_ids,
            stop_strings,
            answer,
            stop_ids,
            lambda: params.max_time is not None and clock.elapsed_s >= params.max_time,
        ),
        end_ids=end_ids | stop_ids,
        policy=policy,
        proposer=proposer,
        decode_note="; ".join(filter(None, notes)),
        precision=pair.precision,
        request_id=call.get("request_id") or secrets.token_hex(4),
        task=call.get("task", ""),
        parser=pair.answer_format.parser(source.tools, encoded.text) if encoded.text else None,
        num_logprobs=num_logprobs,
        progress=Progress(call.get("on_progress")),
        clock=clock,
        explained=pieces,
    )
    clock.pause()
    return request


@dataclass(frozen=True)
class _Drafting:
    """What the draft can do with a prompt. obstacle: why it cannot score it, empty where it can; room: positions that
    it has behind it; notes: why it proposes nothing."""

    tokenization: DraftTokenization | None
    obstacle: str
    room: int
    notes: list[str]

    @property
    def can_propose(self) -> bool:
        return not self.notes


def _drafting(pair: ModelPair, prefill: PrefillConfig, prompt_ids: Sequence[int]) -> _Drafting:
    tokenization, unread = pair.tokenize_for_draft(prompt_ids)
    num_tokens, limit = len(prompt_ids if tokenization is None else tokenization.token_ids), pair.max_positions[1]
    obstacle = scoring_obstacle(prefill, num_tokens, limit, pair.scoring_limit, pair.tokenizer is not None)
    notes = [f"{unread}, so it proposes nothing"] if unread else []
    if num_tokens > limit:
        notes.append(f"the prompt is longer than the draft's {limit} positions, so it proposes nothing")
    return _Drafting(tokenization, unread or obstacle, limit - num_tokens, notes)


def _check(call: Call) -> None:
    """Raise ValueError for a bad value of an option without a check elsewhere."""
    sampling, request_id, task = call.get("sampling"), call.get("request_id"), call.get("task", "")
    question, explain, on_progress = call.get("question"), call.get("explain", False), call.get("on_progress")
    is_known = sampling is None or (isinstance(sampling, str) and sampling == "model")
    is_callable = on_progress is None or callable(on_progress)
    require(is_known, f'sampling must be "model" (the checkpoint\'s own) or None, got {sampling!r}')
    require(isinstance(request_id, str | None), f"request_id must be a string, got {request_id!r}")
    require(isinstance(task, str), f"task must be a string, got {task!r}")
    require(isinstance(question, str | None), f"question must be a text, got {question!r}")
    require(isinstance(explain, bool), f"explain must be True or False, got {explain!r}")
    require(is_callable, f"on_progress must be a callable over (num_done, num_total, phase), got {on_progress!r}")


def _prompt_source(call: Call) -> PromptSource:
    """The prompt of a call, without padding."""
    given: dict[str, Any] = {name: value for name, value in call.items() if name in _OF_PROMPT and value is not None}
    if (mask := call.get("attention_mask")) is not None:
        given["input_ids"] = unpadded(call.get("input_ids"), mask)
    tool_choice = call.get("tool_choice")
    if isinstance(tool_choice, str) and tool_choice == "none":
        given.pop("tools", None)
    return PromptSource(**given)


def _sampling_params(call: Call) -> SamplingParams:
    """The sampling options of a call. Raises ValueError where both the object and single options are given."""
    given: dict[str, Any] = {
        name: value for name, value in call.items() if name in _OF_SAMPLING and (name != "stop" or value is not None)
    }
    single = SamplingParams(**given)
    params = call.get("params")
    if params is None:
        return single
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
    if single != SamplingParams():
        raise ValueError("give params or single sampling options (max_tokens, temperature, …), not both")
    return params


def _who_drafts(
    pool: PolicyPool, config: DecodeConfig, call: Call, params: SamplingParams
) -> tuple[ObjectPool[Policy], str]:
    """The policy and the proposer of a call."""
    is_seeded = params.seed is not None and params.temperature > 0
    gamma: Any = plain(call.get("gamma"))
    policy = pool.choose(call.get("policy"), gamma, is_seeded)
    # The clock decides how far a look-up goes, as it decides a clock policy's gamma.
    by_default = "model" if is_seeded and call.get("policy") is None else config.proposer
    given: Any = call.get("proposer")
    proposer = by_default if given is None else DecodeConfig(proposer=given).proposer
    if proposer == "auto":
        proposer = "both" if policy.name in CLOCK_POLICY_NAMES else "model"
    return policy, proposer


def _grammar(
    pair: ModelPair, source: PromptSource, call: Call, end_ids: frozenset[int], encoded: EncodedPrompt
) -> Grammar | None:
    """The grammar of the answer's format. Raises ValueError where two formats are requested."""
    wanted = pair.answer_format.wanted(call.get("response_format"), call.get("tool_choice"), source.tools)
    if wanted is None:
        return None
    behind = pair.answer_format.format_start(encoded.text)
    return pair.grammars.compile(wanted, end_ids, len(encoded.token_ids), behind)


def _sampler(params: SamplingParams, shaper: LogitsProcessors | None, device: torch.device) -> Sampler:
    """The sampler of a request's steps, for both models."""
    if not params.temperature:
        return Sampler(shaper=shaper)
    warp = make_warp(params.temperature, params.top_k, params.top_p, params.min_p)
    return Sampler(warp, torch.Generator(device).manual_seed(cast(int, params.seed)), shaper)


def _what_stops(pair: ModelPair, params: SamplingParams) -> tuple[frozenset[int], frozenset[int], list[str]]:
    """The end-of-sequence tokens, the stop tokens (special tokens among the stop strings too) and the stop strings."""
    if params.stop_strings and pair.tokenizer is None:
        raise ValueError("stop strings need a tokenizer; this generator was made without one")
    if max(params.token_ids_named, default=0) >= pair.vocab_size:
        names = "stop_token_ids, bad_words_ids and logit_bias"
        raise ValueError(f"the token ids of {names} must lie in 0…{pair.vocab_size - 1}, the target's vocabulary")
    end_ids = frozenset() if params.ignore_eos else pair.end_ids
    stop_ids, texts = set(map(int, params.stop_token_ids)), []
    special = special_tokens(pair.tokenizer) if params.stop_strings else {}
    for text in params.stop_strings:
        if text in special:
            stop_ids.add(special[text])
        else:
            texts.append(text)
    return end_ids, frozenset(stop_ids), texts


def _within_positions(pair: ModelPair, num_prompt_tokens: int, params: SamplingParams) -> tuple[SamplingParams, int]:
    """The options with max_tokens and a seed, and the positions that the target has after the prompt."""
    limit = pair.max_positions[0]
    max_tokens = params.max_tokens or max(1, params.min_tokens)
    room = limit - num_prompt_tokens
    if max_tokens > room:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens + max_tokens={max_tokens} exceed the target's {limit} positions; "
            "shorten the prompt or lower max_tokens"
        )
    if params.max_tokens is None:
        params = replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))
    if params.temperature and params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    return params, room
