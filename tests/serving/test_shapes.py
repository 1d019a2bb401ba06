"""A chat's question is found wherever it stands: the server keeps what the library keeps, in every shape of prompt."""

from __future__ import annotations

import pytest

from tests.support.nightly import others_nightly

from .conftest import Reference, Server

QUESTION = "What is the code word of the northern gate?"
FACT = "The code word of the northern gate is heliotrope."
Messages = list[dict[str, str]]
# By day. The others are questions last, too.
USUAL = {
    "JSON",
    "question first",
    "question in the system message",
    "earlier turn",
    "tool output",
    "Chinese",
    "summary",
}


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def shaped(document: str) -> dict[str, Messages]:
    """A question about a document, by where it stands."""
    asked = f"{document}\n\n{QUESTION}"
    first_turn = [*user(asked), {"role": "assistant", "content": "heliotrope"}]
    return {
        "question last": user(asked),
        "answer briefly": user(f"{asked}\nAnswer briefly."),
        "unknown": user(f'{asked}\nIf the text does not say it, answer "unknown".'),
        "JSON": user(f'{asked}\nReply with a JSON object that has the keys "answer" and "quote", and nothing else.'),
        "step by step": user(f"{asked}\nThink step by step. First list what the text says, then decide, then answer."),
        "question first": user(f"{QUESTION}\n\n{document}"),
        "question in the system message": [{"role": "system", "content": QUESTION}, *user(document)],
        "earlier turn": [*first_turn, *user(f"{document}\n\nNow the same for the southern gate.")],
        "two questions": user(f"{asked} And who keeps the keys of the harbour?"),
        "quoted": user(f'{document}\n\n"{QUESTION}" the guard had asked. Explain what he wanted.'),
        "tool output": user(f"<tool_response>\n{document}\n</tool_response>\n{QUESTION}"),
        "Russian": user(f"{document}\n\nКакое кодовое слово у северных ворот?"),
        "Chinese": user(f"{document}\n\n北门的暗号是什么?"),
        "summary": user(f"Summarize this text.\n\n{document}"),
        "continue": user(document),
    }


@pytest.mark.parametrize("shape", others_nightly(shaped(""), usual=USUAL))
def test_the_server_keeps_what_the_library_keeps(server: Server, reference: Reference, shape: str) -> None:
    lines = reference.tokenizer.decode(reference.text_ids(500, seed=211)).splitlines()
    messages = shaped("\n".join([*lines[: len(lines) // 3], FACT, *lines[len(lines) // 3 :]]))[shape]
    expected = reference.generator.generate(
        messages=messages, max_tokens=16, sparse_prefill="on", keep_rate=0.2, gamma=0, ignore_eos=True
    )
    asked = {"sparse_prefill": "on", "keep_rate": 0.2, "follow_up": "afresh"}
    reply = server.chat(messages, max_tokens=16, custom_params={"spec_stack": asked})
    report = reply["spec_stack"]
    assert report["num_kept_tokens"] == expected.metrics.num_kept_tokens < report["num_prompt_tokens"]
    assert reply["text"] == expected.text
