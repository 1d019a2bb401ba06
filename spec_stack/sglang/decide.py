"""The decision for one prompt: dense prefill, kept tokens, or a score first; and its application. No SGLang.

`decide` is called again while a request waits, since other requests may bring its prefix or its selection. Earlier
turns are found by the token prefix; recall is that of a session (`prefill.recall`), and KV stays with the radix cache.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.draft_kv_budget import Ints
from spec_stack.prefill.prompt_text import PromptText, union
from spec_stack.prefill.registry import needs_draft
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.turn import Cached, NeedsScore, Plan, plan_scored, plan_turn, scoring_obstacle, why_whole
from spec_stack.sglang.draft_prefixes import num_equal
from spec_stack.sglang.request import NO_OPTIONS, RequestOptions, RunningRequest, attach
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.tokenizers.prompt_reader import PromptReader
from spec_stack.types import TriedRate

# Least part of the prompt for an earlier turn to count, one in four tokens: else a selection of the whole prompt is
# worth more.
_LEAST_SHARE = 4
_NO_TURN = "no chat turn was found in the prompt, so nothing but special tokens is protected"
# The same prompt repeats at once with n replies, and after a client's retry.
_MOST_DECISIONS = 16

OUTCOMES = (
    "pruned",
    "disabled",
    "audited",
    "unsupported",
    "cached",
    "nothing_to_prune",
    "too_much_dropped",
    "draft_pool_full",
    "failed",
)
"""Outcomes of a prompt, for counting. disabled: by the request or its length; audited: by its route's audits;
nothing_to_prune: all was selected; too_much_dropped: at every keep rate that the check tried."""


@dataclass(frozen=True)
class Prompt:
    """An arrived prompt with its options; equal prompts share a decision while it is remembered.

    extra_key, cache_salt: the tenant boundaries of SGLang's radix cache. end_ids: tokens that end the look-ahead. text:
    the prompt as it is read, None before that.
    """

    token_ids: tuple[int, ...]
    extra_key: str | None
    cache_salt: str | None
    config: PrefillConfig
    follow_up: str
    end_ids: frozenset[int] = frozenset()
    options: RequestOptions = NO_OPTIONS
    text: PromptText | None = field(default=None, compare=False, repr=False)

    @property
    def tenant(self) -> tuple[str | None, str | None]:
        return self.extra_key, self.cache_salt


@dataclass(frozen=True)
class Decision:
    """The target prefills the prompt's tokens at `positions`, in order.

    num_cached: tokens that an earlier turn processed, kept or dropped. num_recalled: recalled tokens among these.
    num_draft_tokens: prefilled by the draft to score num_scored_tokens. tried: what the draft's check tried.
    """

    prompt: Prompt
    positions: Sequence[int]
    reason: str
    outcome: str
    num_cached: int = 0
    num_recalled: int = 0
    num_scored_tokens: int = 0
    num_draft_tokens: int = 0
    tried: Sequence[TriedRate] = ()

    @classmethod
    def dense(cls, prompt: Prompt, reason: str, outcome: str) -> Decision:
        return cls(prompt, range(len(prompt.token_ids)), reason, outcome)

    @property
    def is_whole(self) -> bool:
        return len(self.positions) == len(self.prompt.token_ids)


@dataclass(frozen=True)
class UnscoredPrompt(NeedsScore):
    """A prompt that needs the draft's score first."""

    prompt: Prompt


@dataclass(frozen=True)
class _Turn:
    """A pruned prompt. reply: SGLang's own array of the output tokens, which grows while the request runs."""

    tenant: Hashable
    token_ids: Ints
    positions: tuple[int, ...]
    reply: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.reply)

    def num_continued(self, tenant: Hashable, ids: Ints) -> int:
        """Tokens of the prompt and its reply that a text begins with; 0 unless it has the whole prompt."""
        num_prompt_tokens = len(self.token_ids)
        if tenant != self.tenant or not np.array_equal(self.token_ids, ids[:num_prompt_tokens]):
            return 0
        # A copy: an array that is looked into cannot grow.
        reply = np.array(self.reply[: len(ids) - num_prompt_tokens], dtype=np.int64)
        # The reply's last token may have no KV.
        return num_prompt_tokens + max(0, num_equal(reply, ids[num_prompt_tokens:]) - 1)


class TurnStore:
    """Pruned turns, of most_tokens tokens in all, by tenant; those not continued for longest are dropped."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._turns: list[_Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, tenant: Hashable, prompt_ids: Sequence[int], positions: Sequence[int], reply: Sequence[int]) -> None:
        """Remember a turn; `reply` is not copied."""
        self._turns.append(_Turn(tenant, np.asarray(prompt_ids, dtype=np.int64), tuple(positions), reply))
        num_tokens = sum(map(len, self._turns))
        while num_tokens > self._most_tokens and len(self._turns) > 1:
            num_tokens -= len(self._turns.pop(0))

    def clear(self) -> None:
        self._turns.clear()

    def find(self, tenant: Hashable, prompt_ids: Sequence[int]) -> Cached:
        """The longest prefix of a prompt that a turn had; of equal ones the latest turn's."""
        # A prompt's last token is new.
        ids = np.asarray(prompt_ids[:-1], dtype=np.int64)
        lengths = [turn.num_continued(tenant, ids) for turn in self._turns]
        longest = max(lengths, default=0)
        if not longest:
            return Cached()
        turn = self._turns.pop(max(at for at, length in enumerate(lengths) if length == longest))
        self._turns.append(turn)
        return Cached(longest, (*turn.positions, *range(len(turn.token_ids), longest)))


class KnownTexts:
    """What a server decides by: its settings, the radix cache, earlier turns, recent decisions, the tokenizer.

    num_cached: a prompt's prefix tokens that the target has. most_tokens: of all remembered turns. max_positions: the
    draft's own.
    """

    def __init__(
        self,
        config: ServerConfig,
        tokenizer: Any,
        chat_template: str | None,
        num_cached: Callable[[Prompt], int],
        most_tokens: int,
        max_positions: int = sys.maxsize,
    ) -> None:
        self.config, self.max_positions = config, max_positions
        self.reader = PromptReader(tokenizer, chat_template)
        self.turns = TurnStore(most_tokens)
        self.num_cached = num_cached
        self.decisions: OrderedDict[Prompt, Decision] = OrderedDict()
        self.num_by_outcome = dict.fromkeys(OUTCOMES, 0)

    def read(self, prompt: Prompt) -> PromptText:
        options = prompt.options
        return prompt.text or self.reader.read(prompt.token_ids, options.protect or (), options.question)

    def text_of(self, prompt: Prompt) -> PromptText:
        """The prompt as it is read, with the text of every token where there is a tokenizer."""
        return self.reader.with_pieces(self.read(prompt))

    def remember(self, decision: Decision) -> None:
        """Count an applied decision, and remember by its prompt one that the draft's score decided."""
        self.num_by_outcome[decision.outcome] += 1
        if decision.outcome not in ("pruned", "nothing_to_prune", "too_much_dropped"):
            return
        self.decisions[decision.prompt] = replace(decision, num_scored_tokens=0, num_draft_tokens=0)
        self.decisions.move_to_end(decision.prompt)
        if len(self.decisions) > _MOST_DECISIONS:
            self.decisions.popitem(last=False)

    def clear(self) -> None:
        self.decisions.clear()
        self.turns.clear()


def decide(prompt: Prompt, known: KnownTexts, refusal: str | None = None) -> Decision | UnscoredPrompt:
    """Decide how a prompt is prefilled. refusal: why it cannot be pruned, or None."""
    num_tokens, config = len(prompt.token_ids), prompt.config
    if reason := why_whole(config, num_tokens):
        return Decision.dense(prompt, reason, "disabled")
    has_texts = known.reader.pieces is not None
    refusal = refusal or scoring_obstacle(config, num_tokens, known.max_positions, has_texts=has_texts)
    if refusal:
        return Decision.dense(prompt, f"off: {refusal}", "unsupported")
    cached, in_radix_cache = _reused_prefix(prompt, known)
    if in_radix_cache and num_tokens - cached.num_tokens < config.min_prompt_tokens:
        return Decision.dense(prompt, f"off: {cached.num_tokens} of {num_tokens} tokens are cached", "cached")
    # Found after the cache has had its say: the template is searched for in all of a long history.
    text = known.read(prompt)
    prompt = replace(prompt, text=text)
    turn = plan_turn(prompt.token_ids, lambda: text, Cached(), config)
    if isinstance(turn, Plan):
        return Decision.dense(prompt, turn.reason, "disabled")
    if prompt.options.whole:
        return Decision.dense(prompt, prompt.options.whole, "audited")
    if prompt in known.decisions:
        # Its route is another's.
        return replace(known.decisions[prompt], prompt=prompt)
    if _LEAST_SHARE * cached.num_tokens >= num_tokens:
        recall = replace(known.config.recall, recall=prompt.follow_up == "recall" and known.config.recall.recall)
        turn = plan_turn(prompt.token_ids, lambda: text, cached, config, recall)
        if isinstance(turn, Plan):
            turn = NeedsScore(text, cached, False, False, turn.reason, cached.missing(text))
    if known.reader.turns.openings and not text.turns:
        turn = replace(turn, reason=f"{turn.reason}; {_NO_TURN}")
    unscored = UnscoredPrompt(text, turn.cached, turn.prunes, turn.recalls, turn.reason, turn.missing, prompt)
    if (turn.prunes or turn.recalls) and needs_draft(config):
        return unscored
    return decide_scored(unscored, None, 0, known)


def _reused_prefix(prompt: Prompt, known: KnownTexts) -> tuple[Cached, bool]:
    """The inherited prefix, and whether it is a dense one in the radix cache: the longer one, or else the dense one."""
    if prompt.follow_up == "afresh":
        return Cached(), False
    inherited = known.turns.find(prompt.tenant, prompt.token_ids)
    if prompt.config.sparse_prefill == "on":
        return inherited, False
    num_cached = known.num_cached(prompt)
    if num_cached < inherited.num_tokens:
        return inherited, False
    return Cached.dense(num_cached), True


def decide_scored(
    unscored: UnscoredPrompt,
    importance: torch.Tensor | None,
    num_draft_tokens: int,
    known: KnownTexts,
    answer_attention: torch.Tensor | None = None,
) -> Decision:
    """The decision by a score. importance: (num_prompt_tokens,); None where the rule needs none. answer_attention:
    (num_prompt_tokens,), where the draft checks.

    The target prefills again what stands behind the first recalled token.
    """
    prompt, cached, num_tokens = unscored.prompt, unscored.cached, len(unscored.text)
    inputs = ScoringInputs(known.text_of(prompt), importance=importance, answer_attention=answer_attention)
    plan = plan_scored(unscored, inputs, prompt.config, known.config.recall, "in_text")
    selection, tried = plan.selection, plan.selection.tried
    positions = (*cached.positions[: selection.num_held], *selection.positions)
    reason, outcome = plan.reason, "pruned"
    if len(positions) == num_tokens:
        outcome = "too_much_dropped" if tried else "nothing_to_prune"
    elif cached.num_tokens:
        origin = "cached and kept" if cached.is_dense else f"of earlier turns: {prompt.follow_up}"
        reason = f"{reason}; {cached.num_tokens} of {num_tokens} tokens are {origin}"
    num_scored = 0 if importance is None else unscored.num_to_score
    counts = selection.num_recalled, num_scored, num_draft_tokens
    return Decision(prompt, positions, reason, outcome, cached.num_tokens, *counts, tried)


def decide_unscored(unscored: UnscoredPrompt, why: str, outcome: str) -> Decision:
    """The decision where scoring failed: an earlier turn's selection, what is protected, and all of the new text."""
    prompt, cached = unscored.prompt, unscored.cached
    if cached.is_dense:
        return Decision.dense(prompt, f"off: {why}", outcome)
    selection = unscored.unscored(why, "in_text").selection
    positions = (*cached.positions[: selection.num_held], *selection.positions)
    reason = f"on for earlier turns, without recall; new text is kept whole: {why}"
    return Decision(prompt, positions, reason, outcome, cached.num_tokens, selection.num_recalled)


def apply(request: RunningRequest, decision: Decision, known: KnownTexts, scoring_s: float = 0.0) -> None:
    """Give the request its whole prompt, or the decided part of it. Mutates the request, after all that may fail."""
    prompt, report = decision.prompt, _report(decision, known.config, scoring_s)
    if not decision.is_whole:
        known.turns.add(prompt.tenant, prompt.token_ids, decision.positions, request.output_ids)
        # An ordinary, shorter prompt from here on. The unpadded ids stay whole: SGLang uses them for detokenization
        # and NGRAM.
        request.origin_input_ids = array("q", [prompt.token_ids[position] for position in decision.positions])
        request.full_untruncated_fill_ids = array("q")
        if request.logprob_start_len > 0:
            # SGLang's value for: none of the prompt's tokens.
            request.logprob_start_len = len(decision.positions)
    attach(request, prompt.options, report)
    known.remember(decision)


def _report(decision: Decision, config: ServerConfig, scoring_s: float) -> dict[str, Any]:
    """How a prompt is prefilled, under the names of the library's metrics."""
    prompt, options = decision.prompt, decision.prompt.options
    num_kept, reason = len(decision.positions), decision.reason
    report = {
        "num_prompt_tokens": len(prompt.token_ids),
        "num_kept_tokens": num_kept,
        "num_scored_tokens": decision.num_scored_tokens,
        "num_draft_tokens": decision.num_draft_tokens,
        "num_protected_tokens": 0 if prompt.text is None else prompt.text.num_kept,
        "num_cached_tokens": decision.num_cached,
        "num_recalled_tokens": decision.num_recalled,
        "follow_up": prompt.follow_up,
        "sparse_prefill": not decision.is_whole,
        "sparse_prefill_reason": reason,
        "outcome": decision.outcome,
        "keep_rate": num_kept / len(prompt.token_ids) if prompt.token_ids else 1.0,
        "scoring_s": scoring_s,
    }
    if config.scoring_model is None:
        report["policy"] = "fixed" if options.gamma is not None else options.policy or config.policy
    if decision.tried:
        report["tried_rates"] = [asdict(each) for each in decision.tried]
        report["dropped_attention"] = decision.tried[-1].dropped_attention
    named = {"route": options.route, "header": options.header}
    report |= {name: value for name, value in named.items() if value is not None}
    if options.explain:
        report["kept_spans"] = tuple(union((at, at + 1) for at in _shown_positions(decision)))
    return report


def _shown_positions(decision: Decision) -> Sequence[int]:
    """The kept positions that a reply may show: earlier turns' only under a salt, since any client can continue one."""
    num_inherited = bisect_left(decision.positions, decision.num_cached)
    if num_inherited == decision.num_cached or any(decision.prompt.tenant):
        return decision.positions
    return decision.positions[num_inherited:]
