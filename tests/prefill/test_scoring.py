"""The stage with its cheaper ways through the prompt: a window, the first layers, no draft at all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.decode.proposer import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.attention import CapturedAttention, Parts, run, scored_layers
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import WINDOW, find_candidates
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import ScoringQueries, capture_in_parts, num_layers_needed, run_draft
from spec_stack.types import Proposal
from tests.support import reference, reference_architectures
from tests.support.models import make_model, random_prompt
from tests.support.nightly import others_nightly
from tests.support.scoring import score_prompt
from tests.support.tiny_architectures import CONFIGS
from tests.support.tiny_architectures import make_model as make_architecture
from tests.tokenizers.test_translated_draft import make_generator, text_of

BASE = {
    "keep_rate": 0.3,
    "granularity": "chunks",
    "chunk_size": 8,
    "look_ahead": 4,
    "pool_kernel": 5,
    "first_scoring_layer": 0,
    "head_reduction": "max",
}
PROMPT = random_prompt(150)
LONG = random_prompt(260)
WAYS = {
    "windowed": {"draft_window": 16, "draft_sinks": 4},
    "early exit": {"scoring_heads": ((1, 0), (1, 1))},
    "windowed early exit": {"draft_window": 16, "draft_sinks": 4, "scoring_heads": ((0, 0), (0, 1))},
    "bm25": {"scorer": "bm25"},
    "some heads": {"scoring_heads": ((1, 0), (2, 3))},
}


def open_draft(prefill_chunk: int = 4096) -> CachedModel:
    model = make_model()
    install(model)
    return CachedModel(model, prefill_chunk)


def scored(draft: CachedModel, config: PrefillConfig, prompt: list[int] = PROMPT):  # type: ignore[no-untyped-def]
    return score_prompt(draft, prompt, config)


def candidates_of(
    prompt: list[int], protected: list[tuple[int, int]] | None = None, pieces: list[str] | None = None
) -> dict[str, object]:
    """The candidates as the oracle takes them."""
    found = find_candidates(PromptText(prompt, pieces, protected or []))
    cut = found.num_repeated
    return {
        "repeated": found.segments[:cut],
        "in_place": found.segments[cut:],
        "asks": found.asks,
        "is_question": found.is_question,
        "is_marked": found.is_marked,
    }


@pytest.mark.parametrize(
    ("queries", "prefill_chunk"), others_nightly([("prompt", 31), ("look_ahead", 4096)], usual=[("look_ahead", 4096)])
)
def test_a_windowed_draft_selects_by_the_scores_of_an_explicit_mask(queries: str, prefill_chunk: int) -> None:
    settings = {**BASE, "scoring_queries": queries}
    config = PrefillConfig(**settings, draft_window=16, draft_sinks=4, prefill_chunk=prefill_chunk)  # type: ignore[arg-type]
    selection, proposal = scored(open_draft(prefill_chunk), config, LONG)
    found = candidates_of(LONG)
    eager = make_model(implementation="eager")
    if queries == "prompt":
        window = reference_architectures.WindowedPrefill(len(LONG) - WINDOW, 16, 4)
        expected = reference.question_importance(eager, LONG, **found, pool_kernel=5, prefill=window)  # type: ignore[arg-type]
    else:
        window = reference_architectures.WindowedPrefill(len(LONG) - 1, 16, 4)
        expected = reference.importance(eager, LONG, proposal.token_ids, 5, prefill=window)
    assert list(selection.positions) == reference.selected_positions(expected, 0.3, 8, 1, 1)
    dense, _ = scored(open_draft(), PrefillConfig(**settings), LONG)  # type: ignore[arg-type]
    assert list(dense.positions) != list(selection.positions)


def test_a_window_of_long_prompts_is_dense_in_shorter_ones() -> None:
    kept = {
        window: list(scored(open_draft(), PrefillConfig(**BASE, draft_window=window, draft_sinks=4), LONG)[0].positions)  # type: ignore[arg-type]
        for window in (None, 16, (len(LONG), 16), (len(LONG) + 1, 16))
    }
    assert kept[len(LONG), 16] == kept[16] != kept[None] == kept[len(LONG) + 1, 16]


TURNS = [(0, 30), (120, 128), (240, 246)]
# Lines and paragraphs end here, or there is no text.
PLACES: dict[str, dict[int, str] | None] = {
    "turns": None,
    "paragraphs": {228: "\n", 240: "\n"} | dict.fromkeys((150, 190, 214), ".\n\n"),
    **{
        f"marks at {marks}": {150: ".\n\n", 230: ".\n"}
        | dict.fromkeys(marks, "?")
        | {at + 1: "\n" for at in marks if at < 249}
        for marks in ((240, 249), (200, 249), (140,), (140, 215))
    },
}
_OF_ALL = ("turns", "marks at (240, 249)")


@pytest.mark.parametrize(
    ("heads", "places"),
    [
        *(pytest.param(((0, 3), (2, 1)), places, id=f"two heads, {places}") for places in PLACES),
        # Of all heads the loops take seconds; two of them run by day.
        *(
            pytest.param(
                None, places, id=f"all heads, {places}", marks=[] if places in _OF_ALL else pytest.mark.nightly
            )
            for places in PLACES
        ),
    ],
)
def test_segments_of_the_question_score_as_loops_over_eager_attention(
    heads: tuple[tuple[int, int], ...] | None, places: str
) -> None:
    """Those before the window run again behind the prompt, the others score in place; those that ask by their place
    count in full, the others half at most, question marks five times, and those at the end alike."""
    prompt, ends = random_prompt(250), PLACES[places]
    pieces = None if ends is None else [ends.get(at, " w") for at in range(250)]
    protected = [] if pieces else TURNS
    reduction = {"head_reduction": "max" if heads is None else "mean", "scoring_heads": heads}
    config, draft = PrefillConfig(**(BASE | reduction)), open_draft()  # type: ignore[arg-type]
    inputs = ScoringInputs(PromptText(prompt, pieces, protected))
    attention, proposal = run_draft(draft, inputs, lambda *_: pytest.fail("no look-ahead is needed"), config)
    assert not proposal.token_ids
    assert draft.next_position == len(prompt)
    found = candidates_of(prompt, protected, pieces)
    assert found["repeated"]
    options = {"heads": heads, "mean": heads is not None, "pool_kernel": 5}
    expected = reference.question_importance(make_model(implementation="eager"), prompt, **found, **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(attention.importance(config).numpy(), expected, atol=2e-5 if pieces else 2e-6)


def test_layers_behind_the_chosen_heads_change_nothing() -> None:
    """A session runs all layers, and a single call those that scoring needs."""
    prompt = random_prompt(250)
    config = PrefillConfig(**(BASE | {"head_reduction": "mean", "scoring_heads": ((0, 1), (1, 2))}))  # type: ignore[arg-type]
    found = []
    for num_layers in (None, 2):
        inputs = ScoringInputs(PromptText(prompt, None, TURNS))
        attention, _ = run_draft(
            open_draft(), inputs, lambda *_: pytest.fail("none is needed"), config, None, num_layers
        )
        found.append(attention.importance(config))
    assert len(attention.layers) == num_layers_needed(config, 3) == 2
    torch.testing.assert_close(*found)


def test_one_forward_has_the_prompt_and_what_is_read_again() -> None:
    prompt, draft = random_prompt(250), open_draft()
    begun: list[object] = []
    draft.model.register_forward_pre_hook(lambda *_: begun.append(None))
    attention, _ = run_draft(
        draft, ScoringInputs(PromptText(prompt, None, TURNS)), lambda *_: Proposal(), PrefillConfig()
    )
    assert attention.candidates is not None
    assert attention.candidates.repeated
    assert (len(begun), draft.next_position) == (1, len(prompt))


@pytest.mark.parametrize("way", WAYS)
def test_whoever_scores_the_tokens_are_those_of_the_pruned_prompt(way: str) -> None:
    config = PrefillConfig(**BASE, **WAYS[way])  # type: ignore[arg-type]
    generator = SpecStackGenerator(make_model(seed=1), make_model(), config=SpecStackConfig(config))
    result = generator.generate(input_ids=PROMPT, max_tokens=24, sparse_prefill="on", gamma=3)
    assert result.metrics.sparse_prefill, result.metrics.sparse_prefill_reason
    kept = list(scored(open_draft(), config)[0].positions)
    kept_ids = [PROMPT[position] for position in kept]
    assert result.token_ids == reference.sparse_greedy(make_model(seed=1), kept_ids, kept, len(PROMPT), 24)


def test_a_draft_that_has_not_seen_the_prompt_holds_the_kept_tokens_and_reads_them_when_it_is_fed() -> None:
    draft = open_draft()
    selection, proposal = scored(draft, PrefillConfig(**BASE, **WAYS["bm25"]))  # type: ignore[arg-type]
    kept = list(selection.positions)
    # Nothing is drafted before the target's first token.
    assert not proposal.token_ids
    assert (draft.next_position, draft.draft_lag(len(PROMPT) + 1)) == (len(PROMPT), len(kept) + 1)
    got = draft.forward([7], [len(PROMPT)], 1)
    expected = reference.logits(make_model(), [*(PROMPT[at] for at in kept), 7], [*kept, len(PROMPT)])
    torch.testing.assert_close(got, expected[-1:], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("way", "name"),
    others_nightly(
        product(
            ("windowed early exit", "windowed"),
            [name for name in CONFIGS if name not in ("Mistral, sliding", "Nemotron-H")],
        ),
        usual=[
            *(("windowed early exit", name) for name in ("Llama", "Gemma3", "GPT-OSS", "Qwen3.5", "Falcon-H1")),
            *(("windowed", name) for name in ("Qwen3-MoE", "Bamba", "Qwen3-Next")),
        ],
    ),
)
def test_every_architecture_scores_with_a_window_and_by_its_first_layers(name: str, way: str) -> None:
    config = PrefillConfig(**BASE, **WAYS[way] | ({"scoring_heads": ((0, 0), (1, 1))} if "exit" in way else {}))  # type: ignore[arg-type]
    draft = make_architecture(name, disturbed=True)
    generator = SpecStackGenerator(make_architecture("Llama"), draft, config=SpecStackConfig(config))
    result = generator.generate(input_ids=PROMPT, max_tokens=8, sparse_prefill="on", gamma=3)
    assert result.metrics.sparse_prefill, result.metrics.sparse_prefill_reason
    assert result.metrics.num_kept_tokens < 0.5 * len(PROMPT)


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_with_another_tokenizer_goes_every_way(way: str) -> None:
    generator = make_generator(PrefillConfig(**BASE, **WAYS[way]))  # type: ignore[arg-type]
    prompt = generator.tokenizer(text_of(300)).input_ids
    result = generator.generate(input_ids=prompt, max_tokens=24, sparse_prefill="on", gamma=3)
    assert result.metrics.sparse_prefill, result.metrics.sparse_prefill_reason
    assert result.metrics.num_kept_tokens < 0.5 * len(prompt)
    plain = generator.generate(input_ids=prompt, max_tokens=24, sparse_prefill="on", gamma=0)
    assert result.token_ids == plain.token_ids


def test_bm25_prune_for_a_draft_that_sees_too_little_to_score() -> None:
    draft = make_architecture("Mistral, sliding")
    reasons = []
    for scorer in ("attention", "bm25"):
        config = SpecStackConfig(PrefillConfig(**BASE, scorer=scorer))  # type: ignore[arg-type]
        generator = SpecStackGenerator(make_architecture("Llama"), draft, config=config)
        metrics = generator.generate(input_ids=PROMPT, max_tokens=6, sparse_prefill="on", gamma=2).metrics
        reasons.append((metrics.sparse_prefill, metrics.sparse_prefill_reason))
    assert [is_on for is_on, _ in reasons] == [False, True], reasons


@pytest.mark.parametrize("queries_of", ["prompt", "look_ahead"])
@pytest.mark.parametrize("size", [1, 40, 1000])
def test_parts_of_any_size_score_a_prompt_alike(size: int, queries_of: str) -> None:
    config, num_parts = PrefillConfig(**{**BASE, "scoring_queries": queries_of}), 0
    text, draft = PromptText(LONG), open_draft()
    queries = ScoringQueries.of(text, config)
    look_ahead = partial(propose, sampler=Sampler(), end_ids=())

    def drafted(committed_ids: Sequence[int], most: int) -> Parts[Proposal]:
        yield
        return look_ahead(draft, committed_ids, most)

    def counted() -> Parts[CapturedAttention]:
        nonlocal num_parts
        parts = capture_in_parts(draft, queries, drafted, config, most_of_a_part=lambda _: size)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                captured, proposal, _ = end.value
                assert len(proposal.token_ids) == (config.look_ahead if queries_of == "look_ahead" else 0)
                return queries.attention(scored_layers(captured, len(text)))
            num_parts += 1
            yield

    found = run(counted()).importance(config)
    other = open_draft()
    whole, _ = run_draft(other, ScoringInputs(text), partial(look_ahead, other), config)
    torch.testing.assert_close(found, whole.importance(config), rtol=1e-4, atol=1e-6)
    # The last part has all scoring queries, and a look-ahead one of its own.
    num_last = max(size, len(text) - queries.start)
    assert num_parts == -(-len(text) // num_last) + (queries_of == "look_ahead")
