"""Policies live: every prompt goes through all arms, in an order that turns by one from prompt to prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import transformers

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.bench.arms import DRAFT_ONLY, PLAIN, RECORDED, THEIRS, Arm, Clock, Ours, our_arms, their_arms
from spec_stack.bench.leaderboard import ALL, Answer, Leaderboard, Line, lines_by_task
from spec_stack.bench.prompts import BUILT_IN, Encoded, Prompt, call_of, read_prompts
from spec_stack.bench.recorded import Maker, registered
from spec_stack.bench.rows import Row, Rows, key_of
from spec_stack.controller.registry import make_policy
from spec_stack.controller.simple import Fixed
from spec_stack.engine.request import Call
from spec_stack.hf.loading import ASSETS
from spec_stack.records import check_record_path, read_records

Progress = Callable[[int, int, str], None]
_FEW = 12
_WARM_UP_TOKENS = 4
_ERROR_CHARACTERS = 160
_SAME = "same text: greedy answers with exactly plain decoding's tokens; in low precision near-ties may differ."


def bench(
    generator: SpecStackGenerator,
    prompts: Sequence[Prompt] | None = None,
    policies: Mapping[str, Maker] | None = None,
    *,
    max_tokens: int = 64,
    minutes: float = 10.0,
    rivals: bool = True,
    rows: str | Path | None = None,
    records: str | Path | None = None,
    progress: Progress | None = None,
    clock: Clock = perf_counter,
) -> Leaderboard:
    """Compare policies and Transformers on prompts, live and greedily, with a dense target.

    Parameters
    ----------
    generator : SpecStackGenerator
        The pair.
    prompts : sequence, optional
        As in `measure_fidelity`; a mapping may have a "task". By default eight built-in ones.
    policies : mapping of str to callable, optional
        What makes each policy; by default one of every registered name. They run with the draft model alone.
        Plain decoding, the default (with n-gram lookup) and n-gram lookup alone are added.
    max_tokens : int
        Most tokens of an answer.
    minutes : float
        No prompt starts after so many minutes; the first one always does.
    rivals : bool
        Also run Transformers' assisted generation and prompt lookup.
    rows : str or Path, optional
        A .jsonl file, to which every answer's row is added; the same call goes on after its rows. Policies of a
        resumed run start anew, and the rows of a policy whose source has changed do not count.
    records : str or Path, optional
        A new .jsonl file for the steps of plain decoding and of fixed gammas 2, 4 and 8, for `replay_policies`; with
        rows, the file that these go on in.
    progress : callable, optional
        Called with (num_done, num_prompts, text) after every prompt.
    clock : callable
        Seconds; `time.process_time` on a CPU that others use too.

    Returns
    -------
    Leaderboard
        Speeds are of whole calls over plain decoding.

    Raises
    ------
    ValueError
        For a bad option, a malformed prompt, and a file of other rows.
    """
    if not (max_tokens >= 1 and minutes > 0):
        raise ValueError(f"max_tokens and minutes must be over 0, got {max_tokens} and {minutes}")
    if records is not None:
        check_record_path(records)
        if rows is None and Path(records).exists():
            raise ValueError(f"{records} exists, and a run may be recorded once; give rows to resume, or another file")
    policies = registered(options=predictors(generator)) if policies is None else policies
    encoded = encode(generator, read_prompts(BUILT_IN) if prompts is None else prompts, max_tokens)
    kept = Rows(None if rows is None else Path(rows), minutes)
    if records is not None:
        _check_goes_on(Path(records), encoded, kept)
    makers = our_arms(generator, policies, max_tokens, clock)
    makers |= their_arms(generator, max_tokens, clock) if rivals else {}
    # Transformers warns of what these calls do on purpose.
    transformers.logging.set_verbosity_error()
    arms, notes = warmed_up(makers, encoded[0])
    if records is not None:
        file, by_draft = Path(records), DRAFT_ONLY
        arms |= {
            name: Ours(generator, make_policy("fixed", gamma=gamma), by_draft, max_tokens, clock, file)
            for name, gamma in RECORDED.items()
        }
    for turn, prompt in enumerate(encoded):
        if turn and not kept.has_time and left(arms, prompt, kept):
            break
        run_prompt(arms, turn, prompt, kept)
        if progress is not None:
            progress(turn + 1, len(encoded), _in_words(arms, prompt, kept))
    lines = lines_of(generator.pair.precision, arms, encoded, kept)
    if num_left := len(encoded) - lines[0].num_prompts:
        notes.append(f"{num_left} prompts are left: the time was over; with rows the same call goes on from there")
    if lines[0].num_prompts < _FEW:
        notes.append(f"{lines[0].num_prompts} prompts: the intervals are rough; give {_FEW} or more")
    pair, device = generator.pair, generator.target.device.type
    names = " with ".join(str(model.name_or_path) or "a loaded model" for model in (generator.target, generator.draft))
    if Path(generator.target.name_or_path).is_relative_to(ASSETS):
        names = "the embedded test pair (6M parameters: it shows that things work, not what a real pair gains)"
    source = f"live: {names}; {device}, drafts at {pair.draft_precision}, at most {max_tokens} tokens an answer"
    return Leaderboard(source, PLAIN, lines, [*notes, _SAME])


def _check_goes_on(records: Path, prompts: Sequence[Encoded], rows: Rows) -> None:
    """Raise ValueError where an answer has a row but no steps in the file of records, or the other way round."""
    found = read_records(records) if records.exists() and records.stat().st_size else []
    runs = {(record.request_id, record.policy) for record in found}
    for (name, gamma), prompt in product(RECORDED.items(), prompts):
        has_row, has_steps = (prompt.key, name) in rows, (prompt.key, Fixed(gamma).name) in runs
        if has_row != has_steps:
            lacking = f"{records} lacks the steps of {name!r}" if has_row else f"the rows lack {name!r} of {records}"
            raise ValueError(
                f"{lacking}; record with the rows that this file began with, or into a new file without rows"
            )


def predictors(generator: SpecStackGenerator) -> dict[str, dict[str, Any]]:
    """Options of policies that have a file for this draft, as a user of the pair gets them."""
    return {name: {"predictor": file} for name, file in generator.pair.predictors.items()}


def encode(generator: SpecStackGenerator, prompts: Sequence[Prompt], *decisive: object) -> list[Encoded]:
    """Prompts in tokens. decisive: what else decides a row. Raises ValueError for none and for a malformed one."""
    if not prompts:
        raise ValueError("no prompts to measure; give one or more")
    encoded = []
    for number, given in enumerate(prompts, start=1):
        call = call_of(given, generator.tokenizer, number)
        ids = generator.engine.plan(cast(Call, {**call, "max_tokens": 1})).prompt_ids
        task = str(given.get("task", ALL)) if isinstance(given, Mapping) else ALL
        encoded.append(Encoded(key_of(generator.pair, ids, *decisive), task, ids))
    return encoded


def warmed_up(makers: Mapping[str, Callable[..., Arm]], prompt: Encoded) -> tuple[dict[str, Arm], list[str]]:
    """The arms, each after a short answer by a twin that does not count; a note for each of Transformers' that fail."""
    arms, notes = {}, []
    for name, make in makers.items():
        try:
            make(num_tokens=_WARM_UP_TOKENS)(prompt)
        # Transformers raises many kinds of error for pairs that it does not support.
        except Exception as error:
            if name.startswith(THEIRS):
                notes.append(f"left out: {name}, {' '.join(str(error).split())[:_ERROR_CHARACTERS]}")
                continue
            raise
        arms[name] = make()
    return arms, notes


def _row_name(name: str, arm: Arm) -> str:
    """The arm's name in the rows; with a digest of its source for a user's policy, which may change between runs."""
    policy = type(arm.policy) if isinstance(arm, Ours) else None
    if policy is None or policy.__module__.startswith("spec_stack."):
        return name
    try:
        source = inspect.getsource(policy)
    except (OSError, TypeError):
        source = ""
    return f"{name}@{sha256(source.encode()).hexdigest()[:8]}"


def rows_of(arms: Mapping[str, Arm], rows: Rows) -> dict[str, dict[str, Row]]:
    """Every arm's rows by key."""
    return {name: rows.of_arm(_row_name(name, arm)) for name, arm in arms.items()}


def left(arms: Mapping[str, Arm], prompt: Encoded, rows: Rows) -> list[str]:
    """The arms that have not answered a prompt."""
    return [name for name, arm in arms.items() if (prompt.key, _row_name(name, arm)) not in rows]


def run_prompt(arms: Mapping[str, Arm], turn: int, prompt: Encoded, rows: Rows) -> None:
    """Have the arms answer that have no row yet, in this prompt's order."""
    names = list(arms)
    turn %= len(names)
    missing = left(arms, prompt, rows)
    for name in names[turn:] + names[:turn]:
        if name in missing:
            rows.add(prompt.key, _row_name(name, arms[name]), {"task": prompt.task, **arms[name](prompt)})


def lines_of(precision: str, arms: Mapping[str, Arm], prompts: Sequence[Encoded], rows: Rows) -> list[Line]:
    """All arms on the prompts that each of them has answered, together and by task."""
    by_arm = rows_of(arms, rows)
    done = [prompt for prompt in prompts if all(prompt.key in own for own in by_arm.values())]
    answers = {
        name: {prompt.key: _answer(own[prompt.key], by_arm[PLAIN][prompt.key]) for prompt in done}
        for name, own in by_arm.items()
    }
    return lines_by_task(precision, answers, PLAIN, [(prompt.key, prompt.task) for prompt in done])


def _answer(row: Row, plain: Row) -> Answer:
    ids, is_same = row["token_ids"], row["token_ids"] == plain["token_ids"]
    return Answer(row["seconds"], len(ids), row["num_steps"], row["num_proposed"], row["num_accepted"], is_same)


def _in_words(arms: Mapping[str, Arm], prompt: Encoded, rows: Rows) -> str:
    seconds = {name: own[prompt.key]["seconds"] for name, own in rows_of(arms, rows).items()}
    fastest = min(seconds, key=seconds.__getitem__)
    return f"{prompt.task}: plain {seconds[PLAIN]:.2f} s, {fastest} {seconds[fastest]:.2f} s"
