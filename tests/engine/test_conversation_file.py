"""Sessions saved and loaded: a loaded one goes on as the saved one would have, and what does not fit is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spec_stack import PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.api.session import Session
from tests.api.test_session import EAGER, SPARSE, make_generator, slots
from tests.support import tiny_architectures
from tests.support.forwards import forwards_of, sizes_of
from tests.support.models import VOCAB, make_model, make_tokenizer, random_prompt
from tests.support.nightly import others_nightly
from tests.support.reference_session import Trace


def saved(tmp_path: Path, generator: SpecStackGenerator, num_turns: int = 2) -> tuple[Session, list[int], Path]:
    """A session after some turns, its prompt so far, and its file."""
    session, prompt = generator.session(), random_prompt(200)
    for turn in range(num_turns):
        answer = session.generate(input_ids=prompt, max_tokens=4).token_ids
        prompt = [*prompt, *answer, *random_prompt(9, seed=turn)]
    path = tmp_path / "session.safetensors"
    session.save(path)
    return session, prompt, path


def test_a_window_of_long_prompts_is_saved_and_compared(tmp_path: Path) -> None:
    windowed = replace(SPARSE, draft_window=(100, 24), draft_sinks=8)
    session, prompt, path = saved(tmp_path, make_generator(windowed))
    loaded = make_generator(windowed).load_session(path)
    expected = session.generate(input_ids=prompt, max_tokens=6).token_ids
    assert loaded.generate(input_ids=prompt, max_tokens=6).token_ids == expected
    for other in (24, (101, 24), None):
        with pytest.raises(ValueError, match="draft_window"):
            make_generator(replace(windowed, draft_window=other)).load_session(path)


@pytest.mark.parametrize("seed", others_nightly(range(4), usual=[0, 1]))
def test_a_loaded_session_goes_on_token_for_token(seed: int, tmp_path: Path) -> None:
    session, trace, path = make_generator().session(), Trace(seed, VOCAB, num_turns=6, document=300), tmp_path / "s"
    num_restored = 0
    for action, prompt, max_tokens in trace:
        session.save(path)
        loaded = make_generator().load_session(path)
        assert slots(loaded) == slots(session)
        result = session.generate(input_ids=prompt, max_tokens=max_tokens)
        again = loaded.generate(input_ids=prompt, max_tokens=max_tokens)
        assert again.token_ids == result.token_ids
        for name in ("num_cached_tokens", "num_kept_tokens", "num_recalled_tokens", "sparse_prefill_reason"):
            assert getattr(again.metrics, name) == getattr(result.metrics, name)
        num_restored += again.metrics.num_recalled_tokens
        assert slots(loaded) == slots(session)
        session = loaded if action == "fork" else session
        trace.answers.append(result.token_ids)
    if seed == 0:
        assert num_restored


@pytest.mark.parametrize(
    "name", others_nightly(["Gemma3", "GPT-OSS", "Qwen3.5", "Falcon-H1"], usual=["GPT-OSS", "Qwen3.5"])
)
def test_windows_and_recurrent_states_are_saved_too(name: str, tmp_path: Path) -> None:
    models = tiny_architectures.make_model(name), tiny_architectures.make_model(name, disturbed=True)
    generator = SpecStackGenerator(*models, config=SpecStackConfig(PrefillConfig(keep_rate=1.0)))
    session, trace = generator.session(), Trace(1, tiny_architectures.VOCAB, document=60)
    for _, prompt, max_tokens in trace:
        session.save(tmp_path / "s")
        with forwards_of(generator.target) as fed:
            again = generator.load_session(tmp_path / "s").generate(input_ids=prompt, max_tokens=max_tokens)
        result = session.generate(input_ids=prompt, max_tokens=max_tokens)
        assert again.token_ids == result.token_ids
        assert again.metrics.num_cached_tokens == result.metrics.num_cached_tokens
        assert sum(sizes_of(fed)) >= again.metrics.num_new_tokens
        trace.answers.append(result.token_ids)


def test_a_draft_with_another_tokenizer_is_saved_with_what_it_read(tmp_path: Path) -> None:
    tokenizers = make_tokenizer("a b c d e f ab abc de cd", "<t>"), make_tokenizer("f e bc d abc c b ef a", "<s>")
    models = make_model(seed=1, vocab=16), make_model(seed=2, vocab=12)
    config = SpecStackConfig(SPARSE, session=EAGER)
    generator = SpecStackGenerator(*models, tokenizers[0], config=config, draft_tokenizer=tokenizers[1])
    session = generator.session()
    text = "abcdefdeab" * 20
    text += session.generate(text, max_tokens=5).text + "cdef"
    session.save(tmp_path / "s")
    loaded = generator.load_session(tmp_path / "s")
    assert loaded.conversation.draft_cache.token_ids == session.conversation.draft_cache.token_ids
    results = [each.generate(text, max_tokens=5) for each in (session, loaded)]
    assert results[0].token_ids == results[1].token_ids
    assert slots(session) == slots(loaded)


def test_a_chat_goes_on_with_the_tokens_of_its_answers(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    session = embedded.session(SessionConfig(recall=False))
    messages = [{"role": "user", "content": "Give three tips."}]
    first = session.generate(messages=messages, max_tokens=24)
    session.save(tmp_path / "s")
    loaded = embedded.load_session(tmp_path / "s")
    assert loaded.config == session.config
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    second = loaded.generate(messages=messages, max_tokens=24)
    assert second.metrics.num_cached_tokens == first.metrics.num_prompt_tokens + len(first.token_ids) - 1
    assert second.token_ids == session.generate(messages=messages, max_tokens=24).token_ids
    assert embedded.load_session(tmp_path / "s", SessionConfig(recall_threshold=9)).config.recall_threshold == 9


def test_another_pair_or_configuration_is_refused_by_name(tmp_path: Path) -> None:
    _, _, path = saved(tmp_path, make_generator())
    config = SpecStackConfig(SPARSE, session=EAGER)
    others: list[tuple[SpecStackGenerator, str]] = [
        (SpecStackGenerator(make_model(seed=1), make_model(seed=3), config=config), "another draft"),
        (SpecStackGenerator(make_model(seed=3), make_model(seed=2), config=config), "another target"),
        (SpecStackGenerator(make_model("qwen3", seed=1), make_model(seed=2), config=config), "qwen3"),
        (make_generator(replace(SPARSE, chunk_size=16)), "chunk_size=8, here 16"),
        (SpecStackGenerator(make_model(seed=1), make_model(seed=2), make_tokenizer("a b"), config=config), "tokenizer"),
        (SpecStackGenerator(make_model(seed=1).bfloat16(), make_model(seed=2), config=config), "bf16"),
    ]
    for generator, message in others:
        with pytest.raises(ValueError, match=message):
            generator.load_session(path)
    # Devices differ in the threshold, and what a session restores is its own affair.
    assert make_generator(replace(SPARSE, min_prompt_tokens=5000)).load_session(path).config == EAGER
    assert make_generator(session=SessionConfig(recall=False)).load_session(path).config == EAGER


Change = Callable[[dict[str, str], dict[str, torch.Tensor]], object]


def _set_version(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    metadata["session"] = json.dumps(json.loads(metadata["session"]) | {"version": 99})


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def craft(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return craft


OTHER = "not those that were saved"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata, tensors: metadata.pop("kind"), "not made by Session.save"),
        (lambda metadata, tensors: metadata.update(session="{"), "for a session"),
        (lambda metadata, tensors: metadata.update(session="{}"), "version"),
        (_set_version, "version 99"),
        (lambda metadata, tensors: tensors.pop("draft.cache.1.keys"), OTHER),
        (lambda metadata, tensors: tensors.update({"draft.cache.7.keys": torch.zeros(1)}), OTHER),
        (_set("token_ids", lambda tensor: tensor[:50].clone()), OTHER),
        (_set("draft.positions", lambda tensor: tensor.view(torch.float64)), OTHER),
        (_set("target.recalled_end", lambda tensor: torch.zeros(1, 1)), OTHER),
        (_set("target.cache.0.keys", lambda tensor: tensor * float("nan")), OTHER),
    ],
)
def test_a_file_that_is_none_or_was_changed_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    generator = make_generator()
    _, _, path = saved(tmp_path, generator)
    with safe_open(path, framework="pt") as opened:
        metadata = dict(opened.metadata())
    tensors = load_file(path)
    change(metadata, tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=f"(?s)session.*({message})"):
        generator.load_session(path)


@pytest.mark.parametrize("name", ["none/file", "folder", "link", "n" * 300, "pipe", "to_pipe", "loop"])
def test_a_place_that_cannot_be_written_is_named_and_left_as_it_was(tmp_path: Path, name: str) -> None:
    session, _, _ = saved(tmp_path, make_generator())
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"cannot write .*{name.removesuffix('/file')}"):
        session.save(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    session.save(tmp_path / "file")


def test_files_that_are_missing_empty_or_cut_off_are_refused(tmp_path: Path) -> None:
    generator = make_generator()
    _, _, path = saved(tmp_path, generator)
    cut, empty = tmp_path / "cut", tmp_path / "empty"
    cut.write_bytes(path.read_bytes()[:1000])
    empty.write_bytes(b"")
    for file in (cut, empty, tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=r"cannot take .* for a session"):
            generator.load_session(file)


def test_a_session_that_answers_or_is_closed_is_not_saved_and_a_failed_save_leaves_the_old_file(
    tmp_path: Path,
) -> None:
    session, prompt, path = saved(tmp_path, make_generator())
    before = path.read_bytes()
    stream = session.stream(input_ids=prompt, max_tokens=9)
    next(stream)
    with pytest.raises(RuntimeError, match="another call"):
        session.save(path)
    stream.close()
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_behind_its_link_with_its_mode(tmp_path: Path) -> None:
    session, _, path = saved(tmp_path, make_generator())
    disk = tmp_path / "disk"
    disk.mkdir()
    for name, mode in (("open", 0o644), ("shared", 0o660), ("private", 0o600)):
        (disk / name).write_text("old")
        (disk / name).chmod(mode)
        (tmp_path / name).symlink_to(disk / name)
        session.save(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert make_generator().load_session(disk / name).num_cached_tokens == session.num_cached_tokens
        assert (disk / name).stat().st_mode & 0o777 == mode
    (tmp_path / "dangling").symlink_to(disk / "new")
    session.save(tmp_path / "dangling")
    assert (disk / "new").stat().st_size == path.stat().st_size
    # What another program calls by the name of a part stays.
    (disk / "open.part").write_text("mine")
    session.save(disk / "open")
    assert (disk / "open.part").read_text() == "mine"
    assert sorted(each.name for each in disk.iterdir()) == ["new", "open", "open.part", "private", "shared"]
