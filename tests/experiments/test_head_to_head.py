from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from experiments.quality.head_to_head import Judge, Task, keep, make_tasks, measure, see, summarise
from experiments.quality.ruler_like import KINDS, make
from experiments.quality.selection_rules import Seen, by_bm25, by_cascade, by_query_window, look_at, rules
from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.calibrate.documents import module_source
from spec_stack.prefill.importance import ScoredLayer

CONFIG = PrefillConfig.full_look_ahead()


def seen_of(ids: list[int], layers: list[ScoredLayer] | None = None) -> Seen:
    return Seen(ids, [], "", "", layers or [])


@pytest.fixture(scope="module")
def task(embedded: SpecStackGenerator) -> Task:
    return make_tasks(embedded.pair, [module_source("uuid")], 600, 1, "tuning", 0)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", ["tuning", "test"])
def test_the_spans_of_a_ruler_like_task_are_its_evidence(kind: str, half: str) -> None:
    asked = make(kind, 4000, half, random.Random(3))  # type: ignore[arg-type]
    document = asked.haystack.document
    pieces = [document[start:stop] for start, stop in asked.haystack.spans]
    assert pieces
    assert all("\n" not in piece for piece in pieces)
    for answer in asked.answers:
        assert any(answer in piece for piece in pieces)
        # Nothing that mentions an answer lies outside the evidence.
        assert document.count(answer) == sum(piece.count(answer) for piece in pieces)
    other = make(kind, 4000, "test" if half == "tuning" else "tuning", random.Random(3))
    assert other.haystack.question != asked.haystack.question


def test_unrotated_keys_are_what_the_projection_gave(embedded: SpecStackGenerator, task: Task) -> None:
    ids = task.prompt.token_ids[:200]
    _, plain = look_at(embedded.pair, ids, CONFIG)
    outputs: list[torch.Tensor] = []
    layers = embedded.pair.draft.get_decoder().layers
    hooks = [layer.self_attn.k_proj.register_forward_hook(lambda *call: outputs.append(call[2])) for layer in layers]
    try:
        with torch.no_grad():
            embedded.pair.draft(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    for (_, keys, *_), output in zip(plain, outputs, strict=True):
        expected = output[0].reshape(len(ids), keys.shape[0], -1).transpose(0, 1)
        torch.testing.assert_close(keys, expected, atol=1e-4, rtol=1e-3)


def test_the_query_window_is_a_weighted_causal_attention(embedded: SpecStackGenerator, task: Task) -> None:
    ids = task.prompt.token_ids[:160]
    layers, _ = look_at(embedded.pair, ids, CONFIG)
    best = [0.0] * len(ids)
    for queries, keys, scaling, *_ in layers:
        heads, count, _ = queries.shape
        for head in range(heads):
            own = keys[head * keys.shape[0] // heads]
            total, mass = [0.0] * len(ids), 0.0
            for at in range(count):
                sees = min(len(ids), len(ids) - 64 + at + 1)
                scores = (own[:sees] @ queries[head, at] * scaling).tolist()
                peak = max(scores)
                powers = [math.exp(score - peak) for score in scores]
                weight = (at + 1) / 64 if at < 64 else 1.0
                mass += weight
                for place, power in enumerate(powers):
                    total[place] += weight * power / sum(powers)
            best = [max(old, value / mass) for old, value in zip(best, total, strict=True)]
    pooled = [max(best[max(0, at - 32) : at + 33]) for at in range(len(ids))]
    expected = [sum(pooled[start : start + 32]) / 32 for start in range(0, len(ids), 32)]
    assert by_query_window(seen_of(ids, layers), CONFIG).tolist() == pytest.approx(expected, rel=1e-3)


def test_a_cascade_follows_rare_tokens_where_anchors_stop() -> None:
    # 900 asks; it stands beside 901 in chunk 4, which stands beside 902 in chunk 9. All else is common.
    ids = [token for _ in range(20) for token in range(32)]
    ids[4 * 32 + 3], ids[4 * 32 + 9] = 900, 901
    ids[9 * 32 + 1], ids[9 * 32 + 5] = 901, 902
    ids[13 * 32], ids[-1] = 902, 900
    votes = by_cascade(seen_of(ids), CONFIG)
    order = votes.argsort(descending=True, stable=True).tolist()
    assert order[:3] == [4, 9, 13]


def test_bm25_finds_the_sentence_that_shares_the_rare_words() -> None:
    sentences = [f"The number {index} of the list is here." for index in range(40)]
    sentences[17] = "The harbour master keeps ledger 512."
    text = " ".join(sentences) + "\n\nWhich ledger does the harbour master keep?"
    # A token per character.
    seen = Seen(list(range(len(text))), [(at, at + 1) for at in range(len(text))], text, text.rsplit("\n", 1)[1])
    votes = by_bm25(seen, CONFIG)
    best = int(votes.argmax())
    assert sentences[17][:5] in text[best * 32 - 40 : (best + 1) * 32 + 40]
    assert text.index(sentences[17]) // 32 <= best <= (text.index(sentences[17]) + len(sentences[17])) // 32


def test_every_rule_keeps_its_share_and_both_ends(embedded: SpecStackGenerator, task: Task) -> None:
    known = rules(replace(CONFIG, scoring_heads=((1, 0), (1, 2))))
    seen = see(embedded.pair, task, CONFIG, 0)
    num_tokens = len(task.prompt.token_ids)
    for name, rule in known.items():
        kept, seconds = keep(rule, seen, 0.3)
        assert abs(len(kept) - 0.3 * num_tokens) <= 2 * CONFIG.chunk_size, name
        assert num_tokens - 1 in kept
        assert seconds >= 0
        assert keep(rule, seen, 1.0)[0] == set(range(num_tokens)), name


@pytest.mark.slow
def test_the_table_of_a_small_run_has_dense_as_its_limit(embedded: SpecStackGenerator, task: Task) -> None:
    known = {name: rule for name, rule in rules(CONFIG).items() if name in ("anchors", "random")}
    rows = measure(embedded.pair, [task], known, [0.2, 1.0], answers=True)
    table = summarise(rows, known, [0.2, 1.0])
    assert table["random @ 1.0"]["kept"] == 1
    assert table["random @ 1.0"]["kl"] == pytest.approx(0, abs=1e-4)
    assert table["random @ 1.0"]["score"] == rows[0]["dense_score"]
    assert table["random @ 0.2"]["kl"] > 0
    judge = Judge(embedded.pair, task, 8192)
    plain = embedded.generate(input_ids=task.prompt.token_ids, max_tokens=24, gamma=0, specprefill=False)
    assert judge._answer == plain.token_ids
