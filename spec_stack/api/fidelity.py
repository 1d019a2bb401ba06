"""What pruning does to prompts: the time to first token over dense prefill, and the loss of the dense answers.

The dense greedy answer of each prompt is the reference. Its tokens are scored under the pruned cache by teacher
forcing: one forward gives their loss, and the first token at which greedy decoding would differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch

from spec_stack.api.fidelity_report import Example, FidelityReport, PromptFidelity, PrunedPrompt, summarise
from spec_stack.api.generator import SpecStackGenerator
from spec_stack.config import PrefillConfig
from spec_stack.engine.engine import Engine
from spec_stack.engine.options import Call
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.prefilled import PrefilledPrompt, token_logprobs
from spec_stack.hf.architectures import text_config
from spec_stack.hf.prompt import Message, Span
from spec_stack.prefill.calibration import fingerprint
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments
from spec_stack.types import Proposal, Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Prompt = str | Sequence[Message] | Mapping[str, Any]
Progress = Callable[[int, int, str], None]
# Tokens behind a question, up to the end of the turn, from which they count as instructions.
_INSTRUCTIONS = 32
_QUESTION_CHARACTERS = 120
_ROW_BEGINS = '{"key": '


@dataclass(frozen=True)
class FidelityConfig:
    """Options of `measure_fidelity`, which describes them. Raises ValueError for a value outside its range."""

    keep_rates: Sequence[float] = (0.1, 0.2, 0.3)
    max_tokens: int = 48
    minutes: float = 10.0
    within: float = 0.02

    def __post_init__(self) -> None:
        if not self.keep_rates:
            raise ValueError("keep_rates is empty; give one or more shares of the prompt")
        for rate in self.keep_rates:
            if not isinstance(rate, int | float):
                raise ValueError(f"keep_rates must be numbers, got {rate!r}")
            PrefillConfig(keep_rate=rate)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {self.max_tokens}")
        for name in ("minutes", "within"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be over 0, got {getattr(self, name)}")


def measure_fidelity(
    generator: SpecStackGenerator,
    prompts: Sequence[Prompt],
    keep_rates: Sequence[float] = FidelityConfig.keep_rates,
    *,
    max_tokens: int = FidelityConfig.max_tokens,
    minutes: float = FidelityConfig.minutes,
    within: float = FidelityConfig.within,
    rows: str | Path | None = None,
    progress: Progress | None = None,
    timer: Callable[[], float] = perf_counter,
) -> FidelityReport:
    """Measure what pruning does to prompts, against dense prefill.

    Every prompt is pruned whatever its length, by the generator's configuration at each keep rate. A prompt's
    dense and sparse prefills follow each other; the first prompt is prefilled once more before, untimed.

    Parameters
    ----------
    generator : SpecStackGenerator
        The pair and its configuration.
    prompts : sequence
        Texts, lists of messages, or mappings with "messages" (and "tools") or with "prompt" or "text". A text is a
        user's message where the target has a chat template.
    keep_rates : sequence of float
        Settings to compare. The generator's own is added where a calibration chose it.
    max_tokens : int
        Most tokens of a dense answer.
    minutes : float
        No prompt starts after so many minutes; the first one always does.
    within : float
        Accepted increase of the dense answers' perplexity: 0.02 is 2 %.
    rows : str or Path, optional
        A .jsonl file that gets a row after every prompt. Rows of the same prompt, pair and settings are not measured
        again.
    progress : callable, optional
        Called with (num_done, num_prompts, text) after every prompt.
    timer : callable
        Returns seconds; `time.process_time` on a shared machine.

    Returns
    -------
    FidelityReport

    Raises
    ------
    ValueError
        For an invalid option, a generator without a tokenizer, malformed prompts and rows, and if no prompt can be
        pruned.

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator, measure_fidelity
    >>> generator = SpecStackGenerator.from_pretrained()
    >>> prompt = "def add(a, b):\\n    return a + b\\n\\n" * 40 + "What does add return?"
    >>> report = measure_fidelity(generator, [prompt], [0.3], max_tokens=4)
    >>> report.settings[0].num_words_lost
    0
    """
    config = FidelityConfig(keep_rates, max_tokens, minutes, within)
    if generator.tokenizer is None:
        raise ValueError("the target has no tokenizer; fidelity is measured on texts")
    calls = [_call_of(prompt, generator.tokenizer, number) for number, prompt in enumerate(prompts, start=1)]
    measuring = _Measuring(generator.engine, config, timer)
    known = {} if rows is None else _read_rows(Path(rows))
    until = monotonic() + 60 * minutes
    measured: list[PromptFidelity] = []
    skipped: list[tuple[int, str]] = []
    num_left = 0
    for number, call in enumerate(calls, start=1):
        key = measuring.key(call)
        if key in known:
            measured.append(replace(known[key], number=number))
            continue
        if measured and monotonic() >= until:
            num_left += 1
            continue
        try:
            row = measuring.measure(call, key, number)
        except ValueError as error:
            skipped.append((number, str(error)))
            continue
        measured.append(row)
        if rows is not None:
            _add_row(Path(rows), row)
        if progress is not None:
            progress(number, len(calls), _in_words(row))
    if not measured:
        reasons = "; ".join(f"prompt {number}: {reason}" for number, reason in skipped[:3])
        raise ValueError(f"no prompt was measured ({reasons or 'the list is empty'})")
    least = generator.config.prefill.min_prompt_tokens
    report = FidelityReport(
        settings=[summarise(name, measured) for name in measuring.settings],
        prompts=measured,
        skipped=skipped,
        num_left=num_left,
        num_short=sum(row.num_tokens < least for row in measured),
        within=within,
    )
    return replace(report, examples=measuring.examples(report, calls))


class _Measuring:
    """Measures single prompts under all settings."""

    def __init__(self, engine: Engine, config: FidelityConfig, timer: Callable[[], float]) -> None:
        self._engine, self._config, self._timer = engine, config, timer
        prefill = engine.config.prefill
        self.settings: dict[str, float | None] = {f"{rate:g}": rate for rate in config.keep_rates}
        if prefill.calibrated_by and prefill.keep_rate not in config.keep_rates:
            self.settings["calibrated"] = None
        pair = engine.pair
        self._pair = [pair.precision, pair.draft_precision, str(pair.target.device)]
        self._pair += [_digest_of(model) for model in (pair.target, pair.draft)]
        self._is_warm = False

    def key(self, call: Call) -> str:
        """Identifies a prompt with the pair and everything that decides its row."""
        prefill = repr(self._engine.config.prefill)
        values = [call, self._pair, prefill, sorted(self.settings), self._config.max_tokens]
        return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:20]

    def measure(self, call: Call, key: str, number: int) -> PromptFidelity:
        """Measure a prompt. Raises ValueError for one that cannot be pruned or prefilled."""
        num_tokens = self._check(call)
        self._warm_up(call)
        dense, seconds = self._prefill(cast(Call, {**call, "sparse_prefill": "off"}))
        answer = dense.greedy(self._config.max_tokens)
        loss = -float(token_logprobs(dense.logits(answer), answer).mean())
        del dense
        seen = _Seen(self._engine.config.prefill)
        pruned = [self._pruned(call, name, answer, seen) for name in self.settings]
        return PromptFidelity(
            key=key,
            number=number,
            num_tokens=num_tokens,
            kind=seen.kind,
            question=seen.question,
            answer=self._text(answer),
            num_answer_tokens=len(answer),
            ttft_s=seconds,
            loss=loss,
            pruned=pruned,
        )

    def examples(self, report: FidelityReport, calls: Sequence[Call]) -> list[Example]:
        """The prompt that loses most, and the one in the middle."""
        setting = report.shown.setting
        ranked = sorted(report.prompts, key=lambda row: row.lost(setting))
        chosen = {"the largest loss": ranked[-1], "the median": ranked[(len(ranked) - 1) // 2]}
        found = []
        for what, row in chosen.items():
            pruned, _ = self._prefill(self._sparse(calls[row.number - 1], setting))
            text = self._text(pruned.greedy(self._config.max_tokens))
            lost = row.lost(setting)
            found.append(Example(what, row.number, setting, row.kind, row.question, lost, row.answer, text))
        return found if len(ranked) > 1 else found[:1]

    def _warm_up(self, call: Call) -> None:
        """Prefill the first prompt once each way: first forwards of a length are slower."""
        if not self._is_warm:
            self._is_warm = True
            self._prefill(cast(Call, {**call, "sparse_prefill": "off"}))
            self._prefill(self._sparse(call, next(iter(self.settings))))

    def _check(self, call: Call) -> int:
        """The prompt's length in tokens. Raises ValueError for one that cannot be pruned, before any model runs."""
        least = min(self._config.keep_rates)
        request = self._engine.plan(cast(Call, {**call, "sparse_prefill": "on", "keep_rate": least}))
        if not request.scores:
            raise ValueError(f"it has {len(request.prompt_ids)} tokens and cannot be pruned ({request.reason})")
        return len(request.prompt_ids)

    def _pruned(self, call: Call, setting: str, answer: Sequence[int], seen: _Seen) -> PrunedPrompt:
        prefilled, seconds = self._prefill(self._sparse(call, setting), seen)
        logits = prefilled.logits(answer)
        likeliest = logits.argmax(dim=-1).tolist()
        same = [token_id == other for token_id, other in zip(answer, likeliest, strict=True)]
        return PrunedPrompt(
            setting=setting,
            num_kept_tokens=len(prefilled.selection.positions),
            ttft_s=seconds,
            loss=-float(token_logprobs(logits, answer).mean()),
            agreement=sum(same) / len(same),
            first_divergence=None if all(same) else same.index(False),
            num_words_lost=_words_lost(prefilled, self._engine.pair),
        )

    def _sparse(self, call: Call, setting: str) -> Call:
        return cast(Call, {**call, "sparse_prefill": "on", "keep_rate": self.settings[setting]})

    def _prefill(self, call: Call, seen: _Seen | None = None) -> tuple[PrefilledPrompt, float]:
        """The prefilled prompt, and the seconds to its first token."""
        began = self._timer()
        prefilled = PrefilledPrompt(self._engine, cast(Call, {**call, "max_tokens": self._config.max_tokens}), seen)
        # Reading a token waits for the device.
        _ = prefilled.first_token
        return prefilled, self._timer() - began

    def _text(self, answer: Sequence[int]) -> str:
        return str(self._engine.pair.tokenizer.decode(answer, skip_special_tokens=True))


def _digest_of(model: PreTrainedModel) -> str:
    """Identifies a model's weights: its configuration, and a number of each parameter."""
    numbers = [float(parameter.detach().flatten()[-1]) for parameter in model.parameters()]
    values = [fingerprint(text_config(model.config)), numbers]
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:20]


class _Seen:
    """Finds a prompt's kind and question where it is scored (`prefill.rule.Observer`)."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self.kind = self.question = ""

    def scored(self, inputs: ScoringInputs) -> None:
        self.kind, self.question = _kind_of(inputs, self._config)

    def voted(self, segments: Segments, scores: torch.Tensor) -> None:
        """Scores are not needed."""

    def selected(self, selection: Selection, look_ahead: Proposal) -> None:
        """The selection is `PrefilledPrompt`'s."""


def prompt_of(given: object, place: str) -> str | Sequence[Message]:
    """The text or the messages of a prompt. Raises ValueError, naming the place, for a malformed one."""
    found: Any = given
    if isinstance(given, Mapping):
        found = given.get("messages", given.get("prompt", given.get("text")))
    if isinstance(found, Sequence) and found:
        return found
    raise ValueError(f'{place} must be a text, or have "messages" (a list), "prompt" or "text" (a string)')


def _call_of(given: Prompt, tokenizer: Any, number: int) -> Call:
    prompt = prompt_of(given, f"prompt {number}")
    if not isinstance(prompt, str):
        return Call(messages=list(prompt), tools=given.get("tools") if isinstance(given, Mapping) else None)
    has_template = getattr(tokenizer, "chat_template", None)
    return Call(messages=[{"role": "user", "content": prompt}]) if has_template else Call(prompt=prompt)


def _kind_of(inputs: ScoringInputs, config: PrefillConfig) -> tuple[str, str]:
    """The kind of a prompt, and its question: the heaviest scoring segment, with a question mark where there is one."""
    found, weights = inputs.candidates, inputs.weights_by_attention(config) or inputs.weights_by_words()
    marked = [span for span, is_question in zip(found.segments, found.is_question, strict=True) if is_question]
    start, stop = max(marked or found.segments, key=lambda span: weights.get(span, 0.0))
    question = " ".join("".join((inputs.pieces or [])[start:stop]).split())[:_QUESTION_CHARACTERS]
    if not marked:
        return "no question mark", question
    if stop <= found.start:
        return "question first", question
    num_behind = len(inputs.prompt_ids) - found.opening - stop
    return "instructions behind the question" if num_behind >= _INSTRUCTIONS else "question last", question


def _words_lost(prefilled: PrefilledPrompt, pair: ModelPair) -> int:
    """Words of the protected spans that the selection lacks."""
    kept = set(prefilled.selection.positions)
    pieces = pair.pieces(prefilled.request.prompt_ids) or []

    def lost(span: Span) -> int:
        whole = Counter("".join(pieces[slice(*span)]).split())
        held = Counter("".join(pieces[at] for at in range(*span) if at in kept).split())
        return (whole - held).total()

    return sum(map(lost, prefilled.request.protected))


def _in_words(row: PromptFidelity) -> str:
    found = ", ".join(
        f"{each.setting} {row.ttft_s / each.ttft_s:.1f}x {row.lost(each.setting):+.3f} nats" for each in row.pruned
    )
    return f"{row.num_tokens} tokens, {row.kind}: {found}"


def _read_rows(path: Path) -> dict[str, PromptFidelity]:
    """Rows of earlier runs by key. Raises ValueError, naming the line, for a file of something else."""
    rows = {}
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                values = json.loads(line)
                pruned = [PrunedPrompt(**each) for each in values["pruned"]]
                rows[values["key"]] = PromptFidelity(**{**values, "pruned": pruned})
        except (ValueError, TypeError, KeyError) as error:
            # An interrupted run leaves the beginning of a row.
            if not (isinstance(error, json.JSONDecodeError) and line.startswith(_ROW_BEGINS)):
                raise ValueError(f"{path}, line {number} is no row of a measurement: {error}") from error
    return rows


def _add_row(path: Path, row: PromptFidelity) -> None:
    content = path.read_bytes() if path.exists() else b""
    is_cut = content != b"" and not content.endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if is_cut else "") + json.dumps(asdict(row)) + "\n")
