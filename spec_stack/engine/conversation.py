"""Both models' KV caches of one conversation, one request over them, and a draft that decodes over chosen slots."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch

from spec_stack.config import SessionConfig
from spec_stack.decode.ngram_index import NgramIndex, SharedNgramCache
from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.engine.request import Request
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt, num_shared
from spec_stack.prefill.draft_kv_budget import DraftKVBudget
from spec_stack.prefill.explainer import Explainer
from spec_stack.prefill.rule import Observer, ScoringInputs
from spec_stack.prefill.scoring import LookAhead, drop_unselected, gather_inputs
from spec_stack.prefill.turn import Cached, NeedsScore, Plan, RecallPlace, plan_scored, plan_turn
from spec_stack.types import Proposal

_NO_RECALL = SessionConfig(recall=False)


class Conversation:
    """Both models' caches of one conversation.

    Token i of `token_ids` is at position i in both caches. `target` holds the kept and recalled tokens in write order;
    `draft_cache`, the draft over its own ids, holds a gapless prefix of the text. `lookups` covers all turns; `slotted`
    is the draft over chosen slots, where a turn had one.
    """

    def __init__(self, pair: ModelPair, prefill_chunk: int, ngram_cache: SharedNgramCache | None = None) -> None:
        self._pair, self._prefill_chunk, self._ngram_cache = pair, prefill_chunk, ngram_cache
        self.token_ids: list[int] = []
        self.encoded: EncodedPrompt | None = None
        self.target = pair.open_target(prefill_chunk)
        self.draft_cache = pair.new_draft_cache(prefill_chunk)
        self.lookups = NgramIndex(ngram_cache)
        self.slotted: SlottedDraft | None = None
        # The last turn's prompt behind earlier turns, half-open.
        self.last_turn = (0, 0)

    @property
    def num_dense(self) -> int:
        """Length of the prefix that the target holds in order, without a gap."""
        positions = self.target.positions
        return next((slot for slot, position in enumerate(positions) if slot != position), len(positions))

    def fork(self) -> Conversation:
        other = Conversation(self._pair, self._prefill_chunk, self._ngram_cache)
        other.token_ids, other.encoded = list(self.token_ids), self.encoded
        other.target = self.target.fork()
        other.draft_cache = self.draft_cache.fork()
        other.slotted = self.slotted and self.slotted.fork()
        other.last_turn = self.last_turn
        return other

    def begin(self, request: Request, config: SessionConfig) -> Turn:
        """Roll back to the prefix shared with a request."""
        prompt_ids, known_ids = request.prompt_ids, self.token_ids
        if request.prefill.sparse_prefill in ("off", "draft_only"):
            # A dense target keeps only densely read tokens, and reads the rest again.
            known_ids = known_ids[: self.num_dense]
        # The last token is always new: its logits are needed.
        last = len(prompt_ids) - 1
        num_cached = min(num_shared(known_ids, prompt_ids), last)
        self._forget_from(num_cached, min(num_shared(self.draft_cache.token_ids, prompt_ids), last))
        # Behind the answer, whose last token is not cached. An edited question belongs to the turn of the earlier one.
        start = num_cached + 1 if num_cached >= self.last_turn[1] else min(num_cached, self.last_turn[0])
        return Turn(self, self._pair, request, config, Cached(num_cached, list(self.target.positions), start))

    def commit(self, request: Request, turn: Turn, answer_ids: Sequence[int], text: str | None) -> None:
        """Add a turn's prompt and answer. text: the answer's, None where it is not that of its tokens."""
        token_ids = [*request.prompt_ids, *answer_ids]
        if self._ngram_cache is not None:
            self._ngram_cache.remember(request.prompt_ids, answer_ids)
        self.last_turn = (turn.cached.start or 0, len(request.prompt_ids))
        # Neither model has seen the last token.
        self.token_ids = token_ids[:-1]
        self._forget_from(len(self.token_ids))
        encoded = request.encoded
        if encoded is not None and text is not None:
            ended = bool(answer_ids) and answer_ids[-1] in self._pair.end_ids
            encoded = encoded.with_answer(answer_ids[:-1] if ended else answer_ids, text)
        self.encoded = encoded

    def recover(self, turn: Turn) -> None:
        """Go back to where a cancelled or failed turn began."""
        self.slotted = None
        if self.draft_cache.is_stateful:
            self.draft_cache = self._pair.new_draft_cache(self._prefill_chunk)
        positions = turn.cached.positions
        num_same = num_shared(positions, self.target.positions)
        if self.target.is_stateful or num_same < len(positions):
            # A recurrent state is unknown, and slots behind recalled text are gone: the next turn computes all again.
            self.target.reset_to(self.token_ids, positions)
        else:
            self.target.rollback(self.target.num_cached - num_same)

    def _forget_from(self, num_tokens: int, num_read: int | None = None) -> None:
        """Forget all tokens from num_tokens on. num_read: how many the draft keeps, where it differs."""
        del self.token_ids[num_tokens:]
        self.target.truncate(num_tokens)
        # A draft with another tokenizer rolls back once the prompt is tokenized for it.
        if self._pair.translation is None:
            self.draft_cache.truncate(num_tokens if num_read is None else num_read)


class Turn:
    """A conversation's caches during one request, and what the target prefills. keeps_draft_cache: whether the draft,
    of which then all layers go over the prompt, keeps what the selection drops.
    """

    def __init__(
        self,
        conversation: Conversation,
        pair: ModelPair,
        request: Request,
        config: SessionConfig,
        cached: Cached,
        keeps_draft_cache: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.cached, self._keeps_draft_cache = cached, keeps_draft_cache
        self._conversation, self._pair, self._request, self._config = conversation, pair, request, config
        self.target, self.lookups = conversation.target, conversation.lookups
        self.draft: DraftModel = pair.draft_in_target_vocab(conversation.draft_cache, request.tokenization)
        if request.explained is not None:
            observer = Explainer(request.explained, request.prefill, cached.num_tokens)
        self.observer = observer
        recall = config if self.target.can_recall else None
        self._place: RecallPlace = "in_text" if pair.positions == "contiguous" else "last"
        prefill, obstacle = request.prefill, request.obstacle
        plan = plan_turn(request.prompt_ids, request.read, cached, prefill, recall, obstacle, self._place)
        self.plan = self._rolled_back(plan) if isinstance(plan, Plan) else plan

    def score(self, needs: NeedsScore, look_ahead: LookAhead) -> tuple[Plan, Proposal]:
        """Score the prompt: what the target prefills, and the first proposal."""
        request, prefill = self._request, self._request.prefill
        inputs, proposal = gather_inputs(
            self.draft,
            ScoringInputs(self._pair.reader.with_pieces(needs.text), observer=self.observer),
            look_ahead,
            prefill,
            request.tokenization,
            whole=self._keeps_draft_cache,
            first_query=needs.first_query,
        )
        plan = self._rolled_back(plan_scored(needs, inputs, prefill, self._config, self._place))
        if not self._keeps_draft_cache:
            drop_unselected(self.draft, inputs, plan.selection)
        return plan, proposal

    def unscored(self, needs: NeedsScore, reason: str) -> Plan:
        """What the target prefills where scoring failed."""
        return self._rolled_back(needs.unscored(reason, self._place))

    def _rolled_back(self, plan: Plan) -> Plan:
        """A plan, once the target has no more than what stays of its cache. Mutates it."""
        self.target.rollback(len(self.cached.positions) - plan.selection.num_held)
        return plan

    def draft_for_dense(self) -> DraftModel | SlottedDraft:
        """The draft of a dense request: over chosen slots of a long prompt, if its cache can drop slots, else over all
        of the text."""
        prefill, conversation = self._request.prefill, self._conversation
        is_short = len(self._request.prompt_ids) <= prefill.draft_kv_budget
        has_all = prefill.sparse_prefill == "off" or is_short or self._pair.translation is not None
        if has_all or not conversation.draft_cache.can_recall:
            return self.draft
        if conversation.slotted is None:
            # Slots that the draft cache holds of the prompt are copied from it.
            conversation.slotted = SlottedDraft(conversation.draft_cache.fork(), DraftKVBudget.of(prefill))
        else:
            conversation.slotted.go_back(self._request.prompt_ids)
        return conversation.slotted

    def reset_draft(self) -> None:
        """Replace a failed draft by an empty one."""
        draft_cache = self._conversation.draft_cache = self._pair.new_draft_cache(self._request.prefill.prefill_chunk)
        self.draft = self._pair.draft_in_target_vocab(draft_cache, self._request.tokenization)


def single_turn(pair: ModelPair, request: Request, observer: Observer | None = None) -> Turn:
    """A request with caches of its own, whose draft drops what the selection drops."""
    conversation = Conversation(pair, request.prefill.prefill_chunk)
    return Turn(conversation, pair, request, _NO_RECALL, Cached(), keeps_draft_cache=False, observer=observer)


class SlottedDraft:
    """A draft whose steps cost the same at any length of a text: it holds the text's sinks, its newest part, and chunks
    that share words with that part, at their own positions.

    Slots are chosen anew at the beginning of a step, sooner where at least half of the last proposal was rejected.
    Chunks that are no longer chosen are dropped; new ones are prefilled behind the older slots.
    """

    def __init__(self, draft: CachedModel, budget: DraftKVBudget) -> None:
        self._draft, self._budget = draft, budget
        # All tokens before next_position.
        self._text = list(draft.token_ids)
        self._begins_step = True
        # Of the last step that drafted: whether it was mostly wrong, the drafted tokens fed in it, its last logits.
        self._is_wrong = False
        self._num_drafted = 0
        self._unjudged: torch.Tensor | None = None

    @property
    def num_cached(self) -> int:
        """The chosen slots."""
        return self._draft.num_cached

    def release(self) -> None:
        self._draft.release()

    @property
    def next_position(self) -> int:
        """The text position of the next token to feed; the chosen slots of the text before it are held."""
        return len(self._text)

    def draft_lag(self, num_tokens: int) -> int:
        """Tokens to feed before drafting: of a long gap only the chosen ones."""
        return min(num_tokens - len(self._text), self._budget.num_slots)

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Feed the text's next tokens; of a part longer than the slots, its chosen positions. One row of logits."""
        if num_logits != 1 or list(positions) != list(range(len(self._text), len(self._text) + len(token_ids))):
            raise ValueError("a draft over chosen slots goes on from its next position and gives one row of logits")
        wanted = list(positions)
        self._text += token_ids
        if self._begins_step:
            if self._unjudged is not None:
                # The drafted token was never fed, so the token now in its place tells whether it was right.
                self._is_wrong = int(self._unjudged.argmax()) != token_ids[0]
            if self._is_due(len(token_ids)):
                wanted = self._renew()
            self._begins_step, self._num_drafted = False, 0
        else:
            self._num_drafted += len(token_ids)
        logits = self._draft.forward([self._text[position] for position in wanted], wanted, num_logits=1)
        self._unjudged = logits[0]
        return logits

    def _is_due(self, num_new: int) -> bool:
        is_first = not self._budget.num_known
        return is_first or num_new > self._budget.num_slots or self._budget.is_due(len(self._text), self._is_wrong)

    def _renew(self) -> list[int]:
        """Choose the slots anew and drop the others; the positions to prefill, in order."""
        cached = np.array(self._draft.positions, dtype=np.int64)
        stays, missing = self._budget.renew(self._text, cached, self._draft.next_position)
        self._draft.keep_slots(np.flatnonzero(stays).tolist())
        positions: list[int] = missing.tolist()
        return positions

    def rollback(self, num_tokens: int) -> None:
        """Drop the text's last tokens, which were fed since the last step began. Called after every step."""
        self._draft.rollback(num_tokens)
        del self._text[len(self._text) - num_tokens :]
        if self._num_drafted:
            self._is_wrong, self._unjudged = 2 * num_tokens >= self._num_drafted, None
        self._begins_step, self._num_drafted = True, 0

    def go_back(self, prompt_ids: Sequence[int]) -> None:
        """Go on with another prompt from the common prefix. Its slots are chosen in its first step."""
        shared = min(num_shared(self._text, prompt_ids), len(prompt_ids) - 1)
        self._draft.truncate(shared)
        del self._text[shared:]
        self._budget.num_known = 0
        self._unjudged, self._is_wrong = None, False

    def fork(self) -> SlottedDraft:
        """An independent copy."""
        other = SlottedDraft(self._draft.fork(), copy(self._budget))
        other._text = list(self._text)
        return other
