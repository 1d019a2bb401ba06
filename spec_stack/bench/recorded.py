"""Policies by replay of recorded steps, on prompts that tuned none of them. Loads no model.

Prompts are split into folds. What a policy needs to know beforehand (the best fixed gamma, a threshold, SpecKV's
predictor) comes from the other folds' prompts, and policies that learn run over these first, as in a running program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_stack.bench.leaderboard import ORACLE, Answer, Leaderboard, lines_by_task
from spec_stack.bench.replay import Costs, ReplayText, Score, fit_costs, merge_runs, oracle, replay
from spec_stack.bench.training import as_network, make_mlp, step_examples
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import Policy, StepRecord
from spec_stack.controller.registry import POLICIES, make_policy
from spec_stack.controller.simple import Confidence, Fixed
from spec_stack.controller.speckv import SpecKV
from spec_stack.records import as_record, read_records

if TYPE_CHECKING:
    from spec_stack.bench.training import Examples

Maker = Callable[[], Policy]
BASELINE = "best fixed"
_TUNED, _TRAINED, _PUBLISHED = "confidence, tuned", "speckv, trained", "speckv, as published"
_FIXED = {f"fixed {gamma}": gamma for gamma in (0, 1, 2, 4, 6, 8, 10, 12, 16)}
_ADDED = frozenset({BASELINE, ORACLE, _TUNED, _TRAINED, _PUBLISHED, *_FIXED})
_THRESHOLDS = tuple(number / 20 for number in range(2, 20))


def read(paths: Iterable[str | Path]) -> list[StepRecord]:
    """The records of .jsonl files, or of .parquet files with the same fields for columns (needs pyarrow)."""
    return [record for path in map(Path, paths) for record in _read(path)]


def _read(path: Path) -> list[StepRecord]:
    if path.suffix != ".parquet":
        return read_records(path)
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path}: a .parquet file needs pyarrow; pip install pyarrow") from error
    try:
        with path.open("rb") as file:
            table = parquet.read_table(file)
    except ValueError as error:
        raise ValueError(f"{path} is not Parquet: {error}") from error
    # The shipped profile has a column of an earlier version.
    rows = table.drop_columns([name for name in table.column_names if name == "lag"]).to_pylist()
    return [as_record(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def registered(names: Sequence[str] = (), options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Maker]:
    """Makers of registered policies, a user's included; by default one of each.

    names: as `confidence`, or with options as `confidence:threshold=0.3`. options: further ones by policy. Raises
    ValueError for an unknown one.
    """
    makers: dict[str, Maker] = {}
    for name in names or POLICIES:
        policy, _, given = name.partition(":")
        named = map(_option, filter(None, given.split(",")))
        makers[name] = partial(make_policy, policy, **{**(options or {}).get(policy, {}), **dict(named)})
        makers[name]()
    return makers


def _option(text: str) -> tuple[str, int | float | str]:
    """ "threshold=0.3" as a name and a number, or a string."""
    name, _, value = text.partition("=")
    for read_as in (int, float):
        try:
            return name, read_as(value)
        except ValueError:
            continue
    return name, value


@dataclass(frozen=True)
class _Fold:
    """What policies may know before the prompts of a fold: the texts of the others, at one precision."""

    train: list[ReplayText]
    tests: list[ReplayText]
    costs: Costs

    def makers(self, policies: Mapping[str, Maker], examples: Examples | None) -> dict[str, Maker]:
        """All policies; the tuned ones, and SpecKV with a predictor trained on examples as in the paper, among them."""
        makers: dict[str, Maker] = {name: partial(make_policy, "fixed", gamma=gamma) for name, gamma in _FIXED.items()}
        makers |= policies
        makers[BASELINE] = partial(Fixed, max(range(MAX_GAMMA + 1), key=lambda gamma: self._speed(Fixed(gamma))))
        threshold = max(_THRESHOLDS, key=lambda threshold: self._speed(Confidence(threshold)))
        makers[_TUNED] = partial(Confidence, threshold)
        if examples is not None:
            inputs, rates, _ = examples
            trained = as_network(make_mlp().fit(inputs, rates))
            makers[_TRAINED] = partial(SpecKV, predictor=trained)
            makers[_PUBLISHED] = partial(SpecKV, predictor=trained, objective="per_step")
        return makers

    def _speed(self, policy: Policy) -> float:
        """Tokens per second over the training texts."""
        scores = [replay(text, policy, self.costs) for text in self.train]
        return sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)


def replay_policies(
    records: Sequence[StepRecord],
    policies: Mapping[str, Maker] | None = None,
    *,
    num_folds: int = 5,
    experienced: bool = True,
    costs: Mapping[str, Costs] | None = None,
    seed: int = 0,
) -> Leaderboard:
    """Compare policies on recorded runs.

    Parameters
    ----------
    records : sequence of StepRecord
        Greedy runs of the same prompts at several fixed gammas, two or more prompts.
    policies : mapping of str to callable, optional
        What makes each policy; by default one of every registered name. Fixed gammas, the best fixed gamma and
        the best `confidence` threshold of the training prompts, SpecKV trained on them (with scikit-learn), and
        the oracle are added.
    num_folds : int
        Parts that the prompts are split into, at most one a prompt.
    experienced : bool
        Whether policies run over the training prompts first. False starts them anew in each fold.
    costs : mapping of str to Costs, optional
        Seconds of steps by precision, in place of the recorded ones.
    seed : int
        Of the bootstrap.

    Returns
    -------
    Leaderboard
        Speeds are over the best fixed gamma of the training prompts; a policy's own seconds do not count.

    Raises
    ------
    ValueError
        For records of fewer than two prompts, of one gamma, of a prompt at several keep rates, or of incomplete runs,
        and for a policy that has the name of an added one.
    """
    if policies is None:
        policies = {name: make for name, make in registered().items() if name != "fixed"}
    if taken := sorted(_ADDED & policies.keys()):
        raise ValueError(f"{', '.join(taken)}: added to every comparison; give the policy another name")
    merged = merge_runs(records)
    (prompt, _), num_texts = Counter((text.prompt, text.precision) for text in merged.texts).most_common(1)[0]
    if num_texts > 1:
        raise ValueError(f"{prompt!r} was recorded at several keep rates; give the records of one keep rate")
    # A step that prefilled the draft says nothing of later ones.
    usual = (record for record in records if not record.draft_prefilled_prompt)
    costs = fit_costs(usual) if costs is None else costs
    fold_of = _split(merged.texts, num_folds)
    if len(fold_of) < 2:
        raise ValueError("the records are of one prompt; record two or more, so that one is left to compare on")
    examples, lacking = _examples(records, fold_of)
    answers: dict[str, dict[str, dict[str, Answer]]] = defaultdict(lambda: defaultdict(dict))
    for precision in dict.fromkeys(text.precision for text in merged.texts):
        for number in range(max(fold_of.values()) + 1):
            own = [text for text in merged.texts if text.precision == precision]
            fold = _Fold(
                [text for text in own if fold_of[text.prompt] != number],
                [text for text in own if fold_of[text.prompt] == number],
                costs[precision],
            )
            if not (fold.train and fold.tests):
                continue
            makers = fold.makers(policies, examples.get(number))
            for name, make in makers.items():
                policy = make()
                for text in fold.train if experienced else ():
                    replay(text, policy, fold.costs)
                for text in fold.tests:
                    answers[precision][name][text.prompt] = _answer(replay(text, policy, fold.costs))
            for text in fold.tests:
                answers[precision][ORACLE][text.prompt] = _answer(oracle(text, fold.costs))
    task_of = {text.prompt: text.task for text in merged.texts}
    lines = [
        line
        for precision, own in answers.items()
        for line in lines_by_task(precision, own, BASELINE, [(key, task_of[key]) for key in own[BASELINE]], seed)
    ]
    agreement = f"{merged.num_unanimous / max(merged.num_shared, 1):.1%} of positions agree between runs"
    start = "after the training prompts" if experienced else "started anew for each fold"
    source = f"replay of {len(merged.texts)} recorded texts, {agreement}; policies {start}"
    notes = ["oracle: the bound of any choice of gammas. A policy's own seconds do not count."]
    notes += [f"{lacking}: no row of SpecKV with a trained predictor"] if lacking else []
    return Leaderboard(source, BASELINE, lines, notes)


def _examples(records: Sequence[StepRecord], fold_of: Mapping[str, int]) -> tuple[dict[int, Examples], str]:
    """What each fold's predictor is trained on; none, and why, where a fold has nothing or nothing can be trained."""
    if not find_spec("sklearn"):
        return {}, "scikit-learn is not installed"
    found: dict[int, Examples] = {}
    for number in set(fold_of.values()):
        found[number] = step_examples([record for record in records if fold_of[record.request_id] != number])
        if not len(found[number][0]):
            return {}, "too few prompts have two drafted steps in a row"
    return found, ""


def _answer(score: Score) -> Answer:
    num_accepted = score.num_tokens - score.num_steps
    return Answer(score.seconds, score.num_tokens, score.num_steps, sum(score.gammas), num_accepted)


def _split(texts: Sequence[ReplayText], num_folds: int) -> dict[str, int]:
    """Fold of every prompt, tasks spread evenly; a prompt is in one fold at every precision."""
    by_task: dict[str, dict[str, None]] = defaultdict(dict)
    for text in texts:
        by_task[text.task][text.prompt] = None
    prompts = [prompt for of_task in by_task.values() for prompt in of_task]
    num_folds = max(2, min(num_folds, len(prompts)))
    return {prompt: number % num_folds for number, prompt in enumerate(prompts)}
