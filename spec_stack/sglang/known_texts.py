"""What a server knows of the prompts that arrive: the target's cache, earlier turns, recent plans, the tokenizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spec_stack.sglang.decide import Plan, Prompt
from spec_stack.sglang.prefix_reuse import CachedPrefix, TurnStore
from spec_stack.tokenizers.chat_turns import ChatTurns, Protected
from spec_stack.tokenizers.pieces import Pieces

# The same prompt repeats at once with n replies, and after a client's retry.
_MOST_PLANS = 16


class KnownTexts:
    """Implements `decide.KnownText`.

    num_cached: a prompt's prefix tokens in SGLang's radix cache. most_tokens: of all remembered turns.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None, num_cached: Callable[[Prompt], int], most_tokens: int
    ) -> None:
        self.template = ChatTurns.learn(tokenizer, chat_template)
        self.turns = TurnStore(most_tokens)
        self.num_cached = num_cached
        self._pieces = None if tokenizer is None else Pieces(tokenizer)
        self._plans: OrderedDict[Prompt, Plan] = OrderedDict()

    def protected(self, prompt: Prompt) -> Protected:
        return self.template.protected(prompt.token_ids)

    def token_texts(self, prompt: Prompt) -> list[str] | None:
        return None if self._pieces is None else self._pieces.of(prompt.token_ids)

    def num_unchosen(self, prompt: Prompt, num_cached: int) -> int:
        return self.turns.num_unchosen(prompt.tenant, prompt.token_ids, num_cached)

    def cached_prefix(self, prompt: Prompt) -> CachedPrefix:
        return self.turns.find(prompt.tenant, prompt.token_ids)

    def plan_of(self, prompt: Prompt) -> Plan | None:
        return self._plans.get(prompt)

    def remember(self, plan: Plan) -> bool:
        """Remember a plan by its prompt. Returns whether it is new."""
        is_new = plan.prompt not in self._plans
        self._plans[plan.prompt] = replace(plan, num_scored_tokens=0, num_draft_tokens=0)
        self._plans.move_to_end(plan.prompt)
        if len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)
        return is_new

    def clear(self) -> None:
        """Forget earlier turns and plans."""
        self._plans.clear()
        self.turns.clear()
