"""Our records and results in the row formats of peers' tools. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spec_stack.controller.base import StepRecord

KVPRESS_COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens")


def speculative_decoding(records: Sequence[StepRecord]) -> dict[str, Any]:
    """One request's `metrics.speculative_decoding`, the object that aiperf reads from a reply.

    Parameters
    ----------
    records : sequence of StepRecord
        All steps of the request. Steps that proposed nothing are no steps of speculation; the look-ahead, verified with
        the prefill, is one.

    Returns
    -------
    dict
        num_spec_steps, num_draft_tokens, num_accepted_draft_tokens, num_spec_tokens (accepted and the target's own),
        draft_acceptance_rate (accepted over drafted), mean_acceptance_length (1 + accepted per step), and
        acceptance_histogram: at index i, the steps that accepted i tokens. Rates are None without a step.
    """
    steps = [record for record in records if record.gamma]
    accepted, drafted = sum(step.num_accepted for step in steps), sum(step.gamma for step in steps)
    counts = Counter(step.num_accepted for step in steps)
    return {
        "num_spec_steps": len(steps),
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_spec_tokens": accepted + len(steps),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else None,
        "acceptance_histogram": [counts[length] for length in range(max(counts, default=-1) + 1)],
    }


def add_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several requests' objects as one: every step counts alike."""
    length = max((len(row["acceptance_histogram"]) for row in rows), default=0)
    histogram = [
        sum(row["acceptance_histogram"][index] for row in rows if index < len(row["acceptance_histogram"]))
        for index in range(length)
    ]
    sums = {
        name: sum(row[name] for row in rows)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_tokens")
    }
    steps, drafted, accepted = sums["num_spec_steps"], sums["num_draft_tokens"], sums["num_accepted_draft_tokens"]
    return sums | {
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "acceptance_histogram": histogram,
    }


def kvpress_row(row: Mapping[str, Any], predicted: str, keep_rate: float) -> dict[str, Any]:
    """A data set's row with what was predicted for it, as kvpress's scorers take it.

    Parameters
    ----------
    row : mapping
        With KVPRESS_COLUMNS; other columns (task, say) stay.
    predicted : str
        The answer, without answer_prefix.
    keep_rate : float
        Share of the prompt that was prefilled; their compression_ratio is the share that was not.

    Raises
    ------
    ValueError
        Where a column is missing.
    """
    missing = [name for name in KVPRESS_COLUMNS if name not in row]
    if missing:
        raise ValueError(f"a row needs the columns {', '.join(KVPRESS_COLUMNS)}; missing: {', '.join(missing)}")
    more = {"predicted_answer": predicted, "compression_ratio": 1 - keep_rate, "query_aware": True}
    return {**row, **more}


def kvpress_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of such a row: the context, the question, and what the answer begins with."""
    return f"{row['context']}{row['question']}{row['answer_prefix']}"
