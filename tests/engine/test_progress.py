"""Progress of a prefill, and ending it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import PreTrainedModel

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from tests.support import reference
from tests.support.forwards import forwards_of, sizes_of
from tests.support.models import make_model, make_tokenizer, random_prompt

CONFIG = SpecStackConfig(PrefillConfig(granularity="chunks", prefill_chunk=32, chunk_size=8, keep_rate=0.5))
Told = list[tuple[int, int, str]]


@pytest.mark.parametrize("pruned", [False, True])
def test_every_chunk_is_told(pruned: bool, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    told: Told = []
    generator = SpecStackGenerator(target, draft, config=CONFIG)
    result = generator.generate(
        input_ids=random_prompt(200),
        max_tokens=8,
        sparse_prefill="on" if pruned else "off",
        on_progress=lambda *each: told.append(each),
    )
    kept = result.metrics.num_kept_tokens
    prefill = [each for each in told if each[2] == "prefill"]
    scoring = [each for each in told if each[2] == "scoring"]
    assert told == scoring + prefill
    assert bool(scoring) is pruned
    for phase, total in [(prefill, kept), (scoring, 200)][: 1 + pruned]:
        assert [done for done, _, _ in phase] == sorted({done for done, _, _ in phase})
        assert (phase[0][0], phase[-1][:2]) == (0, (total, total))
        assert len(phase) >= total // 32


@pytest.mark.parametrize("phase", ["scoring", "prefill"])
@pytest.mark.parametrize("how", ["close", "raise"])
def test_a_prefill_can_be_ended_between_two_chunks(
    phase: str, how: str, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator, prompt = SpecStackGenerator(target, draft, config=CONFIG), random_prompt(200)

    def end(num_done: int, num_total: int, at: str) -> None:
        if at == phase and num_done >= 64:
            if how == "raise":
                raise RuntimeError("enough")
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join()

    stream = generator.stream(input_ids=prompt, sparse_prefill="on" if phase == "scoring" else "off", on_progress=end)
    with forwards_of(target, draft) as fed:
        if how == "raise":
            with pytest.raises(RuntimeError, match="enough"):
                next(stream)
        else:
            assert list(stream) == []
    # The pieces end where the scoring queries begin.
    assert 64 <= sum(sizes_of(fed)) < 64 + 32
    assert list(stream) == []
    assert generator.generate(input_ids=prompt, max_tokens=5).token_ids == reference.greedy(
        make_model(seed=1), prompt, 5
    )


@pytest.mark.parametrize("pruned", [False, True])
def test_a_session_whose_prefill_was_ended_goes_on_from_before_it(
    pruned: bool, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = SpecStackGenerator(target, draft, config=CONFIG)
    session, fresh = generator.session(), generator.session()
    options: dict[str, Any] = {"max_tokens": 6, "gamma": 2, "sparse_prefill": "on" if pruned else "off"}
    first = random_prompt(60)
    answer = session.generate(input_ids=first, **options).token_ids
    assert fresh.generate(input_ids=first, **options).token_ids == answer
    prompt = [*first, *answer, *random_prompt(150, 3)]
    stream = session.stream(
        input_ids=prompt, on_progress=lambda done, total, phase: stream.close() if done >= 32 else None, **options
    )
    assert list(stream) == []
    after = session.generate(input_ids=prompt, **options)
    expected = fresh.generate(input_ids=prompt, **options)
    assert after.token_ids == expected.token_ids
    assert after.metrics.num_cached_tokens == expected.metrics.num_cached_tokens > 60


def test_a_stream_closed_from_another_thread_ends_at_its_next_step(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator, prompt = SpecStackGenerator(target, draft), random_prompt(20)
    stream = generator.stream(input_ids=prompt, max_tokens=1000, gamma=1)
    next(stream)
    thread = threading.Thread(target=stream.close)
    thread.start()
    thread.join()
    assert list(stream) == []


def test_a_draft_with_another_tokenizer_tells_in_its_own_tokens() -> None:
    told: Told = []
    tokenizer, other = make_tokenizer("a b c ab ca"), make_tokenizer("c a cb b")
    models = [make_model(seed=1, vocab=5), make_model(seed=2, vocab=4)]
    generator = SpecStackGenerator(*models, tokenizer, config=CONFIG, draft_tokenizer=other)
    generator.generate("abcab" * 40, max_tokens=3, sparse_prefill="on", on_progress=lambda *each: told.append(each))
    num_draft_tokens = len(other("abcab" * 40).input_ids)
    assert (num_draft_tokens, num_draft_tokens, "scoring") in told


def test_a_long_prefill_is_told_of_every_2048_tokens_on_a_cpu(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    told: list[int] = []
    for model in (target, draft):
        model.config.max_position_embeddings = 8192
    SpecStackGenerator(target, draft).generate(
        input_ids=random_prompt(5000),
        max_tokens=1,
        sparse_prefill="off",
        on_progress=lambda num_done, num_total, phase: told.append(num_done),
    )
    assert {0, 2048, 4096, 5000} <= set(told)
    assert told == sorted(told)


def test_a_close_is_heard_before_the_next_layer(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator, prompt, layers = SpecStackGenerator(target, draft), random_prompt(50), list[int]()
    session = generator.session()
    stream = session.stream(input_ids=prompt)

    def close(index: int) -> None:
        layers.append(index)
        stream.close()

    handles = [
        layer.mlp.register_forward_pre_hook(lambda module, args, index=index: close(index))
        for index, layer in enumerate(target.model.layers)
    ]
    assert list(stream) == []
    assert layers == [0]
    for handle in handles:
        handle.remove()
    expected = reference.greedy(make_model(seed=1), prompt, 5)
    assert session.generate(input_ids=prompt, max_tokens=5).token_ids == expected


def test_layers_of_one_long_forward_are_told_as_tokens(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_stack.engine.progress._REPORT_EVERY_S", 0.0)
    told: list[int] = []
    SpecStackGenerator(target, draft).generate(
        input_ids=random_prompt(60),
        max_tokens=1,
        on_progress=lambda num_done, num_total, phase: told.append(num_done),
    )
    assert told == [0, 20, 40, 60]
