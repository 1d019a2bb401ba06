"""Configuration: the only place of defaults and their meanings, for command line, server and docs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from spec_stack.settings.checks import (
    MOST_SHAPING,
    check_fields,
    plain,
    require,
    require_bias,
    require_heads,
    require_ids,
    require_int,
    require_keep_rate,
    require_rates,
    require_window,
)
from spec_stack.settings.options import documented, option, remembers_given
from spec_stack.settings.registry import check_name

KeepCurve = Sequence[tuple[int, float]]
"""(num_tokens, keep_rate) pairs, linear in the logarithm of the length between them and level beyond."""
OnScoringError = Literal["dense", "raise"]
Unit = Literal["lines", "chunks"]
ScoringQueries = Literal["look_ahead", "prompt"]
HeadReduction = Literal["max", "mean"]
SparsePrefill = Literal["auto", "on", "off", "draft_only"]
Positions = Literal["original", "contiguous"]
DraftStep = Literal["auto", "eager", "static", "compiled"]
ProposerName = Literal["auto", "model", "ngram", "both"]
# Valid names: the keys of the registries, which append to these lists on import. No component is imported.
KNOWN_POLICIES: list[str] = []
KNOWN_SCORERS: list[str] = []
MAX_GAMMA = 16
WHOLE_PROMPT: Mapping[str, Any] = {"sparse_prefill": "off"}
"""What a client's keep rate of 1 stands for: with what earlier turns dropped, since clients know of no session."""
KEEP_RATE_HEADER = "x-spec-stack-keep-rate"
"""Of HTTP requests: a keep rate, which prunes prompts of any length; 1 is the whole prompt."""
MAX_LOOKED_UP = 64
"""Most tokens of one look-up: they cost a verification, but no draft."""
MAX_LOOK_AHEAD = 64
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "nf4")
OTHER_PRECISION = "other"
"""A precision that has no name here, as records say it: a checkpoint stored quantized in another way."""
# Below this temperature divided logits overflow; a lower one counts as this one.
MIN_TEMPERATURE = 1e-3
DEFAULT_MAX_TOKENS = 256
"""The number that max_tokens=None asks for where the models have positions for it."""
MAX_LOGPROBS = 100
MAX_SAMPLES = 128


def header_options(given: str | None) -> dict[str, Any]:
    """The options that a request's KEEP_RATE_HEADER stands for. Raises ValueError."""
    if given is None:
        return {}
    try:
        keep_rate = float(given)
    except ValueError:
        keep_rate = math.nan
    require(0 < keep_rate <= 1, f"{KEEP_RATE_HEADER} must be over 0 and at most 1; 1 is the whole prompt")
    return {**WHOLE_PROMPT} if keep_rate == 1 else {"sparse_prefill": "on", "keep_rate": keep_rate}


def how_to_install(extra: str) -> str:
    """Install command of an extra. The package is in no registry, where anyone could claim its name."""
    return f"pip install '.[{extra}]' in a clone of the package"


def check_logprobs(logprobs: object) -> int:
    """A number of top tokens. Raises ValueError for an invalid one."""
    number: Any = plain(logprobs)
    require_int("logprobs", number, 0, MAX_LOGPROBS, "; 0 gives the generated tokens' alone")
    return int(number)


def check_samples(n: object, temperature: float) -> None:
    """Raise ValueError for an invalid number of samples, and for several greedy samples."""
    require_int("n", n, 1, MAX_SAMPLES)
    require(n == 1 or temperature > 0, f"n={n} greedy answers would all be the same; give a temperature over 0")


@remembers_given
@documented
@dataclass(frozen=True)
class PrefillConfig:
    """How the prompt is scored, and which part of it the target prefills.

    The default is SpecPrefill's importance (section 3.2) over whole lines, by the queries at likely places of the
    question, averaged over the heads after the first layers. The names in the authors' code are
    `look_ahead_cnt`, `pool_kernel_size` and, for keep_rate, `keep_kwargs.percentage`. `raw`, `full` and
    `full_look_ahead` are the paper's three variants, exactly.
    """

    # Names of the passed fields. Not a setting; must be the first field (`remembers_given`).
    given: tuple[str, ...] = field(default=(), kw_only=True, repr=False, compare=False)
    # Description of the applied calibration. Not a setting either.
    calibrated_by: str = field(default="", kw_only=True, repr=False, compare=False)
    keep_rate: float | KeepCurve = option(
        0.2,
        "share of the prompt that the target prefills, over 0 to 1; 1.0 is dense prefill. Or a curve: (num_tokens, "
        "keep_rate) pairs, linear in the logarithm of the length between them and level beyond",
    )
    granularity: Unit = option(
        "lines",
        "the segments that are kept or dropped whole: 'lines' and sentences of the text, ranked within a token "
        "budget, or 'chunks' of chunk_size tokens. Without a tokenizer chunks are used",
    )
    scoring_queries: ScoringQueries = option(
        "prompt",
        "the scoring queries: 'prompt' takes those of likely places of the question, each weighted by the attention "
        "that the last prompt token pays to it; 'look_ahead' takes, as in the paper, those of the last prompt "
        "token and of drafted tokens, which delays the first token",
    )
    look_ahead: int = option(
        8,
        "drafted tokens that score the prompt together with the last prompt token, under scoring_queries "
        "'look_ahead'; they are the first proposal too. 0 scores by the last prompt token alone",
        0,
        MAX_LOOK_AHEAD,
    )
    pool_kernel: int = option(
        13, "width, in tokens, of the average that smooths attention under head_reduction 'max'; odd, 1 is none", 1
    )
    chunk_size: int = option(
        32, "tokens per chunk; also the unit of keep_first and keep_last, whatever the granularity", 1
    )
    keep_first: int = option(1, "chunks at the beginning of which whole lines are always kept", 0)
    keep_last: int = option(
        1,
        "chunks at the end of which whole lines are always kept, the last however long; 1 or more",
        1,
        hint="; decoding continues from the last prompt token",
    )
    min_prompt_tokens: int = option(2048, "shortest prompt, in tokens, that sparse_prefill 'auto' prunes", 0)
    prefill_chunk: int = option(8192, "most tokens in one forward; bounds the memory of long prefills", 1)
    sparse_prefill: SparsePrefill = option(
        "auto",
        "'auto' prunes prompts of min_prompt_tokens and more, and in a session new text of that length; 'on' prunes "
        "any, 'off' none: both models prefill the whole prompt; 'draft_only' keeps the target dense and has the draft "
        "decode over its draft_kv_budget, which changes no token. Under 'auto' a prompt that is not pruned is "
        "'draft_only'",
    )
    draft_kv_budget: int = option(
        512,
        "KV budget, in tokens, of the draft if the target is dense: the prompt's first, the newest text, and chunks "
        "that share rare words with it, chosen again as the answer grows; a shorter prompt is prefilled whole",
        4,
    )
    draft_window: int | tuple[int, int] | None = option(
        None,
        "positions that a token sees, up to itself, while the draft prefills the prompt; (8192, 512) is 512 of them in "
        "prompts of 8,192 tokens and more; None is dense, and quadratic. Scoring queries and decoding see everything; "
        "layers with a smaller window keep it",
    )
    draft_sinks: int = option(64, "first positions of the prompt that stay visible outside the draft_window", 0)
    scoring_heads: Sequence[tuple[int, int]] | None = option(
        None,
        "(layer, head) pairs whose attention scores the prompt; None is all from the first_scoring_layer on. Under "
        "scoring_queries 'prompt' no layer after the last of them runs before the first token",
    )
    first_scoring_layer: int = option(
        2, "first layers whose heads do not score unless scoring_heads names them; at most half of the draft's", 0
    )
    head_reduction: HeadReduction = option(
        "mean",
        "reduction over the scoring heads: the 'mean' of their attention, or the 'max' of their pooled attention, as "
        "in the paper",
    )
    scorer: str = option(
        "attention",
        "name of the selection rule: the draft's 'attention', 'bm25' (the question's words, without a draft pass), "
        "or your own rule",
    )
    positions: Positions = option(
        "original",
        "the target's positions of the kept tokens: 'original' is where they stand in the prompt, as in the paper; "
        "'contiguous' makes them an ordinary, shorter prompt, which any architecture takes",
    )
    max_dropped_attention: float | None = option(
        None,
        "the draft's check: the share of its own answer's attention to the prompt that may fall on what is dropped. "
        "Over that the next of check_rates is kept, at last the whole prompt. None checks nothing, 1 reports alone",
    )
    check_tokens: int = option(16, "tokens of the draft's answer whose attention the check counts", 1, MAX_LOOK_AHEAD)
    check_rates: Sequence[float] = option(
        (0.2, 0.4), "keep rates that the check tries after keep_rate, those above it in this order"
    )
    on_scoring_failure: OnScoringError = option(
        "dense", "effect of a failed scoring: 'dense' prefill, with the traceback in the log, or an exception ('raise')"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        require_keep_rate(self.keep_rate)
        require(
            self.pool_kernel % 2 == 1,
            f"pool_kernel must be odd (1 is no pooling), got {self.pool_kernel}; an even one would shift the scores",
        )
        require_window(self.draft_window)
        if self.scoring_heads is not None:
            require_heads(self.scoring_heads)
        check_name("scorer", self.scorer, KNOWN_SCORERS)
        require(
            self.max_dropped_attention is None or 0 <= self.max_dropped_attention <= 1,
            f"max_dropped_attention must be a share, 0 to 1, or None, got {self.max_dropped_attention}",
        )
        require_rates("check_rates", self.check_rates)

    def rate_for(self, num_prompt_tokens: int) -> float:
        """The keep_rate of a prompt of this length."""
        if not isinstance(self.keep_rate, Sequence):
            return self.keep_rate
        import numpy as np  # Registries and the command line import this module, without arrays.

        lengths, rates = zip(*self.keep_rate, strict=True)
        return float(np.interp(math.log(max(1, num_prompt_tokens)), np.log(lengths), rates))

    def window_for(self, num_prompt_tokens: int) -> int | None:
        """The draft's prefill window for a prompt of this length; None is dense."""
        if not isinstance(self.draft_window, tuple):
            return self.draft_window
        shortest, window = self.draft_window
        return window if num_prompt_tokens >= shortest else None

    @property
    def queries_from_prompt(self) -> bool:
        """Whether the prompt's own queries score it, without look-ahead."""
        return self.scoring_queries == "prompt"

    @property
    def num_scoring_layers(self) -> int | None:
        """Number of the draft's first layers that score a prompt; None for all. With the prompt's own queries no layer
        after the last chosen head is needed, but the first layers alone cannot draft a look-ahead."""
        if not self.queries_from_prompt or self.scoring_heads is None:
            return None
        return 1 + max(layer for layer, _ in self.scoring_heads)

    @property
    def answering(self) -> PrefillConfig:
        """The configuration whose look-ahead is the answer that the check looks at."""
        return replace(self, scoring_queries="look_ahead", look_ahead=self.check_tokens)

    @property
    def forced_tokens(self) -> tuple[int, int]:
        """Number of tokens at a prompt's start and end whose whole lines are always kept."""
        return self.keep_first * self.chunk_size, self.keep_last * self.chunk_size

    @classmethod
    def raw(cls, keep_rate: float | KeepCurve | None = None) -> PrefillConfig:
        """The paper's plain variant: last-token attention, single tokens, no pooling, no look-ahead."""
        full = cls.full(keep_rate)
        return replace(full, pool_kernel=1, chunk_size=1, keep_first=0, keep_last=1)

    @classmethod
    def full(cls, keep_rate: float | KeepCurve | None = None) -> PrefillConfig:
        """The paper's "Full" variant: pooling and chunks, no look-ahead."""
        return replace(cls.full_look_ahead(keep_rate), look_ahead=0)

    @classmethod
    def full_look_ahead(cls, keep_rate: float | KeepCurve | None = None) -> PrefillConfig:
        """The paper's "Full LAH" variant: eight look-ahead tokens, chunks, all layers; no calibration changes it."""
        return cls(
            keep_rate=cls.keep_rate if keep_rate is None else keep_rate,
            granularity="chunks",
            scoring_queries="look_ahead",
            look_ahead=8,
            pool_kernel=13,
            chunk_size=32,
            keep_first=1,
            keep_last=2,
            draft_window=None,
            draft_sinks=cls.draft_sinks,
            scoring_heads=None,
            first_scoring_layer=0,
            head_reduction="max",
            scorer="attention",
            max_dropped_attention=None,
        )


@documented
@dataclass(frozen=True)
class LoadConfig:
    """The precision of a loaded pair, "fp32", "fp16", "bf16", "int8", "nf4" or "auto", and how its steps run."""

    precision: str = option(
        "auto",
        "of the target; 'auto' is how a checkpoint is stored that is quantized already, else bf16, and on a CPU fp32 "
        "unless it has bf16 instructions and the checkpoint is stored in bf16 and holds 50 million weights or more",
    )
    draft_precision: str = option(
        "auto",
        "of the draft; 'auto' is how it is stored likewise, else the target's, or where that is a quantized one, as "
        "for a target",
    )
    draft_step: DraftStep = option(
        "auto",
        "how forwards of 1 to 16 tokens run: 'eager', operator by operator; 'static', over whole buckets of 256 cache "
        "slots, on CUDA in graphs that replay without Python; 'compiled', as static with the draft's one-token forward "
        "compiled by torch, which takes minutes at the first load and needs a C++ compiler. 'auto' is static on CUDA "
        "and eager on a CPU. A model without fixed shapes stays eager, and the metrics say why",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("precision", "draft_precision"):
            value = getattr(self, name)
            known = isinstance(value, str) and value in ("auto", *PRECISIONS)
            require(known, f"unknown {name} {value!r}; use one of {['auto', *PRECISIONS]}")


@documented
@dataclass(frozen=True)
class HubConfig:
    """Version of a checkpoint and access rights, passed to transformers."""

    revision: str | None = option(None, "branch, tag or commit of the target")
    draft_revision: str | None = option(None, "branch, tag or commit of the draft")
    token: str | bool | None = field(
        default=None, repr=False, metadata={"help": "access token of the hub; None is the stored login"}
    )
    trust_remote_code: bool = option(False, "run code that comes with a checkpoint")

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("revision", "draft_revision"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and value != ""), f"{name} must be a name, got {value!r}")
        known = self.token is None or isinstance(self.token, str | bool)
        require(known, f"token must be a string or a bool, got {type(self.token).__name__}")

    def options(self, role: str) -> dict[str, Any]:
        """Options of transformers' `from_pretrained` for the "target" or the "draft"."""
        revision = self.revision if role == "target" else self.draft_revision
        given = {"revision": revision, "token": self.token}
        return {name: value for name, value in given.items() if value is not None} | {
            "trust_remote_code": self.trust_remote_code
        }


@documented
@dataclass(frozen=True)
class DecodeConfig:
    """How far the draft runs ahead."""

    policy: str = option("throughput", "name of the policy that chooses gamma, the number of tokens drafted in a step")
    gamma: int = option(4, "tokens drafted per step under the policy 'fixed'; 0 is plain decoding", 0, MAX_GAMMA)
    proposer: ProposerName = option(
        "auto",
        "source of proposals: the draft 'model'; 'ngram', n-gram lookup in the whole prompt, dropped parts included, "
        "and in the answer so far; 'both', at each step the one with the higher expected gain. 'auto' is 'both' under "
        "policies that measure time ('throughput', 'speckv') and 'model' under every other",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("policy", self.policy, KNOWN_POLICIES)


@documented
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    As in transformers, logit_bias, repetition_penalty, bad_words_ids and min_tokens apply to the logits in that order,
    followed by temperature, top_k, top_p and min_p. A model's generation config applies with sampling="model".
    """

    max_tokens: int | None = option(
        None, "most tokens to generate; None is 256, or the remaining positions of the models", 1
    )
    temperature: float = option(0.0, f"0 is greedy; others below {MIN_TEMPERATURE} count as {MIN_TEMPERATURE}")
    top_k: int = option(0, "draw among this many most likely tokens; 0 and -1 are off", 0, hint="; 0 is off")
    top_p: float = option(1.0, "draw among the most likely tokens with this share of the probability; 1.0 is off")
    seed: int | None = option(
        None,
        "makes a sampled request reproducible, under a policy that does not measure time and without n-gram lookup; a "
        "call that names neither uses such a policy; -1 is None",
        0,
        2**63 - 1,
    )
    stop: str | Sequence[str] = option(
        (),
        "strings that end the text; they are not part of it. One that is a special token of the tokenizer ends it as "
        "that token",
    )
    ignore_eos: bool = option(False, "go on past the end-of-sequence token (for benchmarks)")
    min_p: float = option(
        0.0, "draw among the tokens with this share of the likeliest one's probability or more; 0 is off"
    )
    repetition_penalty: float = option(
        1.0, "how much less likely a token is that the prompt or the text has already, over 0; 1.0 is off"
    )
    bad_words_ids: Sequence[Sequence[int]] = option((), "sequences of token ids that are never completed")
    logit_bias: Mapping[int, float] | None = option(
        None, "added to the logits of single token ids; -100 or less almost excludes one"
    )
    min_tokens: int = option(0, "tokens before which no token may end the text", 0, hint="; 0 is off")
    stop_token_ids: Sequence[int] = option(
        (), "further token ids that end the text, also under ignore_eos; they are not part of it"
    )
    max_time: float | None = option(
        None, "seconds of work, prefill included, after which the text ends with its current step; None is no limit"
    )

    def __post_init__(self) -> None:
        # What other engines' clients send for "off" and "random".
        for name, off in (("top_k", 0), ("seed", None)):
            if (value := plain(getattr(self, name))) == -1 and not isinstance(value, bool):
                object.__setattr__(self, name, off)
        check_fields(self)
        require(0 <= self.temperature < math.inf, f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}; 1.0 is off")
        is_time = self.max_time is None or 0 < self.max_time < math.inf
        require(is_time, f"max_time must be seconds over 0, got {self.max_time}; None is no limit")
        require(isinstance(self.stop, str | Sequence), f"stop must be a string or a list of strings, got {self.stop!r}")
        require(
            all(isinstance(text, str) and text for text in self.stop_strings),
            f"stop must be non-empty strings, got {self.stop!r}",
        )
        self._check_processors()

    def _check_processors(self) -> None:
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}; 0 is off")
        require(
            1 / MOST_SHAPING <= self.repetition_penalty <= MOST_SHAPING,
            f"repetition_penalty must be over 0, {1 / MOST_SHAPING:g} to {MOST_SHAPING:g}, got "
            f"{self.repetition_penalty}; 1.0 is off",
        )
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it",
        )
        require_ids("stop_token_ids", self.stop_token_ids)
        words = isinstance(self.bad_words_ids, Sequence) and not isinstance(self.bad_words_ids, str | bytes)
        require(words, f"bad_words_ids must be a list of lists of token ids, got {self.bad_words_ids!r}")
        for word in self.bad_words_ids:
            require_ids("bad_words_ids", word)
            require(len(word) > 0, "bad_words_ids holds an empty word; leave it out")
        if self.logit_bias is not None:
            require_bias(self.logit_bias)

    @property
    def token_ids_named(self) -> set[int]:
        """All token ids in these options."""
        return {*map(int, chain(self.stop_token_ids, *self.bad_words_ids, self.logit_bias or ()))}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, one or many, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@documented
@dataclass(frozen=True)
class SessionConfig:
    """Which dropped text a session recalls.

    Recalled text attends to earlier text alone. On an SGLang server the text after the last dropped chunk (recent
    questions and answers, 256 tokens at most) is prefilled again behind it.
    """

    recall: bool = option(True, "whether dropped chunks are recalled if a later turn's scoring queries attend to them")
    recall_threshold: float = option(
        8.0, "multiple of the old text's mean importance from which a dropped chunk is recalled"
    )
    max_recalled_chunks: int = option(
        16,
        "most chunks of earlier turns that a turn considers, best first; the dropped ones among them are recalled",
        1,
        hint="; recall=False recalls nothing",
    )
    recall_word_threshold: float | None = option(
        0.9,
        "sum of rare words in common with the new text's question, each over the root of the number of segments that "
        "hold it, six at most, and short ones half, from which a dropped segment is recalled whatever its attention. "
        "None uses attention alone",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.recall_threshold >= 0, f"recall_threshold must be 0 or more, got {self.recall_threshold}")
        require(
            self.recall_word_threshold is None or self.recall_word_threshold > 0,
            f"recall_word_threshold must be over 0, got {self.recall_word_threshold}; None asks attention alone",
        )


@dataclass(frozen=True)
class SpecStackConfig:
    """The configuration of a `SpecStackGenerator` for all its requests.

    Parameters
    ----------
    prefill : PrefillConfig
        Scoring and pruning of prompts.
    decode : DecodeConfig
        Drafting.
    session : SessionConfig
        Recall of sessions.
    """

    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
