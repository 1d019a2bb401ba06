"""Prompts by how a document is asked about: requests behind or before it, follow-ups, and none at all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from experiments.real.evidence_prompts import TOWNS, Measure
from experiments.real.judging.documents import LANGUAGES, WORDS, Document, Needle, Texts, fill, hide, make_document
from experiments.real.judging.prompt import JudgingPrompt, Message

MEDIA = (
    *("english", "python", "log", "yaml", "javascript", "manual"),
    *("json", "diff", "csv", "rust", "several documents", "english"),
)
SHAPES: Mapping[str, str] = WORDS["shapes"]
_ALWAYS = ("question", "instruction")
_IN_TURN = ("phrase", "several instructions", "behind code", "json answer", "follow-up")
_FORMS = ("instruction", "phrase")
_AHEAD = ("instruction first", "heading and text")


def requests(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """2 · size documents of every medium; each is asked a question and the same as an instruction, in three other
    shapes in turn, and every second one by a request before it."""
    for number in range(2 * size):
        for at, medium in enumerate(MEDIA):
            own = number + 2 * size * MEDIA[:at].count(medium)
            document = make_document(texts, medium, own, num_tokens, measure)
            group = f"{medium}/{at}/{number}"
            turn = 3 * (at + len(MEDIA) * (number // 2))
            shapes = [*_ALWAYS, *(_IN_TURN[(turn + step) % len(_IN_TURN)] for step in range(3))]
            for step, shape in enumerate(shapes):
                yield _ask(document, shape, medium, group, document.needles[int(step > 1) * (step % 2)])
            if (at + number // 2) % 2:
                shape = _AHEAD[(at // 2) % len(_AHEAD)]
                yield _ask(document, shape, medium, f"{shape}/{group}", document.needles[1])


def in_languages(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """2 · size documents of every language with a question and a request of another form each."""
    for number in range(2 * size):
        for at, language in enumerate(LANGUAGES):
            document = make_document(texts, language, number, num_tokens, measure)
            group = f"{language}/{number}"
            for shape, needle in zip(("question", _FORMS[(at + number // 2) % 2]), document.needles, strict=True):
                yield _ask(document, shape, language, group, needle, "languages")


def unasked(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """Texts to continue, code to complete, and examples to classify by, without any request."""
    for number in range(2 * size):
        rng = random.Random(f"unasked/{number}")
        document = make_document(texts, "english", 20 + number, num_tokens, measure)
        needle = document.needles[0]
        text = f"{document.text}\n\nNobody had thought of it for years. {needle.asks['begin']}"
        yield _plain("continue", "english", document.source, number, text, needle)

        document = make_document(texts, "python", 20 + number, num_tokens, measure, 0)
        signature, end = rng.choice(WORDS["signatures"])
        line = fill(signature, {"n": str(rng.randrange(11, 99))})
        needle = Needle((line,), (), (line,), {})
        text = "\n".join(hide(rng, document.text.split("\n"), [needle], "python")) + f"\n\n{end}"
        yield _plain("complete", "python", document.source, number, text, needle)

        text, needle = _tickets(rng, num_tokens, measure)
        yield _plain("classify", "tickets", f"tickets {number}", number, text, needle)


def _ask(
    document: Document, shape: str, medium: str, group: str, needle: Needle, family: str = "requests"
) -> JudgingPrompt:
    parts = {"document": document.text, **needle.asks}
    messages: list[Message]
    if shape == "follow-up":
        other = next(each for each in document.needles if each is not needle)
        first, last = WORDS["follow_up"]
        question, answer = (fill(text, {"other_instruction": other.asks["instruction"], **parts}) for text in first)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": fill(last, parts)},
        ]
    else:
        messages = [{"role": "user", "content": fill(SHAPES[shape], parts)}]
    row = medium if family == "languages" else shape
    name = f"{group}/{shape}"
    return JudgingPrompt(name, family, row, medium, document.source, group, messages, needle.evidence)


def _plain(shape: str, medium: str, source: str, number: int, text: str, needle: Needle) -> JudgingPrompt:
    messages = [{"role": "user", "content": text}]
    group = f"{shape}/{number}"
    return JudgingPrompt(group, "unasked", shape, medium, source, group, messages, needle.evidence)


def _tickets(rng: random.Random, num_tokens: int, measure: Measure) -> tuple[str, Needle]:
    """Labelled examples of four common labels and one of a rare label, and a text of the rare one."""
    label, example, last = rng.choice(WORDS["rare_tickets"])
    wanted = f"Ticket: {example.format(n=rng.randrange(100, 9999))} ({rng.choice(TOWNS)})\nQueue: {label}"
    examples: list[str] = []
    while measure("\n\n".join(examples)) < num_tokens:
        common = rng.choice([*WORDS["tickets"]])
        text = rng.choice(WORDS["tickets"][common]).format(n=rng.randrange(100, 9999))
        examples.append(f"Ticket: {text} ({rng.choice(TOWNS)})\nQueue: {common}")
    examples.insert(rng.randrange(len(examples) // 10, len(examples) * 9 // 10), wanted)
    examples.append(f"Ticket: {last.format(n=rng.randrange(100, 9999))} ({rng.choice(TOWNS)}).\nQueue:")
    return "\n\n".join(examples), Needle((wanted,), (), (wanted,), {})
