from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from spec_stack import SpecStackGenerator
from spec_stack.hf.prompt import (
    EncodedPrompt,
    PromptSource,
    encode_messages,
    encode_prompt,
    encode_text,
    num_shared,
    splice,
)

Chat = list[dict[str, Any]]
THINKING = (
    "{% for m in messages %}<|user|>{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] | trim }}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts {% endif %}{% endif %}"
)
TOOLS = (
    "<|system|>{% if tools %}{% for t in tools %}{{ t['name'] }} {% endfor %}{% endif %}{% if documents %}"
    "{% for d in documents %}{{ d['text'] }}{% endfor %}{% endif %}<|end|>{% for m in messages %}<|user|>"
    "{% if m.get('tool_calls') %}call {{ m['tool_calls'][0]['function']['arguments']['city'] }}{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


TURN = "{% for m in messages %}<|{{ m['role'] }}|>BODY<|end|>{% endfor %}<|assistant|>"
CALLS = "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}{{ CALL }}{% endfor %}"
# How templates write a call, and whether they take its arguments as JSON text or as a mapping.
ARGUMENTS = {
    "deepseek": (CALLS.replace("CALL", "c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```'"), "text"),
    "either": (
        CALLS.replace(
            "CALL", "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson"
        ),
        "text",
    ),
    "hermes": (CALLS.replace("CALL", "c.function.arguments | tojson"), "mapping"),
    "nested": (CALLS.replace("CALL", "c | tojson"), "mapping"),
    "items": (CALLS.replace("CALL", "c.function.arguments.items() | list"), "mapping"),
}
# How templates write contents that are lists of parts.
PARTS = {
    "smolvlm": (
        "{% if m['content'][0]['type'] == 'image' %}:{% endif %}"
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    ),
    "llava": (
        "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ p['text'] + ' ' }}"
        "{% endgeneration %}{% endfor %}"
    ),
    "either": (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}{{ p['text'] | trim }}"
        "{% endfor %}{% endif %}"
    ),
    "by role": (
        "{% if m['role'] == 'user' %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% else %}{{ m['content'] }}"
        "{% endif %}"
    ),
}


def with_template(embedded: SpecStackGenerator, template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.copy(embedded.tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer: Any, messages: Chat, known: EncodedPrompt | None = None, **options: Any) -> EncodedPrompt:
    return encode_prompt(tokenizer, 4096, PromptSource(messages=messages, **options), known)


def prunable(tokenizer: Any, encoded: EncodedPrompt) -> str:
    """The text of the turns, by their messages."""
    spans = [turn.span for turn in encoded.turns]
    return str(tokenizer.decode([token for start, stop in spans for token in encoded.token_ids[start:stop]]))


def roles_of(encoded: EncodedPrompt) -> list[str]:
    return [turn.role for turn in encoded.turns]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "user"}],
        [{"role": "system", "content": "Be safe."}, {"role": "user", "content": "s"}],
        [{"role": "developer", "content": "rules"}, {"role": "user", "content": " padded \n"}],
        [
            {"role": "user", "content": "a b c"},
            {"role": "assistant", "content": "a b"},
            {"role": "user", "content": "a"},
        ],
    ],
)
@pytest.mark.parametrize("trims", [False, True])
def test_exactly_the_contents_are_prunable(embedded: SpecStackGenerator, messages: Chat, trims: bool) -> None:
    template = embedded.tokenizer.chat_template
    tokenizer = with_template(embedded, template.replace("m['content']", "m['content'] | trim") if trims else template)
    encoded = encode(tokenizer, messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert encoded.token_ids == tokenizer(rendered, add_special_tokens=False).input_ids
    contents = [
        message["content"].strip() if trims else message["content"]
        for message in messages
        if message["role"] in ("user", "assistant")
    ]
    assert prunable(tokenizer, encoded) == "".join(contents)
    assert encode_messages(tokenizer, messages) == encoded


def test_the_turns_of_a_template_that_edits_a_message_are_left_to_its_tokens(embedded: SpecStackGenerator) -> None:
    tokenizer = with_template(embedded, THINKING)
    messages = [
        {"role": "user", "content": "A long document.\n"},
        {"role": "assistant", "content": "<think>\nhm, let me see\n</think>\n\nFine."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "\nNothing.\n"},
        {"role": "user", "content": "Good."},
    ]
    encoded = encode(tokenizer, messages)
    assert "hm" not in encoded.text
    assert roles_of(encoded) == []


def test_tools_documents_and_template_options_reach_the_template_and_stay_dense(embedded: SpecStackGenerator) -> None:
    tokenizer = with_template(embedded, TOOLS)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How is"}, {"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny and warm"},
    ]
    tools, documents = [{"name": "weather"}], [{"text": "a guide"}]
    encoded = encode(tokenizer, messages, tools=tools, documents=documents)
    assert encoded.text.startswith("<|system|>weather a guide<|end|>")
    assert encoded.text.count("call Rome<|end|>") == 2
    assert prunable(tokenizer, encoded) == "How is\nRome?sunny and warm"
    thinking = with_template(embedded, THINKING)
    user = [{"role": "user", "content": "hi"}]
    plain, off = encode(thinking, user), encode(thinking, user, chat_template_kwargs={"enable_thinking": False})
    assert off.text == plain.text + "no thoughts "
    assert prunable(thinking, off) == "hi"


@pytest.mark.parametrize("content", [None, "Let me see."])
@pytest.mark.parametrize("arguments", ['{"city":"Rome"}', "{}", '{"a": [1, {"b": "</x>"}]}'])
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_are_rendered_in_the_form_that_the_template_takes(
    embedded: SpecStackGenerator, name: str, arguments: str, content: str | None
) -> None:
    body, form = ARGUMENTS[name]
    tokenizer = with_template(embedded, TURN.replace("BODY", body))
    chat = called(arguments, content)
    oracle = chat if form == "text" else called(json.loads(arguments), content)
    rendered = tokenizer.apply_chat_template(oracle, tokenize=False, add_generation_prompt=True)
    encoded = encode(tokenizer, chat, tools=[{"name": "find"}])
    assert encoded.text == rendered
    assert prunable(tokenizer, encoded).startswith("Where?" + (content or ""))


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": NaN}', "no JSON", ""])
def test_arguments_that_are_no_json_of_a_template_stay_text(embedded: SpecStackGenerator, arguments: str) -> None:
    tokenizer = with_template(embedded, TURN.replace("BODY", ARGUMENTS["hermes"][0]))
    chat = called(arguments, "")
    assert encode(tokenizer, chat).text == tokenizer.apply_chat_template(chat, tokenize=False)


# Templates that take a call's message with a content that is null, a text, or either.
CONTENT_WITH_CALLS = {
    "null only": "{% if m['content'] is none %}{% for c in m['tool_calls'] %}CALL{% endfor %}{% else %}TEXT{% endif %}",
    "text only": "TEXT{% for c in m['tool_calls'] or [] %}CALL{% endfor %}",
    "either": "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}CALL{% endfor %}",
    "null is written": "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}CALL{% endfor %}",
}


@pytest.mark.parametrize("question", ["Where?", [{"type": "text", "text": "Where?"}]], ids=["text", "parts"])
@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("name", sorted(CONTENT_WITH_CALLS))
def test_a_call_is_rendered_whatever_empty_content_stands_beside_it(
    embedded: SpecStackGenerator, name: str, content: str | None, question: Any
) -> None:
    body = CONTENT_WITH_CALLS[name].replace("TEXT", "{{ '' + m['content'] }}")
    body = body.replace("CALL", "<call> {{ c.function.name }}: {{ c.function.arguments }}")
    tokenizer = with_template(embedded, TURN.replace("BODY", body))
    chat = called('{"city":"Rome"}', content)
    chat[0]["content"] = question
    if content == "absent":
        del chat[1]["content"]
    if name == "null only" and not hands_null_on(tokenizer):
        with pytest.raises(ValueError, match=r"writes nothing of the tool calls of messages\[1\]"):
            encode(tokenizer, chat)
        return
    encoded = encode(tokenizer, chat)
    call = '<|assistant|><call> look_up: {"city":"Rome"}<|end|>'
    assert encoded.text == f"<|user|>Where?<|end|>{call}<|tool|>warm<|end|><|assistant|>"
    assert prunable(tokenizer, encoded) == "Where?warm"


def hands_null_on(tokenizer: Any) -> bool:
    """Whether this transformers shows a template that a content is None; from 5.24 on it leaves the content out."""
    template = "{{ messages[0]['content'] is none }}"
    return tokenizer.apply_chat_template([{"content": None}], chat_template=template, tokenize=False) == "True"


def called(arguments: Any, content: str | None) -> Chat:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "warm"},
    ]


def as_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("name", sorted(PARTS))
def test_templates_of_content_parts_are_given_parts(embedded: SpecStackGenerator, name: str, is_given: bool) -> None:
    tokenizer = with_template(embedded, TURN.replace("BODY", PARTS[name]))
    texts = ["Be brief.", "Why is it warm?", "It is not."]
    roles = ["system", "user", "assistant"]
    parts = [{"role": role, "content": as_parts(text)} for role, text in zip(roles, texts, strict=True)]
    strings = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    encoded = encode(tokenizer, parts if is_given else strings)
    oracle = [strings[0], parts[1], strings[2]] if name == "by role" else parts
    assert encoded.text == tokenizer.apply_chat_template(oracle, tokenize=False)
    assert prunable(tokenizer, encoded) == "".join(texts[1:])
    assert roles_of(encoded) == ["user", "assistant"]


def test_each_part_of_a_content_is_prunable(embedded: SpecStackGenerator) -> None:
    chat = [{"role": "user", "content": as_parts("one ", "", "two", "three")}]
    tokenizer = with_template(embedded, TURN.replace("BODY", PARTS["smolvlm"]))
    encoded = encode(tokenizer, chat)
    assert encoded.text == tokenizer.apply_chat_template(chat, tokenize=False)
    assert prunable(tokenizer, encoded) == "one twothree"
    # A template of strings has them joined, as ever.
    assert "one \n\ntwo\nthree" in encode(embedded.tokenizer, chat).text


@pytest.mark.parametrize("place", ["tools", "documents", "role", "kwargs", "content"])
def test_private_characters_are_text_like_other(embedded: SpecStackGenerator, place: str) -> None:
    tokenizer = with_template(
        embedded, "{{ tools | tojson }}{{ documents | tojson }}{{ extra }}" + embedded.tokenizer.chat_template
    )
    mark = "\ue0007\ue001"
    options: dict[str, Any] = {
        "tools": {"tools": [{"name": mark}]},
        "documents": {"documents": [{"text": mark}]},
        "kwargs": {"chat_template_kwargs": {"extra": mark}},
    }.get(place, {})
    said, role = mark if place == "content" else "hi", mark if place == "role" else "assistant"
    encoded = encode(tokenizer, [{"role": role, "content": "Hm."}, {"role": "user", "content": said}], **options)
    assert prunable(tokenizer, encoded) == "Hm." + said


def test_a_final_message_is_continued(embedded: SpecStackGenerator) -> None:
    tokenizer = embedded.tokenizer
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, I"}]
    encoded = encode(tokenizer, messages, continue_final_message=True)
    assert encoded.text.endswith("<|assistant|>Well, I")
    assert prunable(tokenizer, encoded) == "hiWell, I"


@pytest.mark.parametrize("seed", range(20))
def test_a_longer_chat_has_the_same_tokens_whether_or_not_its_beginning_is_known(
    embedded: SpecStackGenerator, seed: int
) -> None:
    rng = random.Random(seed)
    tokenizer = embedded.tokenizer if seed % 2 else with_template(embedded, THINKING)
    words = [
        "def f(x):\n",
        "    return",
        " x",
        "the cat ",
        "\n\n",
        " ",
        "é",
        "<|end|>",
        "<|user|>",
        "日本",
        "\t",
        "...",
    ]

    def text() -> str:
        return "".join(rng.choice(words) for _ in range(rng.randrange(12)))

    messages: Chat = []
    known, said = None, text()
    for turn in range(12):
        action = rng.choice(["ask", "ask", "edit", "drop"])
        if action == "edit" and messages:
            rng.choice(messages)["content"] = text()
        elif action == "drop" and len(messages) > 2:
            del messages[-rng.randrange(1, 3) :]
        messages.append({"role": "assistant" if turn % 2 else "user", "content": said})
        fresh = encode(tokenizer, messages)
        assert encode(tokenizer, messages, known) == fresh
        said = text()
        known = fresh.with_answer(tokenizer(said, add_special_tokens=False).input_ids, said)


def test_only_the_tail_of_a_known_chat_is_tokenized(embedded: SpecStackGenerator) -> None:
    tokenizer = copy.copy(embedded.tokenizer)
    messages = [{"role": "user", "content": "word " * 4000}, {"role": "assistant", "content": "Fine."}]
    known = encode(tokenizer, messages[:1])
    known = known.with_answer(tokenizer("Fine.", add_special_tokens=False).input_ids, "Fine.")
    seen: list[int] = []

    class ProgressListener(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return super().__call__(text, **options)

    tokenizer.__class__ = ProgressListener
    again = encode(tokenizer, [*messages, {"role": "user", "content": "Why?"}], known)
    assert len(seen) == 1
    assert seen[0] < 100
    assert again.token_ids[: len(known.token_ids)] == known.token_ids


def test_an_answer_that_tokenizes_otherwise_keeps_the_tokens_it_was_generated_in(embedded: SpecStackGenerator) -> None:
    tokenizer = embedded.tokenizer
    messages = [{"role": "user", "content": "Go on."}]
    known = encode(tokenizer, messages)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "because"]
    assert tokenizer("because", add_special_tokens=False).input_ids != letters
    known = known.with_answer(letters, "because")
    messages += [{"role": "assistant", "content": "because"}, {"role": "user", "content": "I see."}]
    encoded = encode(tokenizer, messages, known)
    start = len(known.token_ids)
    assert encoded.token_ids[:start] == known.token_ids
    assert tokenizer.decode(encoded.token_ids) == tokenizer.decode(encode(tokenizer, messages).token_ids)
    assert prunable(tokenizer, encoded) == "Go on.becauseI see."
    # An answer that goes on where it ended is no place to cut.
    messages[1]["content"] = "because of that"
    assert encode(tokenizer, messages, known) == encode(tokenizer, messages)


def test_protected_spans_are_of_tokens_beside_ids_and_of_characters_beside_a_text(embedded: SpecStackGenerator) -> None:
    tokenizer = embedded.tokenizer
    text = "The first sentence. The second sentence."
    encoded = encode_prompt(tokenizer, 4096, PromptSource(prompt=text, protected=[(4, 9)]))
    assert encoded.token_ids == encode_text(tokenizer, text)
    kept = [encoded.token_ids[at] for start, stop in encoded.protected for at in range(start, stop)]
    assert "first" in tokenizer.decode(kept)
    assert "second" not in tokenizer.decode(kept)
    assert encode_prompt(tokenizer, 4096, PromptSource(input_ids=[5, 6, 7], protected=[(1, 2)])).protected == [(1, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": [5, 6], "protected": [(0, 3)]}, "not within"),
        ({"input_ids": [5, 6], "protected": [(1, 1)]}, "not within"),
        ({"input_ids": [5, 6], "protected": [3]}, "pairs"),
        ({"messages": [{"role": "user", "content": "a"}], "protected": [(0, 1)]}, "protected="),
        ({"prompt": "a", "tools": [{"name": "t"}]}, "tools="),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message="),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "content parts"),
        ({"messages": [{"role": "user", "content": None}]}, "text 'content'"),
        ({"messages": [{"role": "tool"}]}, "text 'content'"),
        ({"messages": iter([{"role": "user", "content": "a"}])}, "messages must be a list"),
    ],
)
def test_prompts_of_another_form_are_refused(
    embedded: SpecStackGenerator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_prompt(embedded.tokenizer, 4096, PromptSource(**options))


@pytest.mark.parametrize(
    "calls",
    [7, True, "f()", {"name": "f"}, [5], [{"function": "f"}], [{"function": {"arguments": "{}"}}], [{"name": 3}]],
    ids=str,
)
def test_tool_calls_of_another_form_are_refused_by_name(embedded: SpecStackGenerator, calls: Any) -> None:
    chat: Chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    with pytest.raises(ValueError, match="tool_calls must be a list of"):
        encode(embedded.tokenizer, chat)


@pytest.mark.parametrize(
    "calls", [None, [], ({"name": "f"},), [{"function": {"name": "f", "arguments": None}}]], ids=str
)
def test_no_calls_and_a_function_alone_are_taken(embedded: SpecStackGenerator, calls: Any) -> None:
    chat: Chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert encode(embedded.tokenizer, chat).token_ids


IMAGE_CHAT = [{"role": "user", "content": "See <image>."}]


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "See <image>."},
        {"prompt": "See <image>.", "protected": [(0, 3)]},
        {"messages": IMAGE_CHAT},
        {"messages": [{"role": "system", "content": "<image>"}, *IMAGE_CHAT]},
        {"messages": IMAGE_CHAT, "continue_final_message": True},
        {"input_ids": [5, 4096]},
    ],
    ids=lambda given: "+".join(given),
)
def test_a_token_without_a_row_is_refused(embedded: SpecStackGenerator, given: dict[str, Any]) -> None:
    tokenizer = copy.deepcopy(embedded.tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == 4096 == embedded.pair.vocab_size
    known = encode(embedded.tokenizer, [{"role": "user", "content": "See"}])
    for earlier in (None, known):
        with pytest.raises(ValueError, match="vocabulary"):
            encode_prompt(tokenizer, 4096, PromptSource(**given), earlier)


def test_a_refusal_of_the_template_is_told_as_one(embedded: SpecStackGenerator) -> None:
    tokenizer = with_template(embedded, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        encode(tokenizer, [{"role": "user", "content": "a"}])


def test_an_end_token_after_a_plain_prompt_is_dropped(embedded: SpecStackGenerator) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(embedded.tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", bos), ("<|eos|>", eos)]
    )
    assert tokenizer("hello").input_ids[-1] == eos
    assert encode_text(tokenizer, "hello") == encode_text(embedded.tokenizer, "hello")


def test_the_length_that_two_sequences_share() -> None:
    rng = random.Random(0)
    for _ in range(200):
        one = [rng.randrange(2) for _ in range(rng.randrange(12))]
        other = one[: rng.randrange(12)] + [rng.randrange(2) for _ in range(rng.randrange(5))]
        expected = 0
        while expected < min(len(one), len(other)) and one[expected] == other[expected]:
            expected += 1
        assert num_shared(one, other) == num_shared(tuple(one), tuple(other)) == expected


@pytest.mark.parametrize("seed", range(6))
def test_a_spliced_chat_is_the_one_encoded_beside_the_known(embedded: SpecStackGenerator, seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = embedded.tokenizer
    words = ["a", "b ", "\n", "<|end|>", "code", " 12", "é"]

    def said() -> str:
        return "".join(draw.choices(words, k=draw.randint(0, 6)))

    messages: Chat = [{"role": "system", "content": said()}, {"role": "user", "content": said()}]
    known = encode(tokenizer, messages)
    for _ in range(4):
        answer = said()
        # In other tokens than its text has by itself, as a model may generate it.
        ids = [token for letter in answer for token in tokenizer(letter, add_special_tokens=False).input_ids]
        known = known.with_answer(ids, answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said()}]
        if draw.random() < 0.3:
            messages[draw.randrange(len(messages))]["content"] = said()
        wanted = encode(tokenizer, messages, known)
        assert splice(tokenizer, encode(tokenizer, messages), known) == wanted
        known = wanted
