"""The stage with its cheaper ways through the prompt: a window, the first layers, no draft at all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.scoring import look_at, num_layers_needed, score_prompt
from tests.support import reference, reference_architectures
from tests.support.models import make_model, random_prompt
from tests.support.tiny_architectures import CONFIGS
from tests.support.tiny_architectures import make_model as make_architecture
from tests.tokenizers.test_translated_draft import make_generator, text_of

BASE = {
    "keep_rate": 0.3,
    "unit": "chunks",
    "chunk_size": 8,
    "look_ahead": 4,
    "pool_kernel": 5,
    "skipped_layers": 0,
}
PROMPT = random_prompt(150)
WAYS = {
    "windowed": {"draft_window": 16, "draft_sinks": 4},
    "early exit": {"scoring_layers": 2},
    "windowed early exit": {"draft_window": 16, "draft_sinks": 4, "scoring_layers": 1},
    "anchors": {"scorer": "anchors"},
    "fused, some heads, neighbours": {"scorer": "fused", "scoring_heads": ((1, 0), (2, 3)), "neighbour_share": 0.5},
}


def open_draft(prefill_chunk: int = 4096) -> CachedModel:
    model = make_model()
    install(model)
    return CachedModel(model, prefill_chunk)


def scored(draft: CachedModel, config: PrefillConfig):  # type: ignore[no-untyped-def]
    return score_prompt(draft, PROMPT, partial(propose, draft, sampler=Sampler(), end_ids=()), config)


@pytest.mark.parametrize("prefill_chunk", [4096, 31])
@pytest.mark.parametrize(("queries", "num_tail"), [("prompt", 5), ("look_ahead", 1)])
def test_a_windowed_draft_selects_by_the_scores_of_an_explicit_mask(
    queries: str, num_tail: int, prefill_chunk: int
) -> None:
    asked = {**BASE, "scoring_queries": queries}
    config = PrefillConfig(**asked, draft_window=16, draft_sinks=4, prefill_chunk=prefill_chunk)  # type: ignore[arg-type]
    selection, proposal = scored(open_draft(prefill_chunk), config)
    window = reference_architectures.WindowedPrefill(len(PROMPT) - num_tail, 16, 4)
    eager = make_model(implementation="eager")
    expected = reference.importance(eager, PROMPT, proposal.token_ids, 5, num_tail=num_tail, prefill=window)
    assert list(selection.positions) == reference.selected_positions(expected, 0.3, 8, 1, 2)
    dense, _ = scored(open_draft(), PrefillConfig(**asked))  # type: ignore[arg-type]
    assert list(dense.positions) != list(selection.positions)


def test_a_window_of_long_prompts_is_dense_in_shorter_ones() -> None:
    kept = {
        window: list(scored(open_draft(), PrefillConfig(**BASE, draft_window=window, draft_sinks=4))[0].positions)  # type: ignore[arg-type]
        for window in (None, 16, (len(PROMPT), 16), (len(PROMPT) + 1, 16))
    }
    assert kept[len(PROMPT), 16] == kept[16] != kept[None] == kept[len(PROMPT) + 1, 16]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_first_layers_score_as_in_a_plain_forward(num_layers: int) -> None:
    config = PrefillConfig(**BASE, scoring_layers=num_layers)  # type: ignore[arg-type]
    selection, _ = scored(open_draft(), config)
    eager = make_model(implementation="eager")
    # The last five prompt tokens ask in place of the last one and four of a look-ahead.
    expected = reference.importance(eager, PROMPT, [], 5, range(num_layers), num_tail=5)
    assert list(selection.positions) == reference.selected_positions(expected, 0.3, 8, 1, 2)


def test_heads_score_as_they_alone_do_in_eager_attention() -> None:
    draft = open_draft()
    draft.prefill(PROMPT[:-1], range(len(PROMPT) - 1))
    with draft.capture() as captured:
        draft.forward(PROMPT[-1:], [len(PROMPT) - 1], 1)
    config = PrefillConfig(**BASE, scoring_heads=((0, 3), (2, 1)))  # type: ignore[arg-type]
    got = CapturedAttention.of(captured, len(PROMPT)).importance(config)
    eager = make_model(implementation="eager")
    expected = reference.importance(eager, PROMPT, [], 5, heads=[(0, 3), (2, 1)])
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize(("queries", "num_drafted"), [("prompt", 0), ("look_ahead", 4)])
@pytest.mark.parametrize("heads", [((0, 3), (2, 1)), ((1, 0), (1, 2), (0, 1))])
def test_heads_vote_by_their_shares_of_what_is_not_kept_anyway(
    queries: str, num_drafted: int, heads: tuple[tuple[int, int], ...]
) -> None:
    """Asked by the prompt's own last tokens, each sees what stands before it alone."""
    config = PrefillConfig(**BASE, head_vote="share", scoring_heads=heads, scoring_queries=queries)  # type: ignore[arg-type]
    draft = open_draft()
    attention, proposal = look_at(draft, PROMPT, partial(propose, draft, sampler=Sampler(), end_ids=()), config)
    assert len(proposal.token_ids) == num_drafted
    eager = make_model(implementation="eager")
    num_asking = 1 if num_drafted else config.look_ahead + 1
    expected = reference.mean_share(eager, PROMPT, proposal.token_ids, heads, num_asking, config.forced_tokens)
    assert attention is not None
    np.testing.assert_allclose(attention.importance(config).numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("heads", [((0, 3), (1, 1)), ((0, 0),)])
def test_chosen_heads_need_no_layer_behind_them(heads: tuple[tuple[int, int], ...]) -> None:
    config = PrefillConfig(**BASE, head_vote="share", scoring_heads=heads, scoring_queries="prompt")  # type: ignore[arg-type]
    needed = num_layers_needed(config, 3)
    assert needed == 1 + max(layer for layer, _ in heads)
    found = []
    for num_layers in (None, needed):
        draft = open_draft()
        look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=())
        found.append(look_at(draft, PROMPT, look_ahead, config, num_layers=num_layers)[0].importance(config))
    np.testing.assert_array_equal(found[0].numpy(), found[1].numpy())


@pytest.mark.parametrize("way", WAYS)
def test_whoever_scores_the_tokens_are_those_of_the_pruned_prompt(way: str) -> None:
    config = PrefillConfig(**BASE, **WAYS[way])  # type: ignore[arg-type]
    generator = SpecStackGenerator(make_model(seed=1), make_model(), config=SpecStackConfig(config))
    result = generator.generate(input_ids=PROMPT, max_tokens=24, specprefill=True, gamma=3)
    assert result.metrics.specprefill, result.metrics.specprefill_reason
    kept = list(scored(open_draft(), config)[0].positions)
    kept_ids = [PROMPT[position] for position in kept]
    assert result.token_ids == reference.sparse_greedy(make_model(seed=1), kept_ids, kept, len(PROMPT), 24)


@pytest.mark.parametrize("way", ["early exit", "anchors"])
def test_a_draft_whose_layers_did_not_all_see_the_prompt_holds_the_kept_tokens_anew(way: str) -> None:
    draft = open_draft()
    selection, proposal = scored(draft, PrefillConfig(**BASE, **WAYS[way]))  # type: ignore[arg-type]
    kept = list(selection.positions)
    # Nothing is drafted before the target's first token, and the last prompt token is left to what comes after it.
    assert not proposal.token_ids
    assert draft.next_position == len(PROMPT) - 1
    got = draft.forward([PROMPT[-1], 7], [len(PROMPT) - 1, len(PROMPT)], 2)
    expected = reference.logits(make_model(), [*(PROMPT[at] for at in kept), 7], [*kept, len(PROMPT)])
    torch.testing.assert_close(got, expected[-2:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("Mistral, sliding", "Nemotron-H")])
@pytest.mark.parametrize("way", ["windowed early exit", "windowed"])
def test_every_architecture_scores_with_a_window_and_by_its_first_layers(name: str, way: str) -> None:
    config = PrefillConfig(**BASE, **WAYS[way] | ({"scoring_layers": 2} if "exit" in way else {}))  # type: ignore[arg-type]
    draft = make_architecture(name, disturbed=True)
    generator = SpecStackGenerator(make_architecture("Llama"), draft, config=SpecStackConfig(config))
    result = generator.generate(input_ids=PROMPT, max_tokens=8, specprefill=True, gamma=3)
    assert result.metrics.specprefill, result.metrics.specprefill_reason
    assert result.metrics.num_kept_tokens < 0.5 * len(PROMPT)


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_with_another_tokenizer_goes_every_way(way: str) -> None:
    generator = make_generator(PrefillConfig(**BASE, **WAYS[way]))  # type: ignore[arg-type]
    prompt = generator.tokenizer(text_of(300)).input_ids
    result = generator.generate(input_ids=prompt, max_tokens=24, specprefill=True, gamma=3)
    assert result.metrics.specprefill, result.metrics.specprefill_reason
    assert result.metrics.num_kept_tokens < 0.5 * len(prompt)
    plain = generator.generate(input_ids=prompt, max_tokens=24, specprefill=True, gamma=0)
    assert result.token_ids == plain.token_ids


def test_anchors_prune_for_a_draft_that_sees_too_little_to_score() -> None:
    draft = make_architecture("Mistral, sliding")
    reasons = []
    for scorer in ("attention", "anchors"):
        config = SpecStackConfig(PrefillConfig(**BASE, scorer=scorer))  # type: ignore[arg-type]
        generator = SpecStackGenerator(make_architecture("Llama"), draft, config=config)
        metrics = generator.generate(input_ids=PROMPT, max_tokens=6, specprefill=True, gamma=2).metrics
        reasons.append((metrics.specprefill, metrics.specprefill_reason))
    assert [is_on for is_on, _ in reasons] == [False, True], reasons
