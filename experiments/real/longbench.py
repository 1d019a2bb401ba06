"""LongBench's English tasks: how each is asked and cut off, and its own metric (github.com/THUDM/LongBench, MIT)."""

from __future__ import annotations

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_stack.config import how_to_install

KINDS = {
    "code": frozenset({"lcc", "repobench-p"}),
    "summaries": frozenset({"gov_report", "qmsum", "multi_news"}),
    "dialogues": frozenset({"samsum"}),
    "questions": frozenset({"narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"}),
    "classification": frozenset({"trec"}),
    "retrieval and counting": frozenset({"passage_retrieval_en", "passage_count"}),
}
# Asked as plain text: they go on from examples or from code.
_RAW = frozenset({"trec", "triviaqa", "samsum", "lcc", "repobench-p"})
_FIRST_LINE = frozenset({"trec", "triviaqa", "samsum"})
_MAX_TOKENS = {
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count", "passage_retrieval_en"), 32),
    **dict.fromkeys(("multifieldqa_en", "trec", "lcc", "repobench-p"), 64),
    **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
    **dict.fromkeys(KINDS["summaries"], 512),
}
_ASK = "Answer the question based on the given passages. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class LongBenchTask:
    """One prompt with its right answers.

    classes: what a classification chooses from. num_tokens: 0 where the file does not tell.
    """

    task: str
    index: str
    prompt: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    num_tokens: int

    @property
    def name(self) -> str:
        """Which prompt it is."""
        return f"{self.task}-{self.index}"

    @property
    def is_raw(self) -> bool:
        """Tell whether it is asked without a chat template."""
        return self.task in _RAW

    @property
    def max_tokens(self) -> int:
        """LongBench's limit of the answer."""
        return _MAX_TOKENS[self.task]


def read_tasks(path: Path) -> list[LongBenchTask]:
    """The prompts of a file of JSON lines.

    Records: MiniLongBench's (task, index, prompt, gold, tokens), or a multi-hop set's (id, question, answers,
    paragraphs), whose file is named after the task.
    """
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [_multi_hop(path.stem, row) if "paragraphs" in row else _longbench(row) for row in rows]


def _longbench(row: dict[str, Any]) -> LongBenchTask:
    gold = row["gold"]
    answers, classes = (gold["answers"], gold["all_classes"]) if isinstance(gold, dict) else (gold, ())
    return LongBenchTask(row["task"], row["index"], row["prompt"], tuple(answers), tuple(classes), row["tokens"])


def _multi_hop(name: str, row: dict[str, Any]) -> LongBenchTask:
    """A multi-hop question as LongBench asks it."""
    passages = "\n".join(
        f"Passage {number}:\n{each['title']}\n{' '.join(map(str.strip, each['sentences']))}"
        for number, each in enumerate(row["paragraphs"], 1)
    )
    prompt = (
        f"{_ASK}\n\nThe following are given passages.\n{passages}\n\n{_ASK}\n\nQuestion: {row['question']}\nAnswer:"
    )
    return LongBenchTask(name.replace("multihopqa", "mqa"), row["id"], prompt, tuple(row["answers"]), (), 0)


def score(task: LongBenchTask, text: str) -> float:
    """The best score of a text over the right answers, 0 to 1."""
    if task.task in _FIRST_LINE:
        text = text.lstrip("\n").split("\n")[0]
    if task.task == "trec":
        return max(_classification(text, answer, task.classes) for answer in task.answers)
    return max(_METRICS[task.task](text, answer) for answer in task.answers)


def check_metrics(tasks: Iterable[LongBenchTask]) -> None:
    """Raise ValueError where a metric of some task is not installed, before anything is answered."""
    if find_spec("rouge") is None and any(_METRICS.get(task.task) is _rouge_l for task in tasks):
        raise ValueError(f"summaries are judged by the package rouge, which is missing: {how_to_install('longbench')}")


def _words(text: str) -> list[str]:
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _qa_f1(text: str, answer: str) -> float:
    ours, wanted = _words(text), _words(answer)
    common = sum((Counter(ours) & Counter(wanted)).values())
    return 2 * common / (len(ours) + len(wanted)) if common else 0.0


def _rouge_l(text: str, answer: str) -> float:
    # Summaries alone need it, see check_metrics.
    from rouge import Rouge

    try:
        return float(Rouge(metrics=["rouge-l"], stats=["f"]).get_scores([text], [answer])[0]["rouge-l"]["f"])
    except ValueError:  # Nothing but dots and blanks, which LongBench counts as nothing.
        return 0.0


def _code_similarity(text: str, answer: str) -> float:
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(difflib.SequenceMatcher(None, line, answer).ratio(), 2)


def _classification(text: str, answer: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in text]
    matches = [name for name in found if not (name in answer and name != answer)]
    return 1 / len(matches) if answer in matches else 0.0


def _retrieval(text: str, answer: str) -> float:
    wanted = re.findall(r"Paragraph (\d+)", answer)[0]
    return _number_share(text, wanted)


def _number_share(text: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", text)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


_METRICS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(KINDS["questions"], _qa_f1),
    **dict.fromkeys(KINDS["summaries"] | KINDS["dialogues"], _rouge_l),
    **dict.fromkeys(KINDS["code"], _code_similarity),
    "passage_retrieval_en": _retrieval,
    "passage_count": _number_share,
}
