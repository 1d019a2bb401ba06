"""Training data of the embedded pair: a tokenizer, token files and held-out text, made once from a folder.

A corpus folder holds `*.jsonl` or `*.jsonl.xz` files. Each line is a record with "text", or with "prompt" and
"response"; "src" and "id" name its origin. What a file holds is told by how its name begins (`GROUPS`): code_, docs_,
prose_novels, instruct_, qa_, …. The file `valid_mixed.*` is held out and has "domain" as well.
Lines are split on "\\n" alone: U+2028 and U+0085 occur inside strings. `pair_tasks` makes the synthetic tasks.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from experiments.pair.model import ASSISTANT, BOS, END, EOS, USER

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}<|system|>{% elif m['role'] == 'user' %}"
    "<|user|>{% else %}<|assistant|>{% endif %}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Group:
    """A part of the corpus: the prefixes of its files, its share of the language-modelling text, the most
    characters to keep of the whole and of one document, and how much of it the tokenizer is trained on."""

    prefixes: tuple[str, ...]
    share: float
    max_chars: int
    max_document: int
    tokenizer_chars: int
    haystack: bool = False


GROUPS = {
    "code": Group(("code_",), 0.20, 18_000_000, 24_000, 5_000_000, True),
    "prose": Group(("prose_novels",), 0.14, 15_000_000, 110_000, 4_200_000, True),
    "speeches": Group(("prose_speeches",), 0.02, 1_500_000, 30_000, 400_000, True),
    "stories": Group(("stories_",), 0.06, 4_200_000, 10_000, 1_200_000, True),
    "docs": Group(("docs_",), 0.13, 12_000_000, 20_000, 3_400_000, True),
    "instruct": Group(("instruct_",), 0.07, 7_000_000, 6_000, 2_200_000),
    "qa": Group(("qa_",), 0.05, 8_000_000, 6_000, 1_200_000),
    "math": Group(("math_",), 0.08, 4_500_000, 6_000, 1_200_000),
    "summaries": Group(("summaries_",), 0.08, 8_000_000, 3_500, 1_400_000),
}
VALID = "valid_mixed"
Document = str | tuple[str, str]


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """The records of one JSON-lines file, plain or xz."""
    opener = lzma.open if file.suffix == ".xz" else open
    with opener(file, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}, line {number} is no JSON: {error}") from error


def corpus_files(corpus: Path, prefixes: Sequence[str]) -> list[Path]:
    files = [*corpus.glob("*.jsonl"), *corpus.glob("*.jsonl.xz")]
    return sorted(file for file in files if file.name.startswith(tuple(prefixes)))


def documents(
    corpus: Path, name: str, exclude: Sequence[str], share: float = 1.0, from_share: float = 0.0
) -> list[Document]:
    """The documents of one group, shortened, in a fixed random order, without records whose "src" is excluded.

    share: how much of the group's max_chars to take, beginning where from_share of them have gone by.
    """
    group = GROUPS[name]
    rng = random.Random(f"pair-{name}")
    records = [record for file in corpus_files(corpus, group.prefixes) for record in read_records(file)]
    records = [record for record in records if record.get("src") not in exclude]
    rng.shuffle(records)
    kept: list[Document] = []
    num_chars = 0
    for record in records:
        skipped = num_chars < group.max_chars * from_share
        if "text" in record:
            text = record["text"]
            if len(text) > group.max_document:
                start = rng.randrange(len(text) - group.max_document)
                start = 0 if name == "code" else text.find("\n", start) + 1
                text = text[start : start + group.max_document]
            document: Document = text
            num_chars += len(text)
        else:
            prompt, response = record["prompt"].strip(), record["response"].strip()[: group.max_document]
            if len(prompt) > group.max_document:
                prompt = prompt[:400] + " ...\n" + prompt[400 - group.max_document :]
            document = (prompt, response)
            num_chars += len(prompt) + len(response)
        if not skipped:
            kept.append(document)
        if num_chars >= group.max_chars * (from_share + share):
            break
    return kept


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_document(tokenizer: Tokenizer, document: Document) -> list[int]:
    if isinstance(document, str):
        return [BOS, *encode(tokenizer, document), EOS]
    prompt, response = document
    return [BOS, USER, *encode(tokenizer, prompt), END, ASSISTANT, *encode(tokenizer, response), END]


def train_tokenizer(corpus: dict[str, list[Document]], vocab: int) -> Tokenizer:
    """Byte-level BPE; digits are single tokens, so that numbers can be copied."""

    def sample() -> Iterator[str]:
        for name, docs in corpus.items():
            docs = docs[:]
            random.Random(f"tokenizer-{name}").shuffle(docs)
            num_chars = 0
            for document in docs:
                for text in (document[:20_000],) if isinstance(document, str) else document:
                    yield text
                    num_chars += len(text)
                if num_chars > GROUPS[name].tokenizer_chars:
                    break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    if [tokenizer.token_to_id(token) for token in SPECIAL] != list(range(len(SPECIAL))):
        raise RuntimeError("the special tokens did not get the first ids")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_positions: int = 16_384) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as AutoTokenizer reads them."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "bos_token": "<|bos|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": SPECIAL[3:],
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def prepare(
    corpus: Path,
    out: Path,
    tokenizer_from: Path | None,
    vocab: int,
    exclude: Sequence[str],
    share: float = 1.0,
    from_share: float = 0.0,
) -> dict[str, Any]:
    """Write tokenizer/, one <group>.bin (uint16 ids) per group, valid.bin with valid.json, and info.json.

    tokenizer_from: a folder whose tokenizer is taken as it is (a continued model must keep its own).
    share, from_share: which part of the text, as in `documents`, so that several small folders can follow each other.
    Raises ValueError for a folder without any corpus file, and for a share that leaves nothing.
    """
    if not 0 < share <= 1 or not 0 <= from_share < 1:
        raise ValueError(f"share lies in (0, 1] and from_share in [0, 1), got {share} and {from_share}")
    texts = {name: docs for name in GROUPS if (docs := documents(corpus, name, exclude, share, from_share))}
    if not texts:
        raise ValueError(f"no records for {list(GROUPS)} in {corpus}; expected files such as code_*.jsonl(.xz)")
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer_from is None:
        tokenizer = train_tokenizer(texts, vocab)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_from / "tokenizer.json"))
    save_tokenizer(tokenizer, out / "tokenizer")
    info: dict[str, Any] = {"excluded": list(exclude), "vocab": tokenizer.get_vocab_size(), "tokens": {}}
    info |= {"share": share, "from_share": from_share}
    for name, docs in texts.items():
        ids = np.concatenate([np.array(encode_document(tokenizer, doc), dtype=np.uint16) for doc in docs])
        ids.tofile(out / f"{name}.bin")
        info["tokens"][name] = len(ids)
    prepare_valid(corpus, out, tokenizer)
    (out / "info.json").write_text(json.dumps(info, indent=1))
    return info


def prepare_valid(corpus: Path, out: Path, tokenizer: Tokenizer) -> None:
    """The held-out documents as one token file, with where each begins and how many bytes of text it has."""
    ids: list[int] = []
    meta = []
    for record in (record for file in corpus_files(corpus, [VALID]) for record in read_records(file)):
        document: Document = record.get("text") or (record["prompt"].strip(), record["response"].strip())
        tokens = encode_document(tokenizer, document)
        num_bytes = sum(len(part.encode()) for part in ([document] if isinstance(document, str) else document))
        meta.append({"domain": record["domain"], "start": len(ids), "num_tokens": len(tokens), "num_bytes": num_bytes})
        ids += tokens
    np.array(ids, dtype=np.uint16).tofile(out / f"{VALID}.bin")
    (out / f"{VALID}.json").write_text(json.dumps(meta))


class Corpus:
    """The token files of a prepared folder."""

    def __init__(self, folder: Path) -> None:
        self.ids = {name: _load(folder / f"{name}.bin") for name in GROUPS if (folder / f"{name}.bin").exists()}
        if not self.ids:
            raise ValueError(f"no token files in {folder}; run `train_pair.py prepare` first")
        self.valid = _load(folder / f"{VALID}.bin")
        self.starts = {name: np.flatnonzero(ids == BOS) for name, ids in self.ids.items()}
        self.shares = np.array([GROUPS[name].share for name in self.ids])
        self.shares /= self.shares.sum()

    def haystacks(self) -> dict[str, np.ndarray]:
        return {name: ids for name, ids in self.ids.items() if GROUPS[name].haystack}

    def window(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """length + 1 consecutive tokens and their loss weights; a chat window starts at a document."""
        name = list(self.ids)[rng.choice(len(self.ids), p=self.shares)]
        ids = self.ids[name]
        while len(ids) < length + 2:
            ids = np.concatenate((ids, ids))
        last = len(ids) - length - 1
        if GROUPS[name].haystack:
            start = int(rng.integers(0, last))
        else:
            starts = self.starts[name]
            start = int(starts[rng.integers(0, max(1, np.searchsorted(starts, last)))])
        window = ids[start : start + length + 1].astype(np.int64)
        weights = np.ones(length + 1, dtype=np.float32)
        if window[0] != BOS:
            window[0] = BOS
            weights[1] = 0
        return window, weights


def _load(file: Path) -> np.ndarray:
    return np.fromfile(file, dtype=np.uint16)


def gapped_positions(rng: np.random.Generator, length: int, span: int, share: float) -> np.ndarray:
    """0 … length-1, or, with probability share, runs of 16-64 tokens with gaps between them, reaching up to span.

    A sparsely prefilled target reads such positions.
    """
    if rng.random() >= share or span <= length * 1.1:
        return np.arange(length)
    runs: list[int] = []
    while sum(runs) < length:
        runs.append(int(rng.integers(16, 65)))
    total = int(np.exp(rng.uniform(np.log(length * 1.05), np.log(span)))) - length
    gaps = rng.exponential(size=len(runs)) * (rng.random(len(runs)) < rng.uniform(0.3, 1))
    gaps[0] = 0
    if gaps.sum() > 0:
        gaps = np.floor(gaps / gaps.sum() * total)
    return np.arange(length) + np.repeat(np.cumsum(gaps), runs)[:length].astype(np.int64)
