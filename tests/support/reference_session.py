"""Conversations by another route: everything from nothing, in plain forwards. Imports nothing from spec_stack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from tests.support import reference


def answers_by_slots(
    model: PreTrainedModel, slot_ids: Sequence[int], positions: Sequence[int], num_answer: int
) -> list[int]:
    """Greedy answer tokens by one plain forward over a session's slots in the order written, at their positions. They
    end with the answer less its last token. A token sees what was written no later than itself and stands no later."""
    if list(positions) == sorted(positions):
        return reference.logits(model, slot_ids, positions)[-num_answer:].argmax(-1).tolist()
    return _greedy(model, slot_ids, positions, _mask(model, positions), num_answer)


def dropped_chunks_to_restore(
    importance: Sequence[float],
    cached: Sequence[int],
    num_cached: int,
    size: int,
    threshold: float,
    most: int,
    anchors: Sequence[float] | None = None,
    recall_word_threshold: float = 0.0,
) -> list[int]:
    """Positions of dropped tokens in the best chunks of the old text that score enough, by either rule, by
    sorting."""
    mean = sum(importance[:num_cached]) / num_cached
    chunks = [range(at, min(at + size, num_cached)) for at in range(0, num_cached, size)]
    means = [sum(importance[at] for at in chunk) / len(chunk) for chunk in chunks]
    best = _leading(chunks, means, most * size)
    # A text without any importance is not recalled.
    wanted = {index for index in best if means[index] >= threshold * mean and (mean or not threshold)}
    if anchors is not None:
        best = _leading(chunks, anchors, most * size)
        wanted |= {index for index in best if anchors[index] >= recall_word_threshold}
    return sorted({at for index in wanted for at in chunks[index]} - set(cached))


def _leading(chunks: Sequence[range], scores: Sequence[float], most_tokens: int) -> list[int]:
    """The chunks with the highest scores, until they hold so many tokens."""
    leading: list[int] = []
    for index in sorted(range(len(chunks)), key=lambda index: (-scores[index], index)):
        if sum(len(chunks[each]) for each in leading) < most_tokens:
            leading.append(index)
    return leading


@dataclass
class Trace:
    """A random conversation in token ids: what is asked next, given what was answered so far."""

    seed: int
    vocab: int
    num_turns: int = 5
    document: int = 120
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, list[int], int]]:
        """(action, prompt, max_tokens) of every turn; the caller puts each answer into `answers`.

        ask: a question after the last answer. edit: the last question, or another earlier token, is another one.
        regenerate: the last prompt again. fork: a question, put to a branch of the conversation as well.
        """
        rng = random.Random(self.seed)

        def tokens(length: int) -> list[int]:
            return [rng.randrange(2, self.vocab) for _ in range(length)]

        prompt = tokens(rng.randrange(2, self.document))
        for turn in range(self.num_turns):
            action = rng.choice(["ask", "ask", "edit", "regenerate", "fork"]) if turn else "ask"
            if turn and action in ("ask", "fork"):
                prompt = [*self.prompts[-1], *self.answers[-1], *tokens(rng.choice([1, 3, 9, 40]))]
            elif action == "edit":
                cut = rng.randrange(1, len(self.prompts[-1]) + 1)
                prompt = [*self.prompts[-1][:cut], *tokens(rng.choice([1, 4, 30]))]
            self.prompts.append(prompt)
            yield action, prompt, rng.choice([1, 3, 12])


def eager_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The target's own greedy answer to a whole prompt, from nothing."""
    with torch.inference_mode():
        return reference.greedy(model, prompt, num_tokens)


def answers_by_slots_and_windows(
    model: PreTrainedModel, slot_ids: Sequence[int], positions: Sequence[int], num_answer: int
) -> list[int]:
    """The same for a model some of whose layers slide: there what it sees stands less than the window before it."""
    masks = {
        "full_attention": _mask(model, positions),
        "sliding_attention": _mask(model, positions, model.config.sliding_window),
    }
    return _greedy(model, slot_ids, positions, masks, num_answer)


def _mask(model: PreTrainedModel, positions: Sequence[int], window: int | None = None) -> torch.Tensor:
    num_slots = len(positions)
    mask = torch.full((num_slots, num_slots), torch.finfo(model.dtype).min)
    for query in range(num_slots):
        for key in range(query + 1):
            distance = positions[query] - positions[key]
            if distance >= 0 and (window is None or distance < window):
                mask[query, key] = 0
    return mask[None, None]


def _greedy(
    model: PreTrainedModel,
    slot_ids: Sequence[int],
    positions: Sequence[int],
    mask: torch.Tensor | dict[str, torch.Tensor],
    num_answer: int,
) -> list[int]:
    with torch.no_grad():
        output = model(
            torch.tensor([list(slot_ids)]),
            attention_mask=mask,
            position_ids=torch.tensor([list(positions)]),
            use_cache=False,
        )
    return output.logits[0, -num_answer:].argmax(-1).tolist()
