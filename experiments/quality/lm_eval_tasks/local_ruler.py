"""RULER's tasks that can be made without a network, for lm-eval: `--include_path experiments/quality/lm_eval_tasks`.

Variable tracking, common words and frequent words are lm-eval's own generators. The needle's haystack is the files of a
folder, named by --metadata '{"haystack": "FOLDER"}' (standard-library sources by default); its wording is RULER's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
from lm_eval.tasks.ruler.common_utils import get_tokenizer, postprocess_pred, resolve_tokenizer_name, string_match_all

LENGTHS = (1024, 2048, 4096, 8192)
NUM_SAMPLES = 50
_TOKENS_TO_GENERATE = 64
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_PROMPT = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n{context}\nWhat are all the special magic numbers for {key} mentioned in the "
    "provided text?"
)
_PREFIX = "The special magic number for {key} mentioned in the provided text is"
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")

Row = dict[str, Any]


def process_results(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """RULER's score, the share of the answers that the text contains, under the document's length; -1 elsewhere."""
    scores = {str(length): -1.0 for length in LENGTHS}
    scores[str(doc["max_length"])] = string_match_all(postprocess_pred(list(results)), [doc["outputs"]])
    return scores


def mean_of_length(scores: Sequence[float]) -> float:
    """The mean over the documents of one length; -1 where there are none."""
    own = [score for score in scores if score != -1]
    return sum(own) / len(own) if own else -1.0


def variable_tracking(**options: Any) -> dict[str, datasets.Dataset]:
    from lm_eval.tasks.ruler import vt_utils

    def make(tokenizer: Any, length: int, num_samples: int) -> list[Row]:
        example = vt_utils.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5
        )[0]
        return list(
            vt_utils.sys_vartrack_w_noise_random(
                tokenizer=tokenizer, num_samples=num_samples, max_seq_length=length, icl_example=example
            )
        )

    return _dataset(options, make)


def common_words(**options: Any) -> dict[str, datasets.Dataset]:
    from lm_eval.tasks.ruler import cwe_utils

    def make(tokenizer: Any, length: int, num_samples: int) -> list[Row]:
        return list(cwe_utils.sys_word_pair_random(num_samples=num_samples, max_seq_length=length, tokenizer=tokenizer))

    return _dataset(options, make)


def frequent_words(**options: Any) -> dict[str, datasets.Dataset]:
    from lm_eval.tasks.ruler import fwe_utils

    def make(tokenizer: Any, length: int, num_samples: int) -> list[Row]:
        return list(fwe_utils.sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=num_samples))

    return _dataset(options, make)


def needle(**options: Any) -> dict[str, datasets.Dataset]:
    sentences = read_sentences(options.get("haystack"))

    def make(tokenizer: Any, length: int, num_samples: int) -> list[Row]:
        rng = random.Random(length)
        return [hide(tokenizer, sentences, length, rng) for _ in range(num_samples)]

    return _dataset(options, make)


def read_sentences(folder: str | None) -> list[str]:
    """The sentences and lines of a folder's texts, in order. Raises ValueError where it holds none."""
    if folder is None:
        from spec_stack.calibrate.documents import MODULES, module_source

        texts: Iterable[str] = [module_source(module) for module in MODULES]
    else:
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".txt", ".md", ".py", ".rst"))
        if not files:
            raise ValueError(f"{folder} holds no .txt, .md, .rst or .py file")
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return [part.strip() for text in texts for part in _SENTENCE.split(text) if part.strip()]


def hide(tokenizer: Any, sentences: Sequence[str], length: int, rng: random.Random) -> Row:
    """A needle in as much of the text as fits the length, from a place of the text that is drawn."""
    key = "-".join(rng.choice(_WORDS[kind]) for kind in range(2))
    value = str(rng.randint(10**6, 10**7 - 1))
    start = rng.randrange(len(sentences))
    text = [*sentences[start:], *sentences[:start]]
    needle_text = _NEEDLE.format(key=key, value=value)

    def prompt_of(number: int) -> str:
        own = text[:number]
        own.insert(round(depth * number), needle_text)
        return _PROMPT.format(context=" ".join(own), key=key)

    depth, fits, too_many = rng.random(), 1, len(text) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        num_tokens = len(tokenizer(prompt_of(middle)).input_ids) + _TOKENS_TO_GENERATE
        fits, too_many = (middle, too_many) if num_tokens <= length else (fits, middle)
    prompt = prompt_of(fits)
    return {
        "index": start,
        "input": prompt,
        "outputs": [value],
        "length": len(tokenizer(prompt).input_ids) + _TOKENS_TO_GENERATE,
        "max_length": length,
        "gen_prefix": _PREFIX.format(key=key),
    }


_WORDS = (
    ("amber", "brisk", "calm", "dusty", "eager", "faint", "gentle", "hollow", "ivory", "jolly", "keen", "lofty"),
    ("anchor", "beacon", "canyon", "dolphin", "ember", "falcon", "garnet", "harvest", "island", "juniper", "kettle"),
)


def _dataset(options: dict[str, Any], make: Callable[[Any, int, int], list[Row]]) -> dict[str, datasets.Dataset]:
    random.seed(42)
    tokenizer = get_tokenizer(resolve_tokenizer_name(options))
    lengths = options.get("max_seq_lengths", LENGTHS)
    unknown = sorted(set(lengths) - set(LENGTHS))
    if unknown:
        raise ValueError(f"max_seq_lengths must be among {LENGTHS}, got {unknown}; add a metric to common.yaml")
    rows = [row for length in lengths for row in make(tokenizer, length, options.get("num_samples", NUM_SAMPLES))]
    return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}
