"""From attention to one importance per prompt token. Pure tensors; `attention.CapturedAttention` puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from spec_stack.devices import to_device
from spec_stack.prefill.alignment import Span

MOST_WEIGHTS = 1 << 26
"""Most attention weights of several key heads that are held at once: a quarter of a gigabyte in fp32."""
# The most weight of a segment that does not ask by its place (experiments/LOG.md, "Selection with fewer numbers").
_NOT_ASKING = 0.5
# The factor of a question mark (same place, "Question marks, again").
_QUESTION_MARK = 5.0
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

    asks: whether it is of the question by its place or its question mark. is_marked: whether it asks with a question
    mark. is_question: whether it counts in full, whatever the last token attends to.
    """

    rows: Span
    span: Span
    asks: bool = False
    is_marked: bool = False
    is_question: bool = False


def last_attention(layers: Iterable[ScoredLayer], num_in_place: int) -> torch.Tensor:
    """Mean attention (num_prompt_tokens,), fp32, of the prompt's last query over heads; ValueError for no layers."""
    total: torch.Tensor | None = None
    num_heads = 0
    for queries, keys, scaling, sinks in layers:
        heads = attention_to_prompt(queries[:, num_in_place - 1 : num_in_place], keys, scaling, sinks)[:, 0]
        total = heads.sum(dim=0) if total is None else total + heads.sum(dim=0).to(total.device)
        num_heads += len(heads)
    if total is None:
        raise ValueError(NO_LAYER)
    return total / num_heads


def segment_weights(attention: torch.Tensor, segments: Sequence[Segment]) -> list[float]:
    """The weight, up to 1, of each segment's queries, by `last_attention` (num_prompt_tokens,) to the segment.

    Of those that ask by their place the heaviest has weight 1, and the others have half at most: behind a tool's
    results the last token attends to the system message and to what is near, 2 to 50 times as much as to the user's
    question. Where none asks, the heaviest has weight 1. A question mark counts five times. Several questions at a
    request's end count alike.
    """
    others = attention.cpu()[:-1]
    seen = torch.stack([others[slice(*segment.span)].mean() for segment in segments])
    is_marked = torch.tensor([segment.is_marked for segment in segments])
    seen = seen.where(~is_marked, _QUESTION_MARK * seen)
    asks, known = torch.tensor([segment.asks for segment in segments]), seen.nan_to_num()
    most = _NOT_ASKING if bool(asks.any()) else 1.0
    largest = torch.where(asks, known.where(asks, 0.0).max(), known.max() / most)
    weights = (seen / largest.clamp(min=torch.finfo(seen.dtype).tiny)).nan_to_num(nan=1.0).clamp(max=1)
    is_question = torch.tensor([segment.is_question for segment in segments])
    found: list[float] = weights.where(~is_question, 1.0).tolist()
    return found


def over_queries(attention: torch.Tensor, segments: Sequence[Segment], weights: Sequence[float]) -> torch.Tensor:
    """Reduce attention (..., n, num_prompt_tokens) over its queries: (..., num_prompt_tokens).

    Without segments the mean, as in the paper. With segments the maximum over queries of attention times the segment's
    weight, less the background: the mean over queries, by how little their segments weigh (experiments/LOG.md, "The
    background, again"). A segment's queries do not score the segment itself. Segments with weight 1, the question, get
    the mean of the largest scores; if there are several, the largest scores of all of them are alike.
    """
    if not segments:
        return attention.mean(dim=-2)
    own = torch.stack([attention[..., slice(*segment.rows), :].amax(dim=-2) for segment in segments], dim=-2)
    for index, segment in enumerate(segments):
        own[..., index, slice(*segment.span)] = 0
    at = [index for index, weight in enumerate(weights) if weight >= 1]
    questions = [segments[index].span for index in at]
    sizes = [min(stop - start, attention.shape[-1]) for start, stop in questions]
    if len(at) > 1:
        largest = own[..., at, :].topk(min(sizes), dim=-1).values.mean(dim=-1, keepdim=True)
        own[..., at, :] *= largest.amax(dim=-2, keepdim=True) / largest.clamp(min=torch.finfo(own.dtype).tiny)
    importance = own.mul_(to_device(torch.tensor(weights), attention.device)[:, None]).amax(dim=-2)
    importance = importance.sub_(_background(attention, segments, weights)).clamp_(min=0)
    best = [importance.topk(size, dim=-1).values.mean(dim=-1, keepdim=True) for size in sizes]
    for (start, stop), mean in zip(questions, best, strict=True):
        importance[..., start:stop] = mean
    return importance


def _background(attention: torch.Tensor, segments: Sequence[Segment], weights: Sequence[float]) -> torch.Tensor:
    """Mean attention (..., num_prompt_tokens) of the segments' queries, each counting 1 less its segment's weight."""
    shares = [0.0] * attention.shape[-2]
    for segment, weight in zip(segments, weights, strict=True):
        start, stop = segment.rows
        shares[start:stop] = [1 - weight] * (stop - start)
    means = torch.tensor(shares) / max(sum(shares), 1.0)
    return torch.matmul(to_device(means, attention.device), attention)


def largest_attention(layer: ScoredLayer, pool_kernel: int, num_in_place: int = 1) -> torch.Tensor:
    """Pooled attention (n, num_prompt_tokens), fp32, the maximum over heads. pool_kernel: odd, in tokens."""
    parts = (attention_to_prompt(*part, num_in_place) for part in _parts(layer))
    return reduce(torch.maximum, (pool(attention, pool_kernel).amax(dim=0) for attention in parts))


def head_importance(
    layer: ScoredLayer, num_in_place: int = 1, segments: Sequence[Segment] = (), weights: Sequence[float] = ()
) -> torch.Tensor:
    """Importance (num_heads, num_prompt_tokens), fp32, by each head alone."""
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
