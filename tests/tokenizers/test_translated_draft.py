"""A draft with another tokenizer: what it is fed, what it proposes and selects; no token of the target changes."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.demo import hide_fact
from spec_stack.hf.attention import install
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import run_draft
from spec_stack.tokenizers.translated_draft import TranslatedDraft
from spec_stack.tokenizers.translation import Translation
from spec_stack.tokenizers.vocabulary import compare
from spec_stack.types import DraftTokenization, Proposal
from tests.support import reference
from tests.support.forwards import forwards_of, positions_of
from tests.support.models import make_model, make_tokenizer
from tests.support.nightly import others_nightly
from tests.support.retokenize import drop_merges
from tests.support.tiny_architectures import make_model as make_architecture

TARGET_TOKENS = "a b c d e f ab abc de cd"
DRAFT_TOKENS = "f e bc d abc c b ef a"
CODE = "def read_lines(path):\n    with open(path) as file:\n"


def text_of(length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("abcdef", k=length))


def make_translation(bos: bool = False) -> Translation:
    target = make_tokenizer(TARGET_TOKENS, "<t>", bos=bos)
    draft = make_tokenizer(DRAFT_TOKENS, "<s>", bos=bos)
    return Translation(target, draft, compare(target, draft, 16, 12))


def make_generator(config: PrefillConfig | None = None, bos: bool = False) -> SpecStackGenerator:
    tokenizers = make_tokenizer(TARGET_TOKENS, "<t>", bos=bos), make_tokenizer(DRAFT_TOKENS, "<s>", bos=bos)
    models = make_model(seed=1, vocab=16), make_model(seed=2, vocab=12)
    settings = SpecStackConfig(config or PrefillConfig(chunk_size=8, granularity="chunks"))
    return SpecStackGenerator(*models, tokenizers[0], config=settings, draft_tokenizer=tokenizers[1])


def positions_read(generator: SpecStackGenerator, **options: Any) -> list[int]:
    with forwards_of(generator.target) as read:
        next(generator.stream(max_tokens=1, **options))
    return positions_of(read)


@pytest.mark.parametrize("bos", [False, True])
def test_tokens_that_the_draft_has_no_row_for_never_reach_it(bos: bool) -> None:
    """Its beginning-of-text token, and a special token that the target's tokenizer has too."""
    target, draft = make_tokenizer(TARGET_TOKENS, "<t>"), make_tokenizer(DRAFT_TOKENS, "<s>")
    for tokenizer in (target, draft):
        tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]})
    if bos:
        rules = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", len(draft) - 1)])
        draft.backend_tokenizer.post_processor = rules
    models = make_model(seed=1, vocab=len(target)), make_model(seed=2, vocab=len(draft) - 1)
    generator = SpecStackGenerator(*models, target, draft_tokenizer=draft)
    plain = SpecStackGenerator(models[0], models[0], target)
    for prompt in ("abc<x>de", "<x>", "abcdef"):
        expected = plain.generate(prompt, max_tokens=6, sparse_prefill="off").token_ids
        assert generator.generate(prompt, max_tokens=6, gamma=3, sparse_prefill="off").token_ids == expected


@pytest.fixture(scope="module")
def retokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retokenized")
    drop_merges(ASSETS / "draft", folder, 0.1, seed=0, tokenizer_from=ASSETS / "target")
    return folder


@pytest.mark.parametrize(
    ("pruned", "bos"), others_nightly(product((False, True), (False, True)), usual=[(False, False), (True, True)])
)
def test_greedy_tokens_are_the_targets_own(pruned: bool, bos: bool) -> None:
    generator = make_generator(bos=bos)
    prompt = generator.tokenizer(text_of(160, int(bos))).input_ids
    options = {"input_ids": prompt, "max_tokens": 40, "sparse_prefill": "on" if pruned else "off"}
    plain = generator.generate(gamma=0, **options).token_ids
    if not pruned:
        assert plain == reference.greedy(generator.target, prompt, 40)
    for gamma in (1, 8):
        result = generator.generate(gamma=gamma, **options)
        assert result.token_ids == plain
        assert result.metrics.num_proposed
        assert result.metrics.sparse_prefill == pruned


def test_a_draft_whose_ids_alone_differ_works_as_the_original(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    """Every token has its counterpart, so nothing may be lost in translation."""
    drop_merges(ASSETS / "draft", tmp_path, 0.0, seed=1, tokenizer_from=ASSETS / "target")
    shuffled = SpecStackGenerator.from_pretrained(ASSETS / "target", tmp_path, device="cpu", precision="fp32")
    assert shuffled.pair.vocabulary.relation == "other"
    assert len(shuffled.pair.vocabulary.common) == 4096
    messages = hide_fact(embedded.tokenizer, 2500, seed=3).messages
    for options in (
        {"messages": messages, "sparse_prefill": "on", "gamma": 4},
        {"messages": messages, "sparse_prefill": "on", "gamma": 4, "keep_rate": 0.1, "max_dropped_attention": 0.9},
        {"prompt": CODE, "gamma": 6},
        {"prompt": CODE, "gamma": 6, "temperature": 1.0, "seed": 5},
    ):
        one, two = (generator.generate(max_tokens=40, **options) for generator in (embedded, shuffled))
        assert two.token_ids == one.token_ids
        assert two.metrics.gamma_trace == one.metrics.gamma_trace
        assert two.metrics.num_accepted == one.metrics.num_accepted > 0
        shares = ([each.dropped_attention for each in result.metrics.tried_rates] for result in (one, two))
        assert next(shares) == pytest.approx(next(shares), rel=1e-3)
    options = {"messages": messages, "sparse_prefill": "on", "keep_rate": 0.1}
    assert positions_read(shuffled, **options) == positions_read(embedded, **options)


def test_with_fewer_merges_the_fact_is_still_kept_and_drafts_accepted(retokenized: Path) -> None:
    generator = SpecStackGenerator.from_pretrained(ASSETS / "target", retokenized, device="cpu", precision="fp32")
    fact = hide_fact(generator.tokenizer, 3000, seed=5)
    result = generator.generate(messages=fact.messages, max_tokens=32, sparse_prefill="on", keep_rate=0.2)
    assert fact.is_answered_by(result.text)
    assert result.metrics.keep_rate < 0.25
    assert result.metrics.num_scored_tokens == result.metrics.num_prompt_tokens
    options = {"messages": fact.messages, "max_tokens": 32, "sparse_prefill": "on", "keep_rate": 0.2}
    checked = generator.generate(**options, max_dropped_attention=1)
    assert checked.token_ids == result.token_ids
    assert 0 < (checked.metrics.dropped_attention or 0) < 1
    drafted = generator.generate(fact.document[:2000], max_tokens=60, gamma=4, ignore_eos=True)
    assert drafted.metrics.num_accepted > 10


@pytest.mark.parametrize("seed", range(4))
def test_the_prompt_is_scored_in_the_drafts_tokens_and_selected_in_the_targets(seed: int) -> None:
    last_token = {"scoring_queries": "look_ahead", "look_ahead": 0, "head_reduction": "max"}
    config = PrefillConfig(
        keep_rate=0.3, granularity="chunks", pool_kernel=5, chunk_size=4, first_scoring_layer=0, **last_token
    )  # type: ignore[arg-type]
    generator = make_generator(config)
    # The last target token is one draft token, so that the last draft token alone asks.
    text = text_of(120, seed) + "f"
    target, draft = (
        tokenizer(text, return_offsets_mapping=True)
        for tokenizer in (generator.tokenizer, make_tokenizer(DRAFT_TOKENS, "<s>"))
    )
    assert target.offset_mapping != draft.offset_mapping
    eager = make_model(seed=2, vocab=12, implementation="eager")
    scores = reference.importance(eager, draft.input_ids, [], 5)
    mapped = reference.importance_by_characters(scores.tolist(), target.offset_mapping, draft.offset_mapping)
    expected = reference.selected_positions(mapped, 0.3, 4, 1, 1)
    assert positions_read(generator, prompt=text, sparse_prefill="on") == expected


def masked(logits: torch.Tensor, translation: Translation) -> torch.Tensor:
    row = torch.full((translation.vocabulary.num_target,), -torch.inf)
    for target_id, draft_id in translation.vocabulary.common.items():
        row[target_id] = logits[draft_id]
    return row


@pytest.mark.parametrize("bos", [False, True])
def test_after_any_reading_and_rollback_the_logits_are_those_of_a_fresh_draft(bos: bool) -> None:
    translation, model = make_translation(bos), make_model(seed=2, vocab=12)
    install(model)
    tokenizer = make_tokenizer(TARGET_TOKENS, "<t>", bos=bos)
    prompt = tokenizer(text_of(50)).input_ids
    tokenization = translation.tokenize(prompt)
    draft = TranslatedDraft(CachedModel(model, 4096), translation, tokenization)
    draft.forward(prompt[:-1], range(len(prompt) - 1), 1)
    rng, later = random.Random(0), [prompt[-1]]
    logits = draft.forward(later, [len(prompt) - 1], 1)
    for _ in range(12):
        if rng.random() < 0.5 and len(later) > 1:
            gone = rng.randint(0, len(later) - 1)
            draft.rollback(gone)
            later = later[: len(later) - gone]
        new = [rng.randrange(1, 11) for _ in range(rng.randint(1, 4))]
        start = draft.next_position
        assert start == len(prompt) - 1 + len(later)
        logits = draft.forward(new, range(start, start + len(new)), 1)
        later += new
        fed = [*tokenization.token_ids, *(piece for token in later[1:] for piece in translation.pieces(token))]
        expected = masked(reference.logits(model, fed, range(len(fed)))[-1], translation)
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
        assert draft.num_cached == len(fed)


@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_the_last_prompt_token_yields_the_logits_of_the_whole_prompt(size: int) -> None:
    """Read in parts, of which each waits for the draft token that ends in the next one. Also a last token without one
    of the draft, for which the draft's last one waits; and in the turn after, again."""
    translation, model = make_translation(), make_model(seed=2, vocab=12)
    install(model)
    prompt = make_tokenizer(TARGET_TOKENS, "<t>")(text_of(20)).input_ids
    known = translation.tokenize(prompt)
    num_draft = len(known.token_ids)
    expected = masked(reference.logits(model, known.token_ids, range(num_draft))[-1], translation)
    for ids, ranges in ((prompt, known.ranges), ([*prompt, 5], [*known.ranges, (num_draft, num_draft)])):
        index = CachedModel(model, 4096)
        draft = TranslatedDraft(index, translation, DraftTokenization(known.token_ids, ranges))
        for start in range(0, len(ids) - 1, size):
            part = range(start, min(start + size, len(ids) - 1))
            draft.prefill([ids[position] for position in part], part)
            assert index.num_cached <= ranges[part.stop][0]
        for _ in range(2):
            assert draft.next_position == len(ids) - 1
            logits = draft.forward(ids[-1:], [len(ids) - 1], 1)
            torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
            assert index.num_cached == num_draft
            draft = TranslatedDraft(index, translation, DraftTokenization(known.token_ids, ranges))


def test_the_kept_slots_are_those_of_the_kept_tokens_and_of_the_drafts_own_beginning() -> None:
    translation, model = make_translation(bos=True), make_model(seed=2, vocab=12)
    install(model)
    prompt = make_tokenizer(TARGET_TOKENS, "<t>", bos=True)(text_of(60)).input_ids
    tokenization, size = translation.tokenize(prompt), len(prompt)
    assert tokenization.token_ids[0] == 0
    assert tokenization.ranges[0] == (1, 1)
    draft, by_hand = TranslatedDraft(CachedModel(model, 4096), translation, tokenization), CachedModel(model, 4096)
    draft.forward([*prompt, 1, 8], range(size + 2), 1)
    kept = [3, 4, 10, *range(size - 5, size)]
    draft.keep_slots([*kept, size, size + 1])
    draft.rollback(1)
    logits = draft.forward([9], [size + 1], 1)

    whole = [*tokenization.token_ids, *translation.pieces(1)]
    by_hand.forward(whole, range(len(whole)), 1)
    slots = sorted({0, *(slot for token in kept for slot in range(*tokenization.ranges[token]))})
    by_hand.keep_slots([*slots, *range(len(tokenization.token_ids), len(whole))])
    pieces = translation.pieces(9)
    expected = by_hand.forward(pieces, range(len(whole), len(whole) + len(pieces)), 1)[0]
    torch.testing.assert_close(logits[0], masked(expected, translation), atol=1e-4, rtol=1e-4)
    assert draft.num_cached == by_hand.num_cached < len(whole)


@pytest.mark.parametrize("name", ["Falcon-H1", "Llama"])
@pytest.mark.parametrize("bos", [False, True])
def test_a_draft_that_goes_back_into_the_scoring_queries_scores_as_a_fresh_one(name: str, bos: bool) -> None:
    """A recurrent state goes over tokens before them again."""
    translation, model = make_translation(bos), make_architecture(name, disturbed=True)
    install(model)
    prompt = make_tokenizer(TARGET_TOKENS, "<t>", bos=bos)(text_of(300)).input_ids
    tokenization, config = translation.tokenize(prompt), PrefillConfig(first_scoring_layer=0)

    def importance(index: CachedModel) -> torch.Tensor:
        draft = TranslatedDraft(index, translation, tokenization)
        attention, _ = run_draft(draft, ScoringInputs(PromptText(prompt)), lambda *_: Proposal(), config, tokenization)
        return attention.importance(config)

    expected = importance(CachedModel(model, 4096))
    for num_cached in (50, len(prompt) - 1):
        index = CachedModel(model, 4096)
        TranslatedDraft(index, translation, tokenization).prefill(prompt[:num_cached], range(num_cached))
        torch.testing.assert_close(importance(index), expected, atol=1e-5, rtol=1e-3)


def test_other_positions_than_the_next_ones_are_refused() -> None:
    translation, model = make_translation(), make_model(seed=2, vocab=12)
    prompt = make_tokenizer(TARGET_TOKENS, "<t>")("abcabcd").input_ids
    draft = TranslatedDraft(CachedModel(model, 4096), translation, translation.tokenize(prompt))
    with pytest.raises(ValueError, match="goes on from its next position"):
        draft.forward(prompt, range(1, len(prompt) + 1), 1)
    with pytest.raises(ValueError, match="cannot roll back 1 of 0"):
        draft.rollback(1)


def test_ids_that_are_not_what_the_tokenizer_gives_are_scored_by_their_characters() -> None:
    """Generated answers are not always in the tokens that their text would be given."""
    generator = make_generator()
    translation, other = make_translation(), make_tokenizer(DRAFT_TOKENS, "<s>")
    letters = [generator.tokenizer.convert_tokens_to_ids(letter) for letter in "abcabcdef" * 14]
    text = generator.tokenizer.decode(letters)
    assert generator.tokenizer(text).input_ids != letters
    tokenization = translation.tokenize(letters)
    spans = other(text, return_offsets_mapping=True).offset_mapping
    assert list(tokenization.token_ids) == other(text).input_ids
    for at, (start, stop) in enumerate(tokenization.ranges):
        assert [index for index, (first, last) in enumerate(spans) if first <= at < last] == list(range(start, stop))
    result = generator.generate(input_ids=letters, max_tokens=30, sparse_prefill="on", gamma=3)
    assert result.metrics.sparse_prefill
    assert result.metrics.num_scored_tokens == len(letters)
    plain = generator.generate(input_ids=letters, max_tokens=30, sparse_prefill="on", gamma=0)
    assert result.token_ids == plain.token_ids


def test_tokens_that_share_a_character_share_its_draft_tokens(retokenized: Path) -> None:
    generator = SpecStackGenerator.from_pretrained(ASSETS / "target", retokenized, device="cpu", precision="fp32")
    whole = generator.tokenizer("naïve café ☕ " * 40 + "☕").input_ids
    assert generator.pair.token_bytes(whole[-2]) + generator.pair.token_bytes(whole[-1]) in "☕".encode()
    tokenization, _ = generator.pair.tokenize_for_draft(whole)
    assert tokenization is not None
    assert tokenization.ranges[-1][0] <= tokenization.ranges[-2][0] < tokenization.ranges[-2][1]
    for prompt in (whole, whole[:-1]):
        metrics = generator.generate(input_ids=prompt, max_tokens=2, sparse_prefill="on").metrics
        assert metrics.sparse_prefill


def test_the_drafts_positions_are_counted_in_its_own_tokens() -> None:
    prompt = make_generator().tokenizer("abde" * 20).input_ids
    assert len(prompt) == 40
    for num_positions, is_scored in ((80 + MOST_REPEATED, True), (79 + MOST_REPEATED, False)):
        chunks = PrefillConfig(look_ahead=6, keep_first=0, keep_last=1, chunk_size=4, granularity="chunks")
        each = make_generator(chunks)
        each.draft.config.max_position_embeddings = num_positions
        metrics = each.generate(input_ids=prompt, max_tokens=9, sparse_prefill="on").metrics
        assert metrics.sparse_prefill == is_scored
        assert (f"80 tokens, and the draft {num_positions} positions" in metrics.sparse_prefill_reason) != is_scored
