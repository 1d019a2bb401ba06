"""The pair's trainer: its model equals transformers' Llama, and its tasks say where their answers stand."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.pair import batches as pair_batches
from experiments.pair import data as pair_data
from experiments.pair import evaluate as eval_pair
from experiments.pair import metrics as pair_metrics
from experiments.pair import model as pair_model
from experiments.pair import optimiser as pair_optimiser
from experiments.pair import tasks as pair_tasks
from experiments.pair import train as train_pair
from spec_stack.hf.loading import ASSETS

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
    hidden, attention, _ = ours.hidden_at(ids, positions, some)
    torch.testing.assert_close(ours.logits(hidden), expected[:, some], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(attention.sum(-1), torch.ones(4, 3))


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (32, 32)])
def test_muon_in_fp32_takes_the_steps_of_torchs_but_for_rounding(shape):
    torch.manual_seed(0)
    first = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    options = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.95}
    pairs = [
        (ours, pair_optimiser.FullPrecisionMuon([ours], **options)),
        (theirs, torch.optim.Muon([theirs], **options)),
    ]
    for _ in range(4):
        gradient = torch.randn(shape)
        for parameter, optimiser in pairs:
            parameter.grad = gradient.clone()
            optimiser.step()
    moved = (theirs - first).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert pairs[0][1].state_dict()["state"].keys() == pairs[1][1].state_dict()["state"].keys()
    singular = torch.linalg.svdvals(pair_optimiser.orthogonalised(first))
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.5


@pytest.mark.parametrize(("length", "window", "sinks"), [(150, 32, 16), (70, 128, 64), (129, 64, 64), (20, 8, 4)])
def test_windowed_attention_equals_an_explicit_mask(length, window, sinks):
    torch.manual_seed(0)
    attention = pair_model.Attention(SHAPE)
    cos, sin = pair_model.PairModel(SHAPE)._rope(torch.arange(length)[None] * 3)
    x = torch.randn(1, length, SHAPE.hidden)
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (key <= query) & ((key > query - window) | (key < sinks))
    for at in range(length):  # what one query may see, and nothing else, reaches it
        alone = x.clone()
        alone[:, ~seen[at]] = torch.nan
        some = seen[at].nonzero()[:, 0]
        expected, _ = attention.at(
            x[:, some], cos[:, :, some], sin[:, :, some], torch.tensor([int((some == at).nonzero())])
        )
        got = attention.windowed(x, cos, sin, window, sinks)[:, at]
        torch.testing.assert_close(got, expected[:, 0], atol=1e-5, rtol=1e-4)


def test_asked_tokens_see_everything_when_the_rest_is_read_with_a_window():
    torch.manual_seed(0)
    model = pair_model.PairModel(replace(SHAPE, layers=3))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, positions, asked = torch.randint(7, 320, (1, 90)), torch.arange(90)[None], torch.tensor([40, 89])
    plain, *_ = model.hidden_at(ids, positions, asked)
    wide, *_ = model.hidden_at(ids, positions, asked, window=128)
    narrow, attention, _ = model.hidden_at(ids, positions, asked, window=16, sinks=8)
    torch.testing.assert_close(wide, plain, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(narrow, plain, atol=1e-2)
    assert attention[:, 1, 10:60].sum() > 0.01  # neither sink nor window


def test_a_wider_mlp_is_the_same_function_until_it_is_trained():
    torch.manual_seed(0)
    model = pair_model.PairModel(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    wide = pair_model.widen_mlp(model, 80)
    ids, positions = torch.randint(7, 320, (1, 30)), torch.arange(30)[None]
    torch.testing.assert_close(wide.hidden(ids, positions), model.hidden(ids, positions), atol=1e-4, rtol=1e-3)
    assert wide.shape.intermediate == 80
    wide.logits(wide.hidden(ids, positions)).sum().backward()
    assert wide.model.layers[0].mlp.down_proj.weight.grad[:, 48:].abs().max() > 0
    with pytest.raises(ValueError, match="at least 48"):
        pair_model.widen_mlp(model, 40)


def test_the_attention_of_a_middle_layer_is_what_that_layer_alone_would_give():
    torch.manual_seed(0)
    model = pair_model.PairModel(replace(SHAPE, layers=3))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, positions, asked = torch.randint(7, 320, (1, 40)), torch.arange(40)[None], torch.tensor([9, 39])
    hidden, _, between = model.hidden_at(ids, positions, asked, middle=1)
    torch.testing.assert_close(hidden, model.hidden_at(ids, positions, asked)[0])
    model.model.layers = model.model.layers[:2]
    torch.testing.assert_close(between, model.hidden_at(ids, positions, asked)[1])


def test_seeded_heads_attend_to_the_two_tokens_before():
    torch.manual_seed(0)
    shape = pair_model.Shape(hidden=128, layers=1, heads=4, kv_heads=2, intermediate=32, vocab=320)
    model = pair_model.PairModel(shape)
    pair_model.seed_previous_token_heads(model)
    _, attention, _ = model.hidden_at(torch.randint(7, 320, (1, 64)), torch.arange(64)[None], torch.tensor([20, 63]))
    for row, query in enumerate((20, 63)):
        assert attention[0, row].argmax() == query - 1
        assert attention[1, row].argmax() == query - 2


def test_links_point_at_the_fact_that_holds_the_answer(maker, tokenizer):
    rng = random.Random(1)
    for _ in range(20):
        made = maker.facts(rng, 900)
        assert made.links
        asked = {query for query, _, _ in made.links}
        for query, start, end in made.links:
            assert 0 < start < end <= made.tail <= query
            answer = made.ids[query + 1]
            assert answer > pair_model.END
            assert tokenizer.decode([answer]).strip() in tokenizer.decode(made.ids[start:end])
        for query in asked:
            assert made.ids[query] == pair_model.ASSISTANT or query - 1 in asked
        assert {at for at, token in enumerate(made.ids) if token == pair_model.ASSISTANT} <= asked


def test_dropped_chunks_keep_the_evidence_and_everything_asked(maker):
    rng = random.Random(2)
    for _ in range(10):
        made = maker.sequence(rng, 1024, linked=True)
        kept, positions = pair_tasks.drop_chunks(rng, made, 0.2)
        assert positions == sorted(set(positions))
        assert kept.ids == [made.ids[position] for position in positions]
        assert kept.ids[kept.tail :] == made.ids[made.tail :]
        assert len(kept.links) == len(made.links) > 0
        for (query, start, end), (old_query, old_start, old_end) in zip(kept.links, made.links, strict=True):
            assert kept.ids[start:end] == made.ids[old_start:old_end]
            assert kept.ids[query] == made.ids[old_query]
        wanted = {at // 32 for _, start, end in made.links for at in range(start, end)} | {0, made.tail // 32}
        assert kept.tail <= max(0.2 * made.tail + 32, 32 * len(wanted))


def test_only_a_token_read_right_after_its_context_is_a_label_of_a_pruned_sequence(tokenizer):
    ids = np.array(pair_data.encode(tokenizer, "The house is green. " * 400), dtype=np.uint16)
    made = pair_tasks.TaskMaker(tokenizer, {"code": ids}, context_weight=1.0).sequence(
        random.Random(5), 1024, linked=True
    )
    kept, positions = pair_tasks.drop_chunks(random.Random(5), made, 0.3)
    jumped = [at for at in range(1, len(positions)) if positions[at] > positions[at - 1] + 1]
    assert jumped
    assert all(kept.weights[at] == 0 for at in jumped)
    others = set(range(len(positions))) - set(jumped)
    assert all(kept.weights[at] == made.weights[positions[at]] for at in others)


def test_a_linked_sequence_always_says_where_its_evidence_stands(maker):
    rng = random.Random(4)
    assert all(maker.sequence(rng, 512, linked=True).links for _ in range(60))
    assert not all(maker.sequence(rng, 512).links for _ in range(60))


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
        assert (np.diff(positions) > 1).any()
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


MIX = ["0.5=lm:1:64:2,repeat:1:64:2", "lm:1:64/128:2,task:1:256:1,sparse:1:512:1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared folder, from a corpus of a few KB."""
    folder = tmp_path_factory.mktemp("pair")
    words = pair_tasks.WORDS
    text = "".join(f"def {word}(x):\n    return x + {n}\n\nThe {word} is green. " for n, word in enumerate(words))
    for name, record in {
        "code_python_00": {"src": "made", "text": text},
        "qa_00": {"src": "made", "prompt": "The house is green. What is green?", "response": "the house"},
        "valid_mixed": {"src": "made", "domain": "code_python", "text": text[:3000]},
    }.items():
        (folder / f"{name}.jsonl").write_text("\n".join([json.dumps(record)] * 8), encoding="utf-8")
    pair_data.prepare(folder, folder / "data", None, 320, [])
    return folder / "data"


def run_of(data: Path, out: Path, *more: str, mix: list[str] = MIX) -> train_pair.Run:
    words = ["train", "--data", str(data), "--out", str(out), "--shape", "target-tiny", "--warmup", "2"]
    words += [word for part in mix for word in ("--mix", part)]
    return train_pair.Run(train_pair.parser().parse_args([*words, *more]))


def source_of(data: Path, seed: int = 1, span: int = 4096, gapped: float = 1.0) -> pair_batches.Source:
    device = torch.device("cpu")
    return pair_batches.Source(data, vocab=320, span=span, seed=seed, gapped=gapped, context_weight=0.0, device=device)


@pytest.mark.parametrize("part", ["lm:1:128:3", "repeat:1:64:2", "task:1:256/512:1", "sparse:1:512:1", "wide:1:512:1"])
def test_a_batch_labels_each_token_with_the_next_and_is_drawn_from_seed_and_step(data, part):
    part = pair_batches.Part.parse(part)
    batch, again = source_of(data).batch(part, 5, 0), source_of(data).batch(part, 5, 0)
    assert torch.equal(batch.labels[:, :-1], batch.ids[:, 1:])
    assert batch.ids.shape == batch.labels.shape == batch.weights.shape == batch.positions.shape
    assert (batch.positions.diff() > 1).any()
    assert batch.weights.sum() > 0
    assert torch.equal(batch.ids, again.ids)
    assert torch.equal(batch.positions, again.positions)
    others = [
        source_of(data).batch(part, 6, 0),
        source_of(data).batch(part, 5, 1),
        source_of(data, 2).batch(part, 5, 0),
    ]
    for other in others:
        assert not (other.ids.shape == batch.ids.shape and torch.equal(other.ids, batch.ids))


def test_sequences_of_questions_are_padded_with_what_has_no_weight(data):
    source = source_of(data)
    rows = [source.wide(random.Random(n), np.random.default_rng(n), 300, pruned=False) for n in range(3)]
    batch = pair_batches.padded(rows)
    assert len({row.ids.shape[1] for row in rows}) > 1
    assert (batch.positions.diff() >= 1).all()
    for at, row in enumerate(rows):
        num = row.ids.shape[1]
        for name in ("ids", "labels", "weights", "positions"):
            assert torch.equal(getattr(batch, name)[at, :num], getattr(row, name)[0])
        assert batch.weights[at, num:].sum() == 0
    loss, _ = train_pair.part_loss(pair_model.PairModel(SHAPE), batch, None, train_pair.LossWeights())
    assert torch.isfinite(loss)


def test_a_resumed_run_equals_an_uninterrupted_one(data, tmp_path):
    run_of(data, tmp_path / "whole", "--steps", "5").fit()
    run_of(data, tmp_path / "parts", "--steps", "5", "--stop-at", "3").fit()
    assert train_pair.load_checkpoint(tmp_path / "parts")["step"] == 3
    run_of(data, tmp_path / "parts", "--steps", "5", "--stop-at", "2").fit()  # past it already
    assert train_pair.load_checkpoint(tmp_path / "parts")["step"] == 3
    run_of(data, tmp_path / "parts", "--steps", "5").fit()
    whole, parts = (train_pair.load_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 5
    assert whole["tokens"] == parts["tokens"]
    assert all(torch.equal(parts["model"][name], value) for name, value in whole["model"].items())


def test_a_run_stopped_by_the_clock_goes_on_with_other_arguments(data, tmp_path):
    run_of(data, tmp_path, "--minutes", "0.05", "--stop-minutes", "0").fit()
    assert train_pair.load_checkpoint(tmp_path)["step"] == 0
    resumed = run_of(data, tmp_path, "--steps", "2", "--decay", "0.3")
    assert resumed.optimisers[0][0].param_groups[0]["weight_decay"] == 0.3
    resumed.fit()
    assert train_pair.load_checkpoint(tmp_path)["step"] == 2


def test_the_moving_average_follows_the_weights_and_is_what_is_exported(data, tmp_path):
    run = run_of(data, tmp_path / "run", "--steps", "4", "--average", "0.5", mix=["lm:1:64:2"])
    expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    for step in range(1, 5):
        run.args.stop_at = step
        run.fit()
        keep = min(0.5, step / (step + 10))
        for name, value in run.model.state_dict().items():
            expected[name] = keep * expected[name] + (1 - keep) * value
    state = train_pair.load_checkpoint(tmp_path / "run")
    for name, value in expected.items():
        torch.testing.assert_close(state["average"][name], value, atol=1e-6, rtol=1e-5)
    train_pair.export(tmp_path / "run", data / "tokenizer", tmp_path / "out")
    out = pair_model.load_folder(tmp_path / "out").state_dict()
    assert all(torch.equal(value, state["average"][name].bfloat16().float()) for name, value in out.items())


def test_the_average_of_two_models_has_the_mean_of_their_weights(data, tmp_path):
    for seed in (1, 2):
        run = run_of(data, tmp_path / f"run{seed}", "--steps", "1", "--seed", str(seed), mix=["lm:1:64:2"])
        run.fit()
        train_pair.export(tmp_path / f"run{seed}", data / "tokenizer", tmp_path / f"out{seed}")
    one, two = (tmp_path / "out1", tmp_path / "out2")
    train_pair.average([one, two], data / "tokenizer", tmp_path / "mean")
    states = [pair_model.load_folder(folder).state_dict() for folder in (one, two, tmp_path / "mean")]
    assert any(
        not torch.equal(first, second) for first, second in zip(states[0].values(), states[1].values(), strict=True)
    )
    for name, mean in states[2].items():
        assert torch.equal(mean, ((states[0][name] + states[1][name]) / 2).bfloat16().float())
    with pytest.raises(ValueError, match="one shape"):
        train_pair.average([one, ASSETS / "draft"], data / "tokenizer", tmp_path / "no")


def test_a_run_that_is_told_to_stop_ends_after_the_step_in_hand(data, tmp_path):
    run = run_of(data, tmp_path, "--steps", "9", mix=["lm:1:64:2"])
    take_step = run.take_step

    def stop_in_the_second(parts):
        if run.step == 1:
            run.stop()
        return take_step(parts)

    run.take_step = stop_in_the_second
    run.fit()
    assert train_pair.load_checkpoint(tmp_path)["step"] == 2


def test_time_in_which_a_run_is_stopped_does_not_count(data, tmp_path):
    run = run_of(data, tmp_path, "--steps", "1")
    before = run._clock()
    time.sleep(0.3)
    assert run._clock() - before < 0.15


def test_the_copy_loss_makes_one_head_look_at_the_copied_token(data):
    torch.manual_seed(0)
    model = pair_model.PairModel(train_pair.SHAPES["target-tiny"])
    batch = next(
        batch
        for step in range(50)
        if (batch := source_of(data, gapped=0.0).batch(pair_batches.Part.parse("wide:1:1024:1"), step, 0)).copies
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    pointed = []
    for _ in range(12):
        loss, logged = train_pair.part_loss(model, batch, None, train_pair.LossWeights(copied=1.0))
        pointed.append(logged["copied"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert pointed[-1] > 1.2 * pointed[0]


def test_tokens_end_a_run_where_they_come_first(data, tmp_path):
    run = run_of(data, tmp_path, "--minutes", "5", "--max-tokens", "1000", mix=["lm:1:64:4"])
    run.fit()
    assert 1000 <= run.tokens < 1000 + 256


def test_the_attention_loss_raises_the_attention_to_the_evidence(data):
    torch.manual_seed(0)
    model = pair_model.PairModel(train_pair.SHAPES["target-tiny"])
    source = source_of(data, gapped=0.0)
    batch = next(
        batch
        for step in range(50)
        if (batch := source.batch(pair_batches.Part.parse("task:1:512:1"), step, 0)).links
        and int((batch.weights > 0).sum()) <= 128
    )
    masses = []
    for _ in range(8):
        loss, logged = train_pair.part_loss(model, batch, None, train_pair.LossWeights(evidence=1.0))
        masses.append(logged["mass"])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad if parameter.grad is not None else 0.0
    assert masses[-1] > 1.2 * masses[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--minutes", "0"], "minutes"),
        (["--shape", "target"], "vocabulary of 320"),
        (["--mix", "lm:1:32768:1"], "positions"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_begins(data, tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        run_of(data, tmp_path / "out", *options, mix=[])
    assert not (tmp_path / "out").exists()


def test_a_teacher_with_another_vocabulary_is_refused(data, tmp_path):
    shape = replace(train_pair.SHAPES["target-tiny"], vocab=640)
    pair_model.export_folder(shape, pair_model.PairModel(shape).state_dict(), data / "tokenizer", tmp_path / "teacher")
    with pytest.raises(ValueError, match="another vocabulary"):
        run_of(data, tmp_path / "out", "--teacher", str(tmp_path / "teacher"))


def test_a_run_of_another_shape_is_not_resumed(data, tmp_path):
    run_of(data, tmp_path, "--steps", "1").fit()
    with pytest.raises(ValueError, match="another shape"):
        run_of(data, tmp_path, "--steps", "2", "--shape", "draft-tiny")


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (["lm:1"], "kind:weight:lengths:batch"),
        (["text:1:64:1"], "begins with one of"),
        (["lm:1:64:0"], "positive weight and batch"),
        (["lm:1:8:1"], "64 tokens"),
        (["sparse:1:512:2"], "batch is 1"),
        (["wide-sparse:1:512:2"], "batch is 1"),
        (["half=lm:1:64:1"], "fraction"),
        (["0.5=lm:1:64:1", "0.4=lm:1:64:1"], "must rise"),
    ],
)
def test_a_malformed_mix_says_what_is_wanted(mix, says):
    with pytest.raises(ValueError, match=says):
        pair_batches.parse_mix(mix)


def test_a_mix_has_phases_of_parts():
    phases = pair_batches.parse_mix(["0.5=lm:1:64:2", "task:1:64/128:1"])
    assert [until for until, _ in phases] == [0.5, 1.0]
    assert phases[1][1] == [pair_batches.Part("task", 1.0, (64, 128), 1)]


def test_a_llama_that_the_trainer_cannot_be_is_refused(tmp_path, tokenizer):
    pair_data.save_tokenizer(tokenizer, tmp_path / "tokenizer")
    pair_model.export_folder(SHAPE, pair_model.PairModel(SHAPE).state_dict(), tmp_path / "tokenizer", tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    for name, value, says in [
        ("attention_bias", True, "attention_bias True"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps 1e-06"),
        ("head_dim", 16, "heads of 16"),
    ]:
        file.write_text(json.dumps(config | {name: value}))
        with pytest.raises(ValueError, match=says):
            pair_model.load_folder(tmp_path / "out")


def test_accepted_runs_are_those_of_whole_steps():
    right = [True, True, False, True, True, True, True, False, True]
    assert pair_metrics.accepted_runs(right, 2) == [2, 2, 1]
    assert pair_metrics.accepted_runs(right, 8) == [2]


def test_a_card_keeps_its_text_around_the_measured_tables(tmp_path):
    card = tmp_path / "README.md"
    eval_pair.write_card(card, "first")
    card.write_text("before\n" + card.read_text() + "after\n")
    eval_pair.write_card(card, "second")
    text = card.read_text()
    assert "first" not in text
    assert text.index("before") < text.index("second") < text.index("after")


def test_an_answers_first_token_counts_as_often_as_asked() -> None:
    torch.manual_seed(0)
    model = pair_model.PairModel(train_pair.SHAPES["target-tiny"])
    ids = torch.tensor([[5, 6, 7, pair_model.ASSISTANT, 8, 9, 10]])
    labels, weights = torch.roll(ids, -1, 1), torch.tensor([[0.0, 0, 0, 1, 1, 0, 0]])
    batch = pair_batches.Batch(ids, labels, weights, torch.arange(7)[None], links=[(3, 0, 1), (4, 0, 1)])
    plain, _ = train_pair.part_loss(model, batch, None, train_pair.LossWeights())
    first, logged = train_pair.part_loss(model, batch, None, train_pair.LossWeights(first=4.0))
    hidden, *_ = model.hidden_at(ids, batch.positions, torch.tensor([3, 4]))
    each = torch.nn.functional.cross_entropy(model.logits(hidden)[0], labels[0, 3:5], reduction="none")
    assert float(plain.detach()) == pytest.approx(float(each.detach().mean()), rel=1e-5)
    assert float(first.detach()) == pytest.approx(float((4 * each[0] + each[1]).detach() / 5), rel=1e-5)
    assert logged["first"] == pytest.approx(float(each[0].detach()), rel=1e-5)
