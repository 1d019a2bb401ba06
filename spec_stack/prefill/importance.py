"""From attention to one importance per prompt token. Pure tensors; `attention.CapturedAttention` puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from spec_stack.devices import to_device
from spec_stack.prefill.alignment import Span

MOST_WEIGHTS = 1 << 26
"""Most attention weights of several key heads that are held at once: a quarter of a gigabyte in fp32."""
# Weight factor of a segment with a question mark.
_QUESTION_MARK = 5.0
# Most tokens between questions that count alike.
_BETWEEN_QUESTIONS = 64
# Tokens of the largest importance by which each of several questions is scaled.
_LARGEST = 32
# Factor of the subtracted background.
_CONTRAST = 4.0
NO_LAYER = "no attention layer that sees the whole prompt was captured; the draft cannot score it"


class Ranks:
    """The ranks that share a draft's heads, in the order of the heads; here there is one."""

    rank, num = 0, 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over the ranks; may change values."""
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over the ranks; may change values."""
        return values


class ScoredLayer(NamedTuple):
    """A layer's scoring queries (num_heads, n, head_dim), keys (num_kv_heads, num_prompt_tokens, head_dim), and sinks
    (num_heads,), if it has any: the arguments of `attention_to_prompt`."""

    queries: torch.Tensor
    keys: torch.Tensor
    scaling: float
    sinks: torch.Tensor | None = None


def attention_to_prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None = None,
    num_in_place: int = 1,
) -> torch.Tensor:
    """Softmax over the prompt keys and any sink, in fp32: (num_heads, n, num_prompt_tokens).

    The layer is a `ScoredLayer`. num_in_place: the first queries are those of the prompt's last tokens, and causal; the
    others are behind the prompt.
    """
    num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_prompt_tokens, _ = keys.shape
    folded = queries.reshape(num_kv_heads, num_heads // num_kv_heads * num_queries, head_dim).float() * scaling
    scores = torch.matmul(folded, keys.float().transpose(-1, -2)).reshape(num_heads, num_queries, num_prompt_tokens)
    if num_in_place > 1:
        tail = scores[:, :num_in_place, num_prompt_tokens - num_in_place :]
        future = torch.ones(num_in_place, num_in_place, dtype=torch.bool, device=tail.device).triu(1)
        tail.masked_fill_(future, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float()[:, None, None].expand(-1, num_queries, 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def pool(attention: torch.Tensor, kernel: int) -> torch.Tensor:
    """Average every row over a centred window of `kernel` tokens; at the ends over the tokens that exist."""
    if kernel == 1:
        return attention
    return F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2, count_include_pad=False)


def choose_heads(layer: ScoredLayer, heads: Sequence[int]) -> ScoredLayer:
    """The layer with these query heads only, each with a key head of its own."""
    queries, keys, scaling, sinks = layer
    index = to_device(torch.tensor(heads), queries.device)
    groups = queries.shape[0] // keys.shape[0]
    return ScoredLayer(queries[index], keys[index // groups], scaling, None if sinks is None else sinks[index])


@dataclass(frozen=True)
class Segment:
    """Half-open rows of the captured queries, and the span of the prompt's tokens that they are the queries of.

    asks: whether it asks by its role, whatever the opening attends to.
    """

    rows: Span
    span: Span
    is_question: bool = False
    asks: bool = False


def opening_attention(layers: Iterable[ScoredLayer], num_in_place: int, opening: int) -> torch.Tensor:
    """Mean attention (num_prompt_tokens,), fp32, of the last `opening` queries in place; ValueError for no layers."""
    total: torch.Tensor | None = None
    num_heads = 0
    for queries, keys, scaling, sinks in layers:
        own = queries[:, num_in_place - opening : num_in_place]
        heads = attention_to_prompt(own, keys, scaling, sinks, opening).mean(dim=1)
        total = heads.sum(dim=0) if total is None else total + heads.sum(dim=0).to(total.device)
        num_heads += len(heads)
    if total is None:
        raise ValueError(NO_LAYER)
    return total / num_heads


def segment_weights(attention: torch.Tensor, segments: Sequence[Segment], opening: int) -> list[float]:
    """The weight, up to 1, of each segment's queries, by `opening_attention` (num_prompt_tokens,) to the segment.

    Segments with a question mark near the heaviest one have its weight: two questions in one turn count alike. Of those
    that ask by their role the heaviest has weight 1: behind a tool's results the opening attends to the system message
    and to what is near, 2 to 50 times as much as to the user's question.
    """
    others = attention.cpu()[: len(attention) - opening]
    seen = torch.stack([others[slice(*segment.span)].mean() for segment in segments])
    is_question = torch.tensor([segment.is_question for segment in segments])
    seen = seen * torch.where(is_question, _QUESTION_MARK, 1.0)
    known = seen.nan_to_num()
    heaviest = int(torch.where(is_question, known, -1.0).argmax())
    together = [_gap(segment.span, segments[heaviest].span) <= _BETWEEN_QUESTIONS for segment in segments]
    seen = torch.where(is_question & torch.tensor(together) & ~seen.isnan(), known[heaviest], seen)
    asks = torch.tensor([segment.asks for segment in segments])
    least = torch.finfo(seen.dtype).tiny
    largest = torch.where(asks, known.where(asks, -1.0).max(), known.max()).clamp(min=least)
    weights: list[float] = (seen / largest).nan_to_num(nan=1.0).clamp(max=1).tolist()
    return weights


def _gap(one: Span, other: Span) -> int:
    """Tokens between two spans."""
    return max(one[0], other[0]) - min(one[1], other[1])


def over_queries(attention: torch.Tensor, segments: Sequence[Segment], weights: Sequence[float]) -> torch.Tensor:
    """Reduce attention (..., n, num_prompt_tokens) over its queries, by question: (..., num_questions,
    num_prompt_tokens).

    Without segments the mean, as in the paper. With segments the maximum over queries of attention times the segment's
    weight, less the background: the mean attention of the queries outside the question. A segment's queries do not
    score the segment itself. The segment with the largest weight, the question, gets the mean of the largest scores.
    """
    if not segments:
        return attention.mean(dim=-2, keepdim=True)
    asked = torch.stack([attention[..., slice(*segment.rows), :].amax(dim=-2) for segment in segments], dim=-2)
    for index, segment in enumerate(segments):
        asked[..., index, slice(*segment.span)] = 0
    by_question = weights_by_question(segments, weights)
    own = [_for_question(attention, asked, segments, each) for each in by_question]
    questions = [segment.span for segment, weight in zip(segments, weights, strict=True) if weight >= 1]
    for importance in own:
        sizes = [min(stop - start, importance.shape[-1]) for start, stop in questions]
        best = [importance.topk(size, dim=-1).values.mean(dim=-1, keepdim=True) for size in sizes]
        for (start, stop), mean in zip(questions, best, strict=True):
            importance[..., start:stop] = mean
    return torch.stack(own, dim=-2)


def weights_by_question(segments: Sequence[Segment], weights: Sequence[float]) -> list[Sequence[float]]:
    """The segments' weights for every question that counts in full, whose background the other ones are; as they are
    for one question, or none.
    """
    questions = {
        at
        for at, (segment, weight) in enumerate(zip(segments, weights, strict=True))
        if weight >= 1 and segment.is_question
    }
    if len(questions) < 2:
        return [weights]
    return [
        [0.0 if at in questions and at != question else weight for at, weight in enumerate(weights)]
        for question in sorted(questions)
    ]


def _for_question(
    attention: torch.Tensor, asked: torch.Tensor, segments: Sequence[Segment], weights: Sequence[float]
) -> torch.Tensor:
    """The weighted maximum of asked (..., num_segments, num_prompt_tokens), less the background."""
    others = [0.0] * attention.shape[-2]
    for segment, weight in zip(segments, weights, strict=True):
        start, stop = segment.rows
        others[start:stop] = [1 - weight] * (stop - start)
    background = torch.matmul(to_device(torch.tensor([others]), attention.device), attention).squeeze(-2)
    weighted = asked * to_device(torch.tensor(weights), attention.device)[:, None]
    return weighted.amax(dim=-2).sub_(background, alpha=_CONTRAST / max(sum(others), 1.0)).clamp_(min=0)


def merge_questions(importance: torch.Tensor) -> torch.Tensor:
    """Importance (num_prompt_tokens,) of importance by question (num_questions, num_prompt_tokens).

    Several questions share the budget: each one's importance counts relative to its largest values, so that a question
    with a sharp answer does not outbid the others. Raises ValueError where it is not finite.
    """
    if not bool(torch.isfinite(importance).all()):
        raise ValueError("the draft's attention is not finite")
    if len(importance) == 1:
        return importance[0]
    largest = importance.topk(min(_LARGEST, importance.shape[-1]), dim=-1).values.mean(dim=-1, keepdim=True)
    return (importance / largest.clamp(min=torch.finfo(importance.dtype).tiny)).amax(dim=0)


def largest_attention(layers: Iterable[ScoredLayer], pool_kernel: int, num_in_place: int = 1) -> torch.Tensor:
    """Pooled attention (n, num_prompt_tokens), fp32, the maximum over layers and heads.

    pool_kernel: odd, in tokens. Raises ValueError for no layers.
    """
    best: torch.Tensor | None = None
    for layer in layers:
        for part in _parts(layer):
            pooled = pool(attention_to_prompt(*part, num_in_place), pool_kernel).amax(dim=0)
            best = pooled if best is None else torch.maximum(best, pooled.to(best.device))
    if best is None:
        raise ValueError(NO_LAYER)
    return best


def head_importance(
    layer: ScoredLayer, num_in_place: int = 1, segments: Sequence[Segment] = (), weights: Sequence[float] = ()
) -> torch.Tensor:
    """Importance (num_heads, num_questions, num_prompt_tokens), fp32, by each head alone."""
    parts = (attention_to_prompt(*part, num_in_place) for part in _parts(layer))
    return torch.cat([over_queries(attention, segments, weights) for attention in parts])


def _parts(layer: ScoredLayer) -> Iterator[ScoredLayer]:
    """The layer by as many key heads as fit MOST_WEIGHTS, or by one, each with its query heads."""
    queries, keys, scaling, sinks = layer
    groups = queries.shape[0] // keys.shape[0]
    size = max(1, MOST_WEIGHTS // (groups * queries.shape[1] * keys.shape[1]))
    for start in range(0, keys.shape[0], size):
        own = slice(start * groups, (start + size) * groups)
        yield ScoredLayer(queries[own], keys[start : start + size], scaling, None if sinks is None else sinks[own])
