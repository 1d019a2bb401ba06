"""The pair's trainer: its model equals transformers' Llama, and its tasks say where their answers stand."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

import pair_data
import pair_model
import pair_tasks
import train_pair

SHAPE = pair_model.Shape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=320)


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"def river_{n}(x):\n    return x + {n}.\n\nThe house is green. " for n in range(60)]
    return pair_data.train_tokenizer({"code": words}, 320)


@pytest.fixture(scope="module")
def maker(tokenizer):
    text = "".join(f"def river_{n}(x):\n    return x + {n}\n\nThe house is green. " for n in range(400))
    return pair_tasks.TaskMaker(tokenizer, {"code": np.array(pair_data.encode(tokenizer, text), dtype=np.uint16)})


def test_model_equals_transformers_at_gapped_positions(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = pair_model.PairModel(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pair_data.save_tokenizer(tokenizer, tmp_path / "tokenizer")
    pair_model.export_folder(SHAPE, model.state_dict(), tmp_path / "tokenizer", tmp_path / "out")
    ours = pair_model.load_folder(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(7, 320, (1, 60))
    positions = torch.arange(60)[None] + 500 * (torch.arange(60)[None] // 20)
    expected = theirs(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(ours.logits(ours.hidden(ids, positions)), expected, atol=2e-4, rtol=1e-3)
    some = torch.tensor([0, 21, 59])
    hidden, attention = ours.hidden_at(ids, positions, some)
    torch.testing.assert_close(ours.logits(hidden), expected[:, some], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(attention.sum(-1), torch.ones(4, 3))


def test_seeded_heads_attend_to_the_two_tokens_before():
    torch.manual_seed(0)
    shape = pair_model.Shape(hidden=128, layers=1, heads=4, kv_heads=2, intermediate=32, vocab=320)
    model = pair_model.PairModel(shape)
    pair_model.seed_previous_token_heads(model)
    _, attention = model.hidden_at(torch.randint(7, 320, (1, 64)), torch.arange(64)[None], torch.tensor([20, 63]))
    for row, query in enumerate((20, 63)):
        assert attention[0, row].argmax() == query - 1
        assert attention[1, row].argmax() == query - 2


def test_links_point_at_the_fact_that_holds_the_answer(maker, tokenizer):
    rng = random.Random(1)
    for _ in range(20):
        made = maker.facts(rng, 900)
        assert made.links
        for query, start, end in made.links:
            assert 0 < start < end <= made.tail <= query
            evidence = tokenizer.decode(made.ids[start:end])
            assert tokenizer.decode(made.ids[query + 1 : query + 2]).strip() in evidence


def test_dropped_chunks_keep_the_evidence_and_everything_asked(maker):
    rng = random.Random(2)
    made = maker.sequence(rng, 1024)
    kept, positions = pair_tasks.drop_chunks(rng, made, 0.2)
    assert positions == sorted(set(positions))
    assert len(kept.ids) == len(positions) < len(made.ids)
    assert kept.ids[kept.tail :] == made.ids[made.tail :]
    for (query, start, end), (old_query, old_start, old_end) in zip(kept.links, made.links, strict=True):
        assert kept.ids[start:end] == made.ids[old_start:old_end]
        assert kept.ids[query] == made.ids[old_query]


@pytest.mark.parametrize("length", [64, 300])
def test_sequences_have_the_length_asked_for(maker, length):
    rng = random.Random(3)
    for _ in range(30):
        made = maker.sequence(rng, length)
        assert len(made.ids) == len(made.weights) == length + 1
        assert all(query < length for query, _, _ in made.links)


def test_gapped_positions_rise_and_stay_in_the_span():
    rng = np.random.default_rng(0)
    for _ in range(20):
        positions = pair_data.gapped_positions(rng, 200, 4096, 1.0)
        assert len(positions) == 200
        assert (np.diff(positions) >= 1).all()
        assert positions[-1] < 4096


def test_records_are_split_on_newlines_alone(tmp_path):
    record = {"src": "made", "text": "one\u2028two\u0085three"}
    (tmp_path / "prose_novels_00.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert pair_data.documents(tmp_path, "prose", []) == [record["text"]]
    assert pair_data.documents(tmp_path, "prose", ["made"]) == []


@pytest.mark.parametrize("size", [25, 40])  # 25 ends a document exactly where the shares meet
def test_two_shares_of_a_corpus_have_no_document_in_common_and_miss_none(tmp_path, monkeypatch, size):
    group = replace(pair_data.GROUPS["prose"], max_chars=1000)
    monkeypatch.setitem(pair_data.GROUPS, "prose", group)
    records = [{"src": "made", "text": f"{n:03}" + "x" * (size - 3)} for n in range(50)]
    (tmp_path / "prose_novels_00.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    whole = pair_data.documents(tmp_path, "prose", [])
    first = pair_data.documents(tmp_path, "prose", [], 0.5)
    second = pair_data.documents(tmp_path, "prose", [], 0.5, from_share=0.5)
    assert len(first) > 10
    assert not set(first) & set(second)
    assert first + second == whole
    with pytest.raises(ValueError, match="from_share"):
        pair_data.prepare(tmp_path, tmp_path / "data", None, 320, [], 0.5, from_share=1.0)


def test_pack_and_unpack_give_the_same_weights(tmp_path):
    model = pair_model.PairModel(SHAPE)
    state = {"model": model.state_dict(), "shape": vars(SHAPE), "step": 1, "tokens": 2, "elapsed": 3.0}
    files = pair_model.pack({"target": state}, tmp_path, shard_bytes=8_000)
    assert len(files) > 2
    shape, weights = pair_model.unpack(tmp_path)["target"]
    assert shape == SHAPE
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in model.state_dict().items())


def test_a_malformed_mix_says_what_is_wanted():
    with pytest.raises(ValueError, match="kind:weight:lengths:batch"):
        train_pair.parse_mix(["lm:1"])
    assert train_pair.parse_mix(["0.5=lm:1:64:2", "task:1:64/128:1"])[1][1][0].lengths == (64, 128)
