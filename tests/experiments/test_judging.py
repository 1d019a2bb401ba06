from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from experiments.real.fetch_texts import prose
from experiments.real.judging import all_prompts
from experiments.real.judging.prompt import JudgingPrompt, encode
from spec_stack.hf.loading import ASSETS, load_tokenizer

MEDIA = ["english", "german", "chinese", "japanese", "arabic", "python", "rust", "javascript", "diff"]
TOKENIZER = load_tokenizer(str(ASSETS / "target"))


def some_text(medium: str, number: int) -> str:
    return "\n".join(f"{medium} text {number} says on line {at} that all is well." for at in range(400))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    records = [
        {"source": f"{medium}/{number}", "medium": medium, "text": some_text(medium, number)}
        for medium in MEDIA
        for number in range(300)
    ]
    results = [{"role": "user", "content": f"[tool result] {some_text('result', at)[:1500]}"} for at in range(8)]
    session = [{"role": "user", "content": "Build it."}, *results]
    records += [{"source": f"session/{at}", "medium": "session", "text": json.dumps(session)} for at in range(9)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return folder


def made(texts: Path) -> list[JudgingPrompt]:
    return all_prompts(texts, 1000, lambda text: len(text) // 4)


def test_the_evidence_of_every_prompt_stands_in_it_once_and_in_no_question(texts: Path) -> None:
    for prompt in made(texts)[::7]:
        encoded = encode(TOKENIZER, prompt)
        assert len(encoded.spans) == len(prompt.evidence) > 0
        for (start, stop), text in zip(encoded.spans, prompt.evidence, strict=True):
            assert text in "".join(encoded.pieces[start:stop])


def test_no_document_is_in_both_halves(texts: Path) -> None:
    halves: dict[str, set[str]] = {"tune": set(), "judge": set()}
    for prompt in made(texts):
        halves[prompt.half].add(prompt.source)
    assert min(map(len, halves.values())) > 9
    assert not halves["tune"] & halves["judge"]


def test_prompts_are_always_the_same_several_of_a_shape(texts: Path) -> None:
    found = made(texts)
    assert found == made(texts)
    assert len({prompt.name for prompt in found}) == len(found)
    assert all(number >= 4 for number in Counter(prompt.shape for prompt in found).values())


def test_prose_is_the_translated_part_of_a_page() -> None:
    page = "<head>Ein Titel der Seite</head><p>Dies ist ein langer Satz\nauf Deutsch.</p><p>0 1 2 3 4 5 6 7 8</p>"
    assert prose(page, "german") == "Dies ist ein langer Satz auf Deutsch."
