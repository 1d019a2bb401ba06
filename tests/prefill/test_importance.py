from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_stack import PrefillConfig
from spec_stack.decode.proposer import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.prefill import importance as prefill_importance
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.importance import (
    ScoredLayer,
    Segment,
    attention_to_prompt,
    choose_heads,
    head_importance,
    largest_attention,
    over_queries,
    segment_weights,
)
from tests.support import reference
from tests.support.cuda import Operators, blocking_copies, read_backs
from tests.support.models import FAMILIES, make_model, random_prompt
from tests.support.scoring import score_prompt, token_importance


def scored_importance(family: str, prompt: list[int], config: PrefillConfig) -> tuple[torch.Tensor, list[int]]:
    """Importance and look-ahead of the real stage, read off its capture."""
    model = make_model(family)
    install(model)
    draft = CachedModel(model, config.prefill_chunk)
    draft.forward(prompt[:-1], range(len(prompt) - 1), 1)
    with draft.capture() as captured:
        proposal = propose(draft, prompt, config.look_ahead, Sampler(), ())
        fed = proposal.token_ids[-1:] or prompt[-1:]
        draft.forward(fed, [draft.next_position], 1)
    layers = [
        ScoredLayer(torch.cat(layer.queries, dim=1), layer.keys[:, : len(prompt)], layer.scaling)
        for layer in captured.values()
        if layer.keys is not None
    ]
    return token_importance(layers, config.pool_kernel), proposal.token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("look_ahead", [0, 1, 5])
@pytest.mark.parametrize("pool_kernel", [1, 7])
def test_importance_equals_loops_over_eager_attention(family: str, look_ahead: int, pool_kernel: int) -> None:
    prompt = random_prompt(50)
    config = PrefillConfig(look_ahead=look_ahead, pool_kernel=pool_kernel)
    importance, drafted = scored_importance(family, prompt, config)
    expected = reference.importance(make_model(family, implementation="eager"), prompt, drafted, pool_kernel)
    assert len(drafted) == look_ahead
    np.testing.assert_allclose(importance.numpy(), expected, atol=2e-6)


def test_the_stage_selects_by_that_importance() -> None:
    prompt = random_prompt(150)
    config = replace(PrefillConfig.full_look_ahead(0.3), look_ahead=4, pool_kernel=5, chunk_size=8)
    model = make_model()
    install(model)
    draft = CachedModel(model, 4096)
    selection, proposal = score_prompt(draft, prompt, config)
    scores = reference.importance(make_model(implementation="eager"), prompt, proposal.token_ids, 5)
    assert list(selection.positions) == reference.selected_positions(scores, 0.3, 8, 1, 1)
    assert list(selection.token_ids) == [prompt[position] for position in selection.positions]


def test_no_attention_layer_and_non_finite_attention_are_errors() -> None:
    with pytest.raises(ValueError, match="no attention layer"):
        token_importance([], 13)
    with pytest.raises(ValueError, match="not finite"):
        token_importance([ScoredLayer(torch.full((2, 1, 4), torch.nan), torch.ones(2, 9, 4), 1.0)], 1)


@pytest.mark.parametrize("devices", [("meta", "cpu"), ("meta", "cpu", "cpu"), ("meta", "meta", "cpu")])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_heads_of_layers_on_several_devices_are_reduced_together(devices: tuple[str, ...], num_queries: int) -> None:
    # Meta stands for another card.
    queries, keys = torch.randn(4, num_queries, 8), torch.randn(2, 50, 8)
    layers = [ScoredLayer(queries.to(device), keys.to(device), 1.0) for device in devices]
    attention = CapturedAttention(dict(enumerate(layers)))
    for reduction, shape in (("max", (num_queries, 50)), ("mean", (50,))):
        config = PrefillConfig(head_reduction=reduction, first_scoring_layer=0)
        assert attention.reduce_heads(config, ()).shape == shape


def test_scores_of_half_precision_keys_are_computed_in_fp32() -> None:
    queries, keys = 8 * torch.randn(4, 3, 16).bfloat16(), 8 * torch.randn(2, 50, 16).bfloat16()
    expected = attention_to_prompt(queries.float(), keys.float(), 0.25)
    torch.testing.assert_close(attention_to_prompt(queries, keys, 0.25), expected)


def captured(num_layers: int, num_segments: int, device: str = "cpu") -> CapturedAttention:
    """Attention of random queries, two for each segment, to 200 tokens."""
    segments = tuple(Segment((2 * at, 2 * at + 2), (100 + at, 101 + at), at == 1) for at in range(num_segments))
    queries = torch.randn(num_layers, 4, 2 * num_segments, 8, device=device)
    keys = torch.randn(num_layers, 2, 200, 8, device=device)
    layers = {at: ScoredLayer(queries[at], keys[at], 0.3) for at in range(num_layers)}
    return CapturedAttention(layers, 2 * num_segments, segments=segments)


def test_few_operations_reduce_the_attention_and_no_layer_is_waited_for() -> None:
    launches, waits = {}, set()
    for num_layers, num_segments in ((4, 5), (4, 6), (5, 6)):
        attention = captured(num_layers, num_segments)
        with Operators() as operators, read_backs() as reads:
            attention.importance(PrefillConfig(first_scoring_layer=0))
        launches[num_layers, num_segments] = operators.num_launches
        waits.add(tuple(reads))
    # Whether a segment asks, the segments' weights, and whether all is finite.
    assert waits == {("__bool__", "tolist", "__bool__")}
    assert launches[5, 6] - launches[4, 6] <= 50
    # Two for every layer, and one for the segment's weight.
    assert launches[4, 6] - launches[4, 5] <= 9


def test_the_host_waits_for_no_copy() -> None:
    # There is nothing to read on meta, which stands for a card.
    attention = captured(1, 2, "meta")
    with blocking_copies() as found:
        head_importance(choose_heads(attention.layers[0], [0, 3]), 4, attention.segments, (0.5, 1.0))
    assert found == []


def test_heads_that_do_not_fit_at_once_score_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, sinks = torch.randn(6, 3, 8), torch.randn(3, 40, 8), torch.randn(6)
    layer = ScoredLayer(queries, keys, 0.3, sinks)
    at_once = head_importance(layer), largest_attention(layer, 5)
    monkeypatch.setattr(prefill_importance, "MOST_WEIGHTS", 2 * 2 * 3 * 40)
    with Operators() as operators:
        torch.testing.assert_close((head_importance(layer), largest_attention(layer, 5)), at_once)
    # Two key heads with their query heads, then the third one.
    assert operators.names.count("aten._softmax.default") == 4


def test_who_asks_by_place_counts_in_full_whatever_the_last_token_attends_to() -> None:
    attention = torch.zeros(400)
    for (start, stop), seen in (((0, 10), 0.8), ((20, 30), 0.02), ((30, 40), 0.01), ((300, 310), 0.4)):
        attention[start:stop] = seen
    system, first, second, plan = (Segment(span, span) for span in ((0, 10), (20, 30), (30, 40), (300, 310)))
    asking = [replace(first, asks=True), replace(second, asks=True)]
    assert segment_weights(attention, [system, *asking, plan]) == pytest.approx([0.5, 1, 0.5, 0.25])
    asking[1] = replace(asking[1], is_question=True)
    assert segment_weights(attention, [system, *asking, plan]) == pytest.approx([0.5, 1, 1, 0.25])
    asking[1] = replace(second, asks=True, is_marked=True)
    assert segment_weights(attention, [system, *asking, plan]) == pytest.approx([0.5, 0.4, 1, 0.25])
    assert segment_weights(attention, [system, first, second, plan]) == pytest.approx([1, 0.025, 0.0125, 0.5])


@pytest.mark.parametrize("sharp", [0.5, 0.02])
def test_several_questions_share_the_largest_attention(sharp: float) -> None:
    attention = torch.zeros(3, 60)
    attention[0, 3:5], attention[1, 7:9], attention[2, 11:13] = sharp, 0.1, 0.4
    segments = [Segment((at, at + 1), (50 + 2 * at, 52 + 2 * at)) for at in range(3)]
    found = over_queries(attention, segments, [1.0, 1.0, 0.5])
    most = max(sharp, 0.1)
    assert found[[3, 7]].tolist() == pytest.approx([most, most])
    alone = over_queries(attention, segments, [1.0, 0.75, 0.5])
    assert alone[[3, 7]].tolist() == pytest.approx([sharp, 0.75 * 0.1 - 0.25 * 0.1])
