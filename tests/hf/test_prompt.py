from __future__ import annotations

import copy

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.hf.prompt import encode_messages, encode_text


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
def test_exactly_the_contents_are_prunable(
    embedded: SpecStackGenerator, messages: list[dict[str, str]], trims: bool
) -> None:
    tokenizer = copy.copy(embedded.tokenizer)
    if trims:
        tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    ids, protected = encode_messages(tokenizer, messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(rendered, add_special_tokens=False).input_ids
    prunable = [token for index, token in enumerate(ids) if (index, index + 1) not in protected]
    contents = [
        message["content"].strip() if trims else message["content"]
        for message in messages
        if message["role"] in ("user", "assistant")
    ]
    assert tokenizer.decode(prunable) == "".join(contents)


def test_a_template_that_rewrites_its_messages_leaves_nothing_prunable(embedded: SpecStackGenerator) -> None:
    tokenizer = copy.copy(embedded.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | upper")
    ids, protected = encode_messages(tokenizer, [{"role": "user", "content": "some text"}])
    assert sum(stop - start for start, stop in protected) == len(ids)


def test_an_end_token_after_a_plain_prompt_is_dropped(embedded: SpecStackGenerator) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(embedded.tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", bos), ("<|eos|>", eos)]
    )
    assert tokenizer("hello").input_ids[-1] == eos
    assert encode_text(tokenizer, "hello") == encode_text(embedded.tokenizer, "hello")
