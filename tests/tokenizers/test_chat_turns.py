"""A chat's turns found in its tokens, against what the library knows from the messages themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.prompt_text import ChatTurn
from spec_stack.tokenizers.chat_turns import ChatTurns
from spec_stack.tokenizers.prompt_reader import PromptReader

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "<|begin|>{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>\n\n"
    "{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header_end|>\n\n{% endif %}"
)
ONE_TOKEN_BOTH_WAYS = (
    "<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|user_turn|>{{ m.content }}"
    "{% else %}<|assistant_turn|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant_turn|>{% endif %}"
)
SYSTEM_IN_USER = (
    "<|begin|>{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST]{{ ns.system }}{{ m.content }}[/INST]{% set ns.system = '' %}"
    "{% else %}{{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
# A tool message is a user turn that opens with more.
TOOL_IN_USER = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|user_turn|>{{ m.content }}<|eot|>"
    "{% elif m.role == 'tool' %}<|user_turn|><|header|>{{ m.content }}<|eot|>"
    "{% else %}<|assistant_turn|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant_turn|>{% endif %}"
)
NO_SYSTEM = (
    "<|begin|>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|start|>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}ASSISTANT:"
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|header_end|>", "<|eot|>"),
    *("<|user_turn|>", "<|assistant_turn|>", "[INST]", "[/INST]", "<|start|>"),
]


def tokenizer_with(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


RECOGNISED = {name: tokenizer_with(text) for name, text in (("chatml", CHATML), ("headers", HEADERS))}
RECOGNISED["one token both ways"] = tokenizer_with(ONE_TOKEN_BOTH_WAYS)
RECOGNISED["embedded"] = AutoTokenizer.from_pretrained(ASSETS / "target")
TURNS = {name: ChatTurns.learn(tokenizer) for name, tokenizer in RECOGNISED.items()}
# Contents that begin or end in blanks, which become one token with the template's own.
CONTENTS = st.sampled_from(
    ["hello there", "\nsecond line", "\n\nthird", " x", "a", "two\n", "Is it {}? <b>", "yes\n\n"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(RECOGNISED)), st.booleans(), st.lists(CONTENTS, min_size=1, max_size=5))
def test_all_but_the_contents_of_turns_is_protected(name: str, has_system: bool, contents: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    if has_system:
        messages.insert(0, {"role": "system", "content": "Keep to the rules of the house."})
    encoded = encode_messages(RECOGNISED[name], messages)
    ids, turns = encoded.token_ids, TURNS[name].find(encoded.token_ids) or []
    by_library, by_server = ({*range(len(ids))} - _inside(found) for found in (encoded.turns, turns))
    assert by_library <= by_server | _merged_blanks(RECOGNISED[name], ids)
    # Template and content may share their blanks' tokens: then a content's own blanks, or its first word, go with them.
    extra = [
        position for position in sorted(by_server - by_library) if RECOGNISED[name].decode([ids[position]]).strip()
    ]
    assert len(extra) <= len(contents)
    roles = [turn.role for turn in turns]
    assert roles == [("user", "assistant")[at % 2] for at in range(len(contents))] or len(roles) < len(contents)
    assert TURNS[name].unrecognised == ""


def _inside(turns: Sequence[ChatTurn]) -> set[int]:
    return {at for turn in turns for at in range(*turn.span)}


def _merged_blanks(tokenizer: Any, ids: list[int]) -> set[int]:
    return {at for at, token_id in enumerate(ids) if not tokenizer.decode([token_id]).strip()}


def test_tool_messages_may_be_pruned_and_tool_definitions_may_not() -> None:
    tokenizer, turns = RECOGNISED["chatml"], TURNS["chatml"]
    tool = {"type": "function", "function": {"name": "ngram", "description": "finds", "parameters": {}}}
    messages = [
        {"role": "user", "content": "where is it"},
        {"role": "assistant", "content": "let me see"},
        {"role": "tool", "content": "long result"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    contents = [(turn.role, tokenizer.decode(ids[slice(*turn.span)])) for turn in turns.find(ids) or []]
    assert contents == [("user", "where is it"), ("assistant", "let me see"), ("tool", "long result")]


def test_the_longest_opening_that_fits_is_the_turn_s() -> None:
    tokenizer = tokenizer_with(TOOL_IN_USER)
    messages = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant", "tool")]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turns = ChatTurns.learn(tokenizer).find(ids) or []
    assert [tokenizer.decode(ids[slice(*turn.span)]) for turn in turns] == [f"the {turn.role}" for turn in turns]
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SYSTEM_IN_USER, "does not tell system messages from what users write"),
        (NO_SYSTEM, ""),
        (PLAIN, "not marked by special tokens"),
        ("{{ messages[0].content }}", "leaves messages out"),
        ("{{ raise_exception('never') }}", "could not be learnt"),
    ],
)
def test_what_a_template_does_not_show_is_said(template: str, said: str) -> None:
    turns = ChatTurns.learn(tokenizer_with(template))
    assert said in turns.unrecognised
    assert bool(turns.unrecognised) is bool(said)


def test_a_prompt_without_turns_and_a_server_without_a_tokenizer_protect_nothing() -> None:
    tokenizer = RECOGNISED["chatml"]
    found = PromptReader(tokenizer).read(tokenizer("just a text", add_special_tokens=False).input_ids)
    assert (found.template, found.turns, found.kept) == ((), (), [])
    assert found.note == ""
    assert "no tokenizer" in ChatTurns.learn(None).unrecognised


def test_a_servers_own_template_is_learnt_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML)
    tokenizer = tokenizer_with(PLAIN)
    assert ChatTurns.learn(tokenizer, str(path)).openings == TURNS["chatml"].openings
    assert "no file that can be read" in ChatTurns.learn(tokenizer, "chatml").unrecognised
