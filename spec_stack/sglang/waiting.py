"""A request between its arrival and its decision."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from spec_stack.sglang.follow_up import Beginning
from spec_stack.sglang.protocols import RunningRequest
from spec_stack.sglang.request_state import RequestOptions
from spec_stack.sglang.scoring import Prompt, Score
from spec_stack.tokenizers.chat_turns import Protected


@dataclass(eq=False)
class Waiting:
    """A request in SGLang's waiting queue whose prompt is to be scored first.

    beginning: the inherited prefix. prunes: the text after it is pruned; recalls: dropped text may be recalled. reason:
    why the prompt may be pruned; why_new: the same for the new text. is_long: the draft lacks too much of it for a
    round beside a prefill batch.
    """

    request: RunningRequest
    options: RequestOptions
    prompt: Prompt
    protected: Protected
    reason: str
    why_new: str = ""
    beginning: Beginning = field(default_factory=Beginning)
    prunes: bool = True
    recalls: bool = False
    work: Generator[None, None, Score] | None = None
    scoring_s: float = 0.0
    longest_part_s: float = 0.0
    is_long: bool = False

    @property
    def asks_little(self) -> bool:
        """Return whether the draft is needed for the recall alone."""
        return self.recalls and not self.prunes

    def took(self, seconds: float) -> None:
        """Note the seconds of a part of the scoring."""
        self.scoring_s += seconds
        self.longest_part_s = max(self.longest_part_s, seconds)
