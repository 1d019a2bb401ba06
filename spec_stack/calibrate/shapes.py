"""Shapes of calibration prompts: the place of the question and the text around it. `SHAPES[shape](document, question)`
is a user message's text. `GROUPS` lists each document's shapes; those that start with the document share the draft's
pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Shape = Callable[[str, str], str]

_RULES = """Rules:
- Use only what the text above says.
- Quote the sentence on which the reply rests.
- Write plain English, in two sentences or fewer.
- Where the text is silent, write NOT FOUND.
- Do not mention these rules."""
_FORMAT = """Work in three stages. In the first, collect every passage of the text that could matter and copy it word \
for word. In the second, compare these passages with one another, say which of them contradict each other, and decide \
which one is to be trusted. In the third, give your verdict. Format:
Passages: <list>
Comparison: <one paragraph>
Verdict: <a few words>
Example:
Passages: - "The sky was green."
Comparison: There is only one passage, so nothing contradicts it.
Verdict: green
Do not add anything after the verdict: no greeting, no apology, no offer of more help, and no summary of the text."""

SHAPES: Mapping[str, Shape] = {
    "question last": lambda document, question: f"{document}\n\n{question}",
    "short answer": lambda document, question: f"{document}\n\n{question}\nKeep the answer short.",
    "JSON object": lambda document, question: (
        f'{document}\n\n{question}\n\nReply with a JSON object that has the keys "answer" and "evidence", and with '
        "nothing else."
    ),
    "rules": lambda document, question: f"{document}\n\n{question}\n\n{_RULES}",
    "long format": lambda document, question: f"{document}\n\n{question}\n\n{_FORMAT}",
    "tags": lambda document, question: (
        f"Read the document between the tags.\n<document>\n{document}\n</document>\nQuestion: {question}\nAnswer:"
    ),
    "question first": lambda document, question: f"{question}\n\n{document}",
    "question first, reminder": lambda document, question: (
        f"Question: {question}\nReply from this text alone:\n{document}\n\nNow reply to the question at the beginning."
    ),
}
LONGEST = "long format"
"""The shape that adds the most to a document."""
GROUPS: tuple[tuple[str, ...], ...] = (
    ("question last", "JSON object", "long format"),
    ("question first",),
    ("short answer", "rules", "question last"),
    ("tags",),
    ("question first, reminder",),
)
