from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_stack import PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.api.session import Session
from spec_stack.config import DraftStep, Positions
from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.prompt_text import clip_spans
from spec_stack.prefill.queries import WINDOW
from spec_stack.prefill.recall import recall
from spec_stack.prefill.segments import ChunkSegments
from tests.support import reference_session, tiny_architectures
from tests.support.forwards import failing, forwards_of, sizes_of
from tests.support.models import VOCAB, make_model, make_tokenizer, random_prompt
from tests.support.nightly import others_nightly
from tests.support.reference_session import Trace

SPARSE = PrefillConfig(
    granularity="chunks",
    keep_rate=0.3,
    chunk_size=8,
    min_prompt_tokens=24,
    keep_last=1,
    look_ahead=4,
    pool_kernel=3,
    on_scoring_failure="raise",
)
EAGER = SessionConfig(recall_threshold=1.0, max_recalled_chunks=4, recall_word_threshold=None)


def make_generator(prefill: PrefillConfig = SPARSE, session: SessionConfig = EAGER) -> SpecStackGenerator:
    config = SpecStackConfig(prefill, session=session)
    return SpecStackGenerator(make_model(seed=1), make_model(seed=2), config=config)


def slots(session: Session) -> tuple[list[int], list[int]]:
    """Token ids and positions of the target's slots, in the order in which they were written."""
    positions = list(session.conversation.target.positions)
    return [session.conversation.token_ids[position] for position in positions], positions


@pytest.mark.parametrize("seed", others_nightly(range(20), usual=range(4)))
def test_a_session_at_keep_rate_one_is_dense_multi_turn_whatever_is_edited_regenerated_or_forked(seed: int) -> None:
    generator = make_generator(PrefillConfig(keep_rate=1.0))
    plain = make_model(seed=1)
    session = generator.session()
    trace = Trace(seed, VOCAB)
    for action, prompt, max_tokens in trace:
        branch = session.fork() if action == "fork" else None
        expected = reference_session.eager_greedy(plain, prompt, max_tokens)
        result = session.generate(input_ids=prompt, max_tokens=max_tokens)
        assert result.token_ids == expected
        assert result.metrics.num_cached_tokens + result.metrics.num_new_tokens == len(prompt)
        if branch is not None:
            assert branch.generate(input_ids=[*prompt, 5, 6], max_tokens=3).token_ids == (
                reference_session.eager_greedy(plain, [*prompt, 5, 6], 3)
            )
            session = branch
            session.generate(input_ids=prompt, max_tokens=max_tokens)
        trace.answers.append(result.token_ids)


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_window": 24, "draft_sinks": 8}, {"draft_window": (330, 24), "draft_sinks": 8}, {"scorer": "bm25"}],
)
@pytest.mark.parametrize("seed", others_nightly(range(20), usual=range(3)))
def test_a_pruned_session_is_one_plain_forward_over_its_slots_in_the_order_written(
    seed: int, options: dict[str, Any]
) -> None:
    session = make_generator(replace(SPARSE, **options)).session()
    plain = make_model(seed=1)
    trace, num_restored = Trace(seed, VOCAB, num_turns=7, document=300), 0
    for action, prompt, max_tokens in trace:
        branch = session.fork() if action == "fork" else None
        result = session.generate(input_ids=prompt, max_tokens=max_tokens)
        trace.answers.append(result.token_ids)
        num_restored += result.metrics.num_recalled_tokens
        ids, positions = slots(session)
        assert len(set(positions)) == len(positions) == session.num_cached_tokens
        assert reference_session.answers_by_slots(plain, ids, positions, len(result.token_ids)) == result.token_ids
        num_kept = sum(position < len(prompt) for position in positions)
        assert result.metrics.num_kept_tokens == num_kept
        if branch is not None:
            again = branch.generate(input_ids=prompt, max_tokens=max_tokens)
            assert again.token_ids == result.token_ids
            assert slots(branch) == (ids, positions)
    if seed == 0 and not options:
        assert num_restored


def test_only_what_is_new_goes_through_the_models() -> None:
    generator = make_generator(PrefillConfig(keep_rate=1.0))
    session = generator.session()
    first = session.generate(input_ids=random_prompt(100), max_tokens=5, gamma=0)
    prompt = [*random_prompt(100), *first.token_ids, 7, 8, 9]
    with forwards_of(generator.target) as fed:
        second = session.generate(input_ids=prompt, max_tokens=5, gamma=0)
        # The last token of the answer has been asked for, but not been through the target.
        assert sizes_of(fed) == [4, 1, 1, 1, 1]
        fed.clear()
        again = session.generate(input_ids=prompt, max_tokens=5, gamma=0)
    assert sizes_of(fed)[0] == 1
    assert again.token_ids == second.token_ids
    metrics = second.metrics
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_new_tokens) == (108, 104, 4)
    assert not metrics.sparse_prefill


def test_the_threshold_counts_new_text_alone_and_a_long_one_is_pruned_alone() -> None:
    session = make_generator(session=SessionConfig(recall=False)).session()
    prompt = random_prompt(200)
    first = session.generate(input_ids=prompt, max_tokens=4)
    assert first.metrics.sparse_prefill
    kept = {position for position in slots(session)[1] if position < 200}
    prompt = [*prompt, *first.token_ids, *random_prompt(6, seed=3)]
    short = session.generate(input_ids=prompt, max_tokens=4)
    assert not short.metrics.sparse_prefill
    assert "new text is shorter than min_prompt_tokens=24" in short.metrics.sparse_prefill_reason
    start = len(prompt) + 3
    prompt = [*prompt, *short.token_ids, *random_prompt(160, seed=4)]
    long = session.generate(input_ids=prompt, max_tokens=4)
    assert long.metrics.sparse_prefill
    assert long.metrics.num_new_tokens == 161
    cached = set(slots(session)[1])
    assert kept <= cached
    new = [position for position in cached if start <= position < len(prompt)]
    # ceil(0.3 * 21 chunks) of 8 tokens, the last of them with a single one.
    assert len(new) == 6 * 8 + 1
    assert set(range(start, start + 8)) <= cached


@pytest.mark.parametrize("positions", ["original", "contiguous"])
@pytest.mark.parametrize("recalls", [True, False])
@pytest.mark.parametrize("num_new", [6, 160])
def test_what_a_turn_protects_of_dropped_text_comes_back(positions: Positions, recalls: bool, num_new: int) -> None:
    config = replace(EAGER, recall=recalls, recall_threshold=1000.0)
    session = make_generator(replace(SPARSE, positions=positions), config).session()
    prompt = random_prompt(200)
    first = session.generate(input_ids=prompt, max_tokens=4)
    dropped = sorted({*range(200)}.difference(slots(session)[1]))
    start = next(at for at in dropped if at + 7 in dropped)
    prompt = [*prompt, *first.token_ids, *random_prompt(num_new, seed=3)]
    second = session.generate(input_ids=prompt, max_tokens=4, protected=[(start, start + 8)])
    assert {*range(start, start + 8)} <= {*slots(session)[1]}
    assert second.metrics.num_recalled_tokens == sum(start <= at < start + 8 for at in dropped)
    assert second.metrics.num_kept_tokens == sum(at < len(prompt) for at in slots(session)[1])


@pytest.mark.parametrize("recall_word_threshold", [None, 0.4, 0.9])
def test_what_is_restored_follows_the_slow_rule(recall_word_threshold: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for length, num_cached, size in ((200, 150, 8), (64, 64, 32), (70, 33, 32), (90, 1, 4)):
        importance = torch.rand(length, generator=generator) ** 4
        anchors = torch.rand(-(-length // size), generator=generator)
        cached = [at for at in range(num_cached) if at // 3 % 3 == 0]
        for threshold, most in ((0.0, 100), (1.0, 5), (1.3, 100), (0.9, 1), (99.0, 4), (0.0, 1)):
            config = SessionConfig(recall_threshold=threshold, max_recalled_chunks=most)
            config = replace(config, recall_word_threshold=recall_word_threshold)
            word_scores = None if recall_word_threshold is None else anchors.tolist()
            expected = reference_session.dropped_chunks_to_restore(
                importance.tolist(),
                cached,
                num_cached,
                size,
                threshold,
                most,
                word_scores,
                recall_word_threshold or 0.0,
            )
            units, prefill = ChunkSegments(num_cached, size), replace(SPARSE, chunk_size=size)
            assert recall(importance, cached, units, prefill, config, anchors[: len(units)]) == expected


def test_rare_words_of_the_question_bring_their_chunk_back_whatever_attention_says() -> None:
    """A draft whose attention wants nothing: what comes back, comes by the words that it shares with the question."""
    session = make_generator(session=SessionConfig(recall_threshold=1e6, recall_word_threshold=1.0)).session()
    document = random_prompt(240, vocab=40)
    document[100:103] = [50, 51, 52]
    # The first chunk and the last are kept, and one of those between.
    first = session.generate(input_ids=document, max_tokens=2, keep_rate=0.01)
    assert 100 not in slots(session)[1]
    history = [*document, *first.token_ids]
    paraphrase = session.fork().generate(input_ids=[*history, 60, 61, 62, 63], max_tokens=2)
    assert paraphrase.metrics.num_recalled_tokens == 0
    session.generate(input_ids=[*history, 60, 50, 51, 52, 61], max_tokens=2)
    assert set(slots(session)[1]) >= set(range(96, 104))
    assert len(session.dropped_positions) >= 180


@pytest.mark.parametrize(("prefill_chunk", "draft_step"), [(16, "auto"), (2048, "static")])
def test_recalled_tokens_see_earlier_text_alone_in_pieces_and_beside_fixed_shapes(
    prefill_chunk: int, draft_step: DraftStep
) -> None:
    prefill = replace(SPARSE, prefill_chunk=prefill_chunk, chunk_size=4)
    config = SpecStackConfig(prefill, session=replace(EAGER, max_recalled_chunks=3))
    generator = SpecStackGenerator(make_model(seed=1), make_model(seed=2), config=config, draft_step=draft_step)
    plain, session, prompt = make_model(seed=1), generator.session(), random_prompt(200)
    recalled = []
    for seed in range(5):
        result = session.generate(input_ids=prompt, max_tokens=4)
        recalled.append(result.metrics.num_recalled_tokens)
        ids, positions = slots(session)
        assert reference_session.answers_by_slots(plain, ids, positions, 4) == result.token_ids
        prompt = [*prompt, *result.token_ids, *random_prompt(3, seed=seed)]
    # With three new tokens they fit into a fixed forward of 16.
    assert 0 < min(count for count in recalled if count) <= 12


def test_spans_are_clipped_to_the_new_text() -> None:
    assert clip_spans([(0, 3), (5, 9), (12, 14)], 7) == [(0, 2), (5, 7)]
    assert clip_spans([(0, 7)], 7) == []


def test_restoration_is_off_on_request_and_then_short_turns_are_not_scored() -> None:
    first, question = random_prompt(200), random_prompt(5, seed=8)
    restored = {}
    for restore in (True, False):
        session = make_generator().session(SessionConfig(recall=restore, recall_threshold=0.0))
        answer = session.generate(input_ids=first, max_tokens=3)
        metrics = session.generate(input_ids=[*first, *answer.token_ids, *question], max_tokens=3).metrics
        restored[restore] = metrics.num_recalled_tokens
        assert metrics.num_scored_tokens == (208 if restore else 0)
    assert restored[True] > 0
    assert restored[False] == 0


def test_a_restored_chunk_stays_when_text_behind_it_is_edited() -> None:
    config = SessionConfig(recall_threshold=0.0, max_recalled_chunks=100)
    session = make_generator(session=config).session()
    prompt = random_prompt(200)
    first = session.generate(input_ids=prompt, max_tokens=3)
    cached = set(slots(session)[1])
    longer = [*prompt, *first.token_ids, *random_prompt(5, seed=8)]
    restored = session.generate(input_ids=longer, max_tokens=3).metrics.num_recalled_tokens
    assert not session.dropped_positions
    assert restored == 200 - len([position for position in cached if position < 200])
    # The same question again: what it restored was written before it.
    session.generate(input_ids=[*longer[:-1], 9], max_tokens=3)
    assert not session.dropped_positions
    # Another beginning of the answer: restored tokens were written before it.
    edited = session.generate(
        input_ids=[*prompt, (first.token_ids[0] + 1) % VOCAB, 4, 5], max_tokens=3, sparse_prefill="off"
    )
    assert edited.metrics.num_recalled_tokens == 0


def test_recalled_tokens_and_the_new_text_are_one_forward_and_nothing_is_prefilled_again() -> None:
    prompt, question = random_prompt(200), random_prompt(5, seed=8)
    generator = make_generator(session=replace(EAGER, max_recalled_chunks=12))
    session = generator.session()
    prompt_2 = [*prompt, *session.generate(input_ids=prompt, max_tokens=3).token_ids, *question]
    cached, num_cached = slots(session)[1], 202
    with forwards_of(generator.target) as fed:
        result = session.generate(input_ids=prompt_2, max_tokens=3, gamma=0)
    restored = sorted({*range(num_cached)} & {*slots(session)[1]} - {*cached})
    assert result.metrics.num_recalled_tokens == len(restored) > 0
    assert slots(session)[1] == [*cached, *restored, *range(num_cached, 210)]
    assert sizes_of(fed) == [len(restored) + len(prompt_2) - num_cached, 1, 1]
    assert result.metrics.num_recomputed_tokens == 0


def test_a_later_turns_draft_reads_what_is_new_and_nothing_twice() -> None:
    prompt, question = random_prompt(200), random_prompt(5, seed=8)
    generator = make_generator(session=EAGER)
    session = generator.session()
    prompt_2 = [*prompt, *session.generate(input_ids=prompt, max_tokens=3, gamma=0).token_ids, *question]
    with forwards_of(generator.draft) as fed:
        metrics = session.generate(input_ids=prompt_2, max_tokens=3, gamma=0).metrics
        assert metrics.num_scored_tokens == len(prompt_2)
        # Without texts segments are 16 tokens long: here 192 up to 208.
        assert sizes_of(fed) == [len(prompt_2) - 192]
        # New text that is pruned is scored by earlier questions too.
        long = [*prompt_2, *random_prompt(60, seed=9)]
        assert session.generate(input_ids=long, max_tokens=3, gamma=0).metrics.sparse_prefill
    assert sum(sizes_of(fed[1:])) >= WINDOW


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_a_session_saved_after_a_cancelled_turn_holds_what_it_held_before(positions: Positions, tmp_path: Path) -> None:
    generator = make_generator(replace(SPARSE, positions=positions))
    session, undisturbed = generator.session(), generator.session()
    prompt = random_prompt(200)
    undisturbed.generate(input_ids=prompt, max_tokens=3)
    answer = session.generate(input_ids=prompt, max_tokens=3).token_ids
    second = [*prompt, *answer, *random_prompt(60, seed=4)]
    stream = session.stream(
        input_ids=second, on_progress=lambda done, total, phase: stream.close() if phase == "prefill" else None
    )
    assert list(stream) == []
    assert session.dropped_positions == undisturbed.dropped_positions
    session.save(tmp_path / "session.safetensors")
    third = [*prompt, *answer, *random_prompt(5, seed=9)]
    loaded = generator.load_session(tmp_path / "session.safetensors")
    for each in (session.fork(), session, loaded):
        result = each.generate(input_ids=third, max_tokens=6)
        ids, cached = slots(each)
        # The first turn's last chunk, and its answer.
        assert {*range(192, 203)} <= set(cached)
        at = cached if positions == "original" else list(range(len(cached)))
        assert reference_session.answers_by_slots(make_model(seed=1), ids, at, 6) == result.token_ids


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_an_error_in_the_middle_of_a_turn_leaves_the_session_as_it_was_before(positions: Positions) -> None:
    generator = make_generator(replace(SPARSE, positions=positions))
    prompt = random_prompt(200)

    def ask(session: Session, answer: list[int]) -> Any:
        return session.generate(input_ids=[*prompt, *answer, *random_prompt(60, seed=4)], max_tokens=12, gamma=2)

    undisturbed = generator.session()
    answer = undisturbed.generate(input_ids=prompt, max_tokens=6).token_ids
    expected = ask(undisturbed, answer)
    assert expected.metrics.num_recalled_tokens
    for model in (generator.target, generator.draft):
        for layer in model.model.layers:
            for call in range(3):
                error = (RuntimeError, KeyboardInterrupt)[call % 2]
                session = generator.session()
                session.generate(input_ids=prompt, max_tokens=6)
                before = slots(session)
                with failing(layer.mlp, call, error("stopped")), pytest.raises(error, match="stopped"):
                    ask(session, answer)
                assert slots(session) == before
                again = ask(session, answer)
                assert again.token_ids == expected.token_ids
                assert again.metrics.num_cached_tokens == expected.metrics.num_cached_tokens
                assert slots(session) == slots(undisturbed)


def test_a_scoring_error_takes_the_new_text_whole_and_the_session_goes_on() -> None:
    generator, prompt = make_generator(replace(SPARSE, on_scoring_failure="dense")), random_prompt(100)
    session = generator.session(SessionConfig(recall=False))
    answer = session.generate(input_ids=prompt, max_tokens=3).token_ids
    prompt = [*prompt, *answer, *random_prompt(100, seed=1)]
    failure = RuntimeError("no memory")
    with failing(generator.draft, 0, failure), pytest.warns(UserWarning, match="no memory"):
        result = session.generate(input_ids=prompt, max_tokens=3)
    assert not result.metrics.sparse_prefill
    ids, positions = slots(session)
    assert reference_session.answers_by_slots(make_model(seed=1), ids, positions, 3) == result.token_ids
    prompt = [*prompt, *result.token_ids, *random_prompt(100, seed=2)]
    assert session.generate(input_ids=prompt, max_tokens=3).metrics.sparse_prefill


def test_a_stream_closed_early_keeps_what_it_handed_out() -> None:
    session = make_generator().session()
    prompt = random_prompt(100)
    stream = session.stream(input_ids=prompt, max_tokens=40, gamma=2)
    answer = [*next(stream).token_ids, *next(stream).token_ids]
    with pytest.raises(RuntimeError, match="another call"):
        session.generate(input_ids=prompt)
    with pytest.raises(RuntimeError, match="another call"):
        session.fork()
    stream.close()
    result = session.generate(input_ids=[*prompt, *answer, 5], max_tokens=6)
    assert result.metrics.num_cached_tokens == len(prompt) + len(answer) - 1
    ids, positions = slots(session)
    assert reference_session.answers_by_slots(make_model(seed=1), ids, positions, 6) == result.token_ids


def test_a_call_made_before_the_session_went_elsewhere_goes_on_from_where_it_is() -> None:
    session, other = make_generator().session(), make_generator().session()
    for each in (session, other):
        each.generate(input_ids=random_prompt(50), max_tokens=2)
    early = session.stream(input_ids=[*random_prompt(50), 5], max_tokens=4)
    for each in (session, other):
        each.generate(input_ids=[*random_prompt(30), *random_prompt(20, seed=1)], max_tokens=2)
    outputs, result = list(early), other.generate(input_ids=[*random_prompt(50), 5], max_tokens=4)
    assert [token_id for output in outputs for token_id in output.token_ids] == result.token_ids
    assert slots(session) == slots(other)
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.num_cached_tokens == result.metrics.num_cached_tokens == 30


def test_forks_share_their_past_and_nothing_else() -> None:
    generator = make_generator()
    session = generator.session()
    prompt = random_prompt(150)
    answer = session.generate(input_ids=prompt, max_tokens=4).token_ids
    before = slots(session)
    branches = [session.fork() for _ in range(3)]
    keys = [branch.conversation.target.contents()["cache.0.keys"].data_ptr() for branch in (session, *branches)]
    assert len(set(keys)) == 1, "forking copies nothing"
    questions = [[*prompt, *answer, *random_prompt(20, seed=seed)] for seed in range(3)]
    results = [branch.generate(input_ids=ids, max_tokens=6) for branch, ids in zip(branches, questions, strict=True)]
    assert slots(session) == before
    for branch, result in zip(branches, results, strict=True):
        ids, positions = slots(branch)
        assert reference_session.answers_by_slots(make_model(seed=1), ids, positions, 6) == result.token_ids
    # The first one goes back and writes over what it shared.
    session.generate(input_ids=[*prompt[:100], 4, 5, 6], max_tokens=5)
    for branch, ids, result in zip(branches, questions, results, strict=True):
        assert branch.generate(input_ids=ids, max_tokens=6).token_ids == result.token_ids


def test_a_closed_session_is_refused_and_its_caches_are_gone() -> None:
    with make_generator().session() as session:
        session.generate(input_ids=random_prompt(30), max_tokens=2)
    with pytest.raises(ValueError, match="closed"):
        session.generate(input_ids=[3, 4])
    with pytest.raises(ValueError, match="closed"):
        session.fork()


def test_sessions_of_one_generator_run_side_by_side() -> None:
    generator = make_generator()
    prompts = [random_prompt(length, seed=length) for length in (60, 90, 130)]

    def converse(prompt: list[int], answers: list[list[int]]) -> None:
        with generator.session() as session:
            for turn in range(4):
                answers.append(session.generate(input_ids=prompt, max_tokens=8, gamma=3).token_ids)
                prompt = [*prompt, *answers[-1], *random_prompt(10, seed=turn)]

    alone: list[list[list[int]]] = [[] for _ in prompts]
    together: list[list[list[int]]] = [[] for _ in prompts]
    for prompt, answers in zip(prompts, alone, strict=True):
        converse(prompt, answers)
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(converse, prompts, together))
    assert together == alone


def test_forty_turns_leave_no_more_behind_than_one() -> None:
    session = make_generator().session()
    prompt = random_prompt(100)

    def turn(seed: int) -> None:
        session.generate(input_ids=[*prompt, *random_prompt(9, seed=seed)], max_tokens=3)

    def num_tensors() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    turn(0)
    turn(1)
    before = num_tensors()
    for seed in range(40):
        turn(seed)
    assert num_tensors() <= before + 2
    assert session.num_cached_tokens <= 112


def test_a_chat_goes_on_from_the_answer_it_gave(embedded: SpecStackGenerator) -> None:
    session = embedded.session()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Give three tips."}]
    dealt_with = 0
    for question in ("Why?", "Give three more tips.", "Thanks."):
        result = session.generate(messages=messages, max_tokens=24)
        assert result.token_ids == embedded.generate(messages=messages, max_tokens=24).token_ids
        assert result.metrics.num_cached_tokens == dealt_with
        dealt_with = result.metrics.num_prompt_tokens + len(result.token_ids) - 1
        messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": question}]


def test_a_chat_goes_on_from_an_answer_whose_stream_was_left_at_its_finish_reason(embedded: SpecStackGenerator) -> None:
    messages: list[Any] = [{"role": "user", "content": "Give three tips."}]
    session, text = embedded.session(), ""
    # Greedy tokens that the tokenizer would not give their text.
    bias = {embedded.tokenizer.convert_tokens_to_ids(letter): 50.0 for letter in "ab"}
    for output in session.stream(messages=messages, max_tokens=12, logit_bias=bias):
        text += output.text
        if output.finish_reason is not None:
            assert output.metrics is not None
            num_cached = output.metrics.num_prompt_tokens + output.metrics.num_tokens - 1
            break
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    assert session.generate(messages=messages, max_tokens=2).metrics.num_cached_tokens == num_cached


def test_a_stop_within_accepted_tokens_leaves_nothing_cached_that_is_not_of_the_conversation(
    embedded: SpecStackGenerator,
) -> None:
    messages = [{"role": "user", "content": "Give three tips for cooking."}]
    answer = embedded.generate(messages=messages, max_tokens=12, gamma=0)
    for stop in set(answer.token_ids[1:]):
        with embedded.session() as session:
            session.generate(messages=messages, max_tokens=12, gamma=6, stop_token_ids=[stop])
            assert not session.dropped_positions


def test_a_question_that_is_asked_again_continues_no_conversation(embedded: SpecStackGenerator) -> None:
    question = [{"role": "user", "content": "Give three tips for cooking."}]
    with embedded.session() as session:
        answer = session.generate(messages=question, max_tokens=12).text
        later = [*question, {"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
        assert session.num_continued(encode_messages(embedded.tokenizer, later)) == len(session.conversation.token_ids)
        assert session.num_continued(encode_messages(embedded.tokenizer, question)) == 0


def test_the_reason_says_that_earlier_text_stays_dropped(embedded: SpecStackGenerator) -> None:
    rooms = "".join(f"The code of room {at} is {4 * at}.\n" for at in range(60))
    messages = [{"role": "user", "content": f"{rooms}What is the code of room 41?"}]
    with embedded.session() as session:
        first = session.generate(messages=messages, max_tokens=4, sparse_prefill="on", keep_rate=0.3)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
        told = "; text that earlier turns dropped stays dropped"
        for recall, end in ((False, told), (True, f"{told} unless it is recalled")):
            with session.fork(SessionConfig(recall=recall)) as branch:
                metrics = branch.generate(messages=messages, max_tokens=4, keep_rate=1.0).metrics
            assert metrics.num_kept_tokens < metrics.num_prompt_tokens
            assert metrics.sparse_prefill_reason == f"off: keep_rate is 1.0{end}"
        whole = session.generate(messages=messages, max_tokens=4, sparse_prefill="off").metrics
    assert whole.num_kept_tokens == whole.num_prompt_tokens
    assert told not in whole.sparse_prefill_reason


def test_a_dropped_fact_comes_back_when_it_is_asked_for(embedded: SpecStackGenerator) -> None:
    """Judged by what the target holds: whether a small model then answers well is its own affair."""
    filler = "The river runs past the old mill and the children play there in the long summer. " * 12
    fact = "The blue code for Bruno is 20984."
    document = f"{filler}\nThe red code for Alice is 61375.\n{filler}\n{fact}\n{filler}"
    session = embedded.session(SessionConfig(recall_threshold=1.0))
    messages = [{"role": "user", "content": f"{document}\n\nWhat is the red code for Alice?"}]
    text = embedded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    offsets = embedded.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    begin = text.index(fact)
    of_the_fact = {index for index, (left, right) in enumerate(offsets) if left < begin + len(fact) and right > begin}

    first = session.generate(messages=messages, max_tokens=24, sparse_prefill="on", keep_rate=0.05)
    assert len(of_the_fact & set(session.dropped_positions)) > 0.9 * len(of_the_fact)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "What is the blue code for Bruno?"},
    ]
    branch = session.fork()
    branch.config = SessionConfig(recall=False)
    branch.generate(messages=messages, max_tokens=24)
    assert len(of_the_fact & set(branch.dropped_positions)) > 0.9 * len(of_the_fact)
    second = session.generate(messages=messages, max_tokens=24)
    assert 0 < second.metrics.num_recalled_tokens < 300
    assert not of_the_fact & set(session.dropped_positions)


@pytest.mark.parametrize(
    "name", others_nightly(["Gemma3", "GPT-OSS", "Qwen3.5", "Falcon-H1"], usual=["Gemma3", "Falcon-H1"])
)
def test_windows_and_recurrent_states_go_on_from_turn_to_turn(name: str) -> None:
    """Dense: the tokens are the target's own over the whole conversation, whatever was edited before."""
    models = tiny_architectures.make_model(name), tiny_architectures.make_model(name, disturbed=True)
    generator = SpecStackGenerator(*models, config=SpecStackConfig(PrefillConfig(keep_rate=1.0)))
    plain = tiny_architectures.make_model(name)
    # In trace 0 two logits of GPT-OSS are equal to 1e-4.
    for seed in (1, 2, 3):
        session, trace = generator.session(), Trace(seed, tiny_architectures.VOCAB, document=60)
        for action, prompt, max_tokens in trace:
            if action == "fork":
                session = session.fork()
            result = session.generate(input_ids=prompt, max_tokens=max_tokens)
            assert result.token_ids == reference_session.eager_greedy(plain, prompt, max_tokens)
            trace.answers.append(result.token_ids)


@pytest.mark.parametrize("name", others_nightly(["Gemma3", "GPT-OSS"], usual=["Gemma3"]))
def test_restored_tokens_see_through_windows_by_position(name: str) -> None:
    models = tiny_architectures.make_model(name), tiny_architectures.make_model(name, disturbed=True)
    config = SpecStackConfig(SPARSE, session=SessionConfig(recall_threshold=0.5, max_recalled_chunks=6))
    generator = SpecStackGenerator(*models, config=config)
    plain = tiny_architectures.make_model(name)
    num_restored = 0
    for seed in range(6):
        session, trace = generator.session(), Trace(seed, tiny_architectures.VOCAB, document=250)
        for _, prompt, max_tokens in trace:
            result = session.generate(input_ids=prompt, max_tokens=max_tokens)
            trace.answers.append(result.token_ids)
            num_restored += result.metrics.num_recalled_tokens
            ids, positions = slots(session)
            expected = reference_session.answers_by_slots_and_windows(plain, ids, positions, len(result.token_ids))
            assert result.token_ids == expected
    assert num_restored > 100


def test_an_error_in_a_turn_of_a_recurrent_pair_costs_no_more_than_time() -> None:
    models = [tiny_architectures.make_model("Qwen3.5", disturbed=disturbed) for disturbed in (False, True)]
    generator = SpecStackGenerator(*models, config=SpecStackConfig(PrefillConfig(keep_rate=1.0)))
    prompt = random_prompt(40, vocab=tiny_architectures.VOCAB)
    session = generator.session()
    prompt += session.generate(input_ids=prompt, max_tokens=6).token_ids
    before = slots(session)
    with failing(generator.target, 2, RuntimeError("stopped")), pytest.raises(RuntimeError, match="stopped"):
        session.generate(input_ids=prompt, max_tokens=12, gamma=1)
    assert slots(session) == before
    expected = generator.generate(input_ids=prompt, max_tokens=12).token_ids
    assert session.generate(input_ids=prompt, max_tokens=12).token_ids == expected


def test_a_draft_with_another_tokenizer_serves_a_session() -> None:
    tokenizer = make_tokenizer("a b c d e f ab abc de cd", "<t>")
    other = make_tokenizer("f e bc d abc c b ef a", "<s>")
    models = make_model(seed=1, vocab=16), make_model(seed=2, vocab=12)
    config = SpecStackConfig(SPARSE, session=replace(EAGER, recall_threshold=0.0, max_recalled_chunks=40))
    generator = SpecStackGenerator(*models, tokenizer, config=config, draft_tokenizer=other)
    plain = make_model(seed=1, vocab=16)
    text, session, restored = "abcdefdeab" * 60, generator.session(), 0
    for turn in range(4):
        with forwards_of(generator.draft) as fed:
            result = session.generate(text, max_tokens=5, gamma=2)
        ids, positions = slots(session)
        assert reference_session.answers_by_slots(plain, ids, positions, 5) == result.token_ids
        assert (result.metrics.num_cached_tokens > 0) is (turn > 0)
        # Once all that was dropped is recalled, nothing is left to score.
        is_whole = result.metrics.num_kept_tokens == result.metrics.num_prompt_tokens
        assert is_whole or result.metrics.num_scored_tokens
        assert (sum(sizes_of(fed)) < 2 * (WINDOW + 64)) is (turn > 0), (
            "the draft reads only what is new, and the scoring queries"
        )
        restored += result.metrics.num_recalled_tokens
        text += result.text + "cdef"
    assert restored


@pytest.mark.parametrize("seed", others_nightly(range(6), usual=[1, 4]))
def test_edits_and_forks_leave_a_draft_with_another_tokenizer_as_if_it_had_read_all(seed: int) -> None:
    """Ids that no tokenizer would give for their text, as generated ones are: what is scored and drafted with the kept
    index is what a draft from nothing would score and draft."""
    tokenizers = make_tokenizer("a b c d e f ab abc de cd", "<t>"), make_tokenizer("f e bc d abc c b ef a", "<s>")
    models = make_model(seed=1, vocab=16), make_model(seed=2, vocab=12)
    config = SpecStackConfig(SPARSE, session=EAGER)
    generator = SpecStackGenerator(*models, tokenizers[0], config=config, draft_tokenizer=tokenizers[1])
    plain = make_model(seed=1, vocab=16)
    session, trace = generator.session(), Trace(seed, 11, document=200)
    for action, prompt, max_tokens in trace:
        session = session.fork() if action == "fork" else session
        cold = session.fork()
        cold.conversation.draft_cache = generator.pair.new_draft_cache(SPARSE.prefill_chunk)
        expected = cold.generate(input_ids=prompt, max_tokens=max_tokens, gamma=3, return_records=True)
        result = session.generate(input_ids=prompt, max_tokens=max_tokens, gamma=3, return_records=True)
        assert result.token_ids == expected.token_ids
        assert slots(session) == slots(cold)
        assert [step.num_accepted for step in result.records or ()] == [
            step.num_accepted for step in expected.records or ()
        ]
        ids, positions = slots(session)
        assert reference_session.answers_by_slots(plain, ids, positions, len(result.token_ids)) == result.token_ids
        # Half characters and specials apart, every text can be scored.
        trace.answers.append([min(token_id, 10) for token_id in result.token_ids])


def test_a_turn_that_is_scored_by_bm25_does_not_run_the_draft() -> None:
    generator = make_generator(replace(SPARSE, scorer="bm25"))
    session = generator.session()
    prompt = random_prompt(300)
    with forwards_of(generator.draft) as fed:
        first = session.generate(input_ids=prompt, max_tokens=2, gamma=0)
        prompt = [*prompt, *first.token_ids, *random_prompt(200, seed=1)]
        second = session.generate(input_ids=prompt, max_tokens=2, gamma=0)
    assert first.metrics.sparse_prefill
    assert second.metrics.sparse_prefill
    assert not fed


def test_a_draft_that_reads_a_conversation_turn_by_turn_with_a_window_holds_what_one_reading_leaves() -> None:
    """Of prompts alone: what is decoded sees everything."""
    generator = make_generator()
    document = random_prompt(300)
    models = [generator.pair.new_draft_cache(8192) for _ in range(2)]
    models[0].prefill(document[:120], range(120), 24, 8)
    models[0].prefill(document[120:], range(120, 300), 24, 8)
    models[1].prefill(document, range(300), 24, 8)
    logits = [model.forward([5], [300], num_logits=1) for model in models]
    torch.testing.assert_close(logits[0], logits[1])


def test_who_gives_only_the_new_message_is_told_once_that_it_begins_anew(embedded: SpecStackGenerator) -> None:
    def ask(content: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": content}]

    with embedded.session() as session:
        session.generate(messages=ask("Give three tips."), max_tokens=2)
        session.generate(messages=ask("Give three tips."), max_tokens=2)
        with pytest.warns(UserWarning, match="begins anew"):
            session.generate(messages=ask("Why is the sky blue, and the sea?"), max_tokens=2)
        session.generate(messages=ask("Who said so, and when was it said?"), max_tokens=2)


@pytest.mark.filterwarnings("error:.*begins anew")
def test_a_long_document_behind_the_instructions_of_a_session_begins_nothing_anew(embedded: SpecStackGenerator) -> None:
    system = {"role": "system", "content": "Answer from the document only, in one sentence. " * 4}
    with embedded.session() as session:
        session.generate(messages=[system, {"role": "user", "content": "Ready?"}], max_tokens=1)
        document = {"role": "user", "content": "The river runs past the old mill. " * 40 + "What runs?"}
        assert session.generate(messages=[system, document], max_tokens=2).metrics.num_cached_tokens > 20
