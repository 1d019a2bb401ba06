"""What a prompt's selection kept, and why: `generate(explain=True)`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptSpan:
    """A half-open span of a prompt's characters that the target has, and what kept it.

    reason: "attention", "rare word" (in common with the question), "head" (a heading, key or scope that the question
    names), "words" (BM25) or "score" (another rule's), each the least that sufficed; "ends" of the prompt; "protected";
    "recalled" or "cached" from earlier turns; "dense" where nothing was pruned.
    """

    start: int
    stop: int
    reason: str
    num_tokens: int


@dataclass(frozen=True)
class ScoringQuery:
    """A half-open span of a prompt's characters that scored it, and its weight, 0 to 1."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True)
class Explanation:
    """What a prompt's selection kept, and why.

    Parameters
    ----------
    tokens : list of str
        The text of each token, (N,).
    kept : list of KeptSpan
        What the target has of the prompt, in order.
    queries : list of ScoringQuery
        What scored the prompt, by falling weight.
    importance : list of float or None
        The draft's attention to each token, (N,); None where the draft did not score.
    """

    tokens: list[str]
    kept: list[KeptSpan]
    queries: list[ScoringQuery]
    importance: list[float] | None

    @property
    def text(self) -> str:
        """The prompt's text, the chat template's included, of which the spans are."""
        return "".join(self.tokens)
