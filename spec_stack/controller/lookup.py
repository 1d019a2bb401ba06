"""When a look-up pays, and how far: learned online from how long a match was and what had followed it how often.

A looked-up token costs its place in the verification and no forward of the draft. So a continuation is verified as far
as the chance that all of it is right exceeds tokens/s now achieved * seconds per verified token, the rule by which
`throughput` drafts; and the step goes to the look-up where what that is expected to gain exceeds what the draft has
lately gained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spec_stack.controller.acceptance import OnlineLogistic, sigmoid
from spec_stack.controller.base import StepRecord
from spec_stack.controller.cost import DiscountedRate, StepCostModel

_CLASSES = 4
_LEAST_REACH = 8
_MOST_COUNTED = 16
_LONGEST = 64


class Found(NamedTuple):
    """A looked-up token, and what is known of it.

    Parameters
    ----------
    token_id : int
        The token.
    length : int
        Tokens before it that the place where it was found has in common with the text, those looked up included.
    num_seen : int
        How often it followed them, 1 or more.
    num_others : int
        How often another token did.
    is_shared : bool
        Whether it was found in another request's text.
    """

    token_id: int
    length: int
    num_seen: int
    num_others: int
    is_shared: bool = False


@dataclass(frozen=True)
class LookupOptions:
    """How look-ups are judged.

    Parameters
    ----------
    trust : float
        Looked-up tokens that the start of the estimate is worth.
    forgetting : float
        Weight of what was seen before, per looked-up token, in (0, 1].
    least_price : float
        Chance under which nothing more is verified, however little a place in the verification seems to cost.
    cold_price : float
        The same while nothing has been measured yet.
    gain_weight : float
        Of the last step in what the draft gains, in (0, 1].
    try_every : int
        One in so many steps at which a look-up wins goes to the draft all the same, and the other way round, so that
        neither is judged by old times.
    """

    trust: float = 20.0
    forgetting: float = 0.999
    least_price: float = 0.02
    cold_price: float = 0.1
    gain_weight: float = 0.1
    try_every: int = 32

    def __post_init__(self) -> None:
        if self.trust <= 0:
            raise ValueError(f"trust must be over 0, got {self.trust}")
        for name in ("forgetting", "gain_weight"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        for name in ("least_price", "cold_price"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is a probability between 0 and 1, got {getattr(self, name)}")
        if self.try_every < 2:
            raise ValueError(f"try_every must be 2 or more, got {self.try_every}")


@dataclass(frozen=True)
class Offer:
    """What a look-up is worth.

    Parameters
    ----------
    found : sequence of Found
        The tokens of a continuation that are worth verifying; empty where none is.
    gain : float
        Tokens gained by them over a step of plain decoding, their own time paid.
    match_length : int
        Tokens that the best continuation has in common before it; 0 where there is none.
    """

    found: Sequence[Found] = ()
    gain: float = 0.0
    match_length: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [each.token_id for each in self.found]


class LookupGate:
    """Learns how far look-ups are right, what the draft gains instead, and what both cost. One request at a time.

    The chance that a looked-up token is right, those before it being so, is a logistic model of how long the match is,
    how often the token followed it and how often another did.
    """

    def __init__(self, options: LookupOptions | None = None) -> None:
        self.options = options or LookupOptions()
        self._chances = OnlineLogistic(_START, self.options.trust, self.options.forgetting)
        self._cost = StepCostModel()
        self._rate = DiscountedRate()
        self._gains: list[float | None] = [None] * _CLASSES
        self._typical_gain = 1.0
        self._num_settled = [0] * _CLASSES
        self._offer = Offer()
        self._tail: Sequence[Found] = ()
        # Tokens that a look-up may have: grows while they are all right, and falls towards what was.
        self._reach = 2 * _LEAST_REACH

    def chance(self, found: Found, place: int) -> float:
        """That a looked-up token is right, the `place` ones before it being so."""
        return min(sigmoid(self._chances.logit(_features(found, place))), 0.999)

    @property
    def price(self) -> float:
        """The chance at which one more verified token is worth its time."""
        if not self._cost.ready_to_verify:
            return self.options.cold_price
        return max(self._rate.tokens_per_s * self._cost.verify_per_token_s, self.options.least_price)

    def offer(self, continuations: Sequence[Iterable[Found]], most: int) -> Offer:
        """What the best of some continuations is worth as a whole step, of `most` tokens at most.

        The gate remembers it until `observe`. No more is taken of a continuation than is worth it.
        """
        self._offer, self._tail = self._best(continuations, most, 1.0), ()
        return self._offer

    def prefers(self, offer: Offer) -> bool:
        """Whether the step goes to the look-up rather than to the draft."""
        if not offer.found:
            return False
        which = _class(offer.match_length)
        wins = offer.gain > max(self._gain(which), 0.0)
        self._num_settled[which] += 1
        return wins != (self._num_settled[which] % self.options.try_every == 0)

    def takes_over(self, continuations: Sequence[Iterable[Found]], most: int, chance: float) -> bool:
        """Whether a look-up behind drafted tokens, all right with this chance, is worth more than drafting on."""
        offer = self._best(continuations, most, chance)
        return offer.gain > chance * max(self._gain(_class(offer.match_length)), 0.0)

    def tail(self, continuations: Sequence[Iterable[Found]], most: int, chance: float) -> Offer:
        """What is worth verifying behind drafted tokens that are all right with this chance. The gate remembers it."""
        offer = self._best(continuations, most, chance)
        self._tail = offer.found
        return offer

    def _best(self, continuations: Sequence[Iterable[Found]], most: int, chance: float) -> Offer:
        offers = [self._worth(continuation, most, chance) for continuation in continuations]
        return max(offers, key=lambda offer: offer.gain, default=Offer())

    def _worth(self, continuation: Iterable[Found], most: int, chance: float) -> Offer:
        price, gain, match_length = self.price, 0.0, 0
        worthwhile: list[Found] = []
        for place, found in enumerate(continuation):
            match_length = match_length or found.length
            if place == min(most, self._reach):
                break
            chance *= self.chance(found, place)
            if chance <= price:
                break
            gain += chance - price
            worthwhile.append(found)
        return Offer(worthwhile, gain, match_length)

    def _gain(self, which: int) -> float:
        known = self._gains[which]
        return self._typical_gain if known is None else known

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; a prefill step says nothing."""
        if record.is_prefill:
            return
        if record.num_looked_up and record.num_accepted >= record.num_drafted:
            found = self._tail if record.num_drafted else self._offer.found
            self._learn(found[: record.num_looked_up], record.num_accepted - record.num_drafted)
        if record.draft_read_prompt or not math.isfinite(record.seconds):
            return
        self._cost.observe(
            record.num_drafted, record.draft_s, record.verify_s, record.num_recomputed, record.num_looked_up
        )
        if not self._cost.ready_to_verify:
            return
        bound = self._cost.options.tolerance * self._cost.seconds(record.num_drafted, record.num_looked_up)
        self._rate.add(record.num_tokens, min(record.seconds, bound))
        if record.proposer != "lookup":
            self._learn_gain(record)

    def _learn(self, looked_up: Sequence[Found], num_accepted: int) -> None:
        if num_accepted == len(looked_up):
            self._reach = max(self._reach, 2 * len(looked_up))
        else:
            self._reach = max(_LEAST_REACH, (self._reach + 2 * num_accepted) // 2)
        for place, found in enumerate(looked_up[: num_accepted + 1]):
            self._chances.learn(_features(found, place), place < num_accepted)

    def _learn_gain(self, record: StepRecord) -> None:
        """What a step that went to the draft gained, the seconds of what it proposed paid at the present rate."""
        spent = min(record.draft_s, 3 * self._cost.draft_s(record.num_drafted)) if record.num_drafted else 0.0
        spent += self._cost.verify_per_token_s * record.gamma
        gained = max(record.num_accepted - self._rate.tokens_per_s * spent, -float(record.gamma + 1))
        weight, which = self.options.gain_weight, _class(self._offer.match_length)
        self._typical_gain += weight * (gained - self._typical_gain)
        self._gains[which] = self._gain(which) + weight * (gained - self._gain(which))


def _features(found: Found, place: int) -> list[float]:
    """What the chance of a looked-up token hangs on; the last one is the bias."""
    return [
        math.log2(min(found.length, _LONGEST)),
        math.log(min(found.num_seen, _MOST_COUNTED)),
        math.log(found.num_others + 0.5),
        float(place > 0),
        math.log2(1 + place),
        float(found.is_shared),
        1.0,
    ]


def _class(match_length: int) -> int:
    """Which steps share what the draft gains: no match or a single token, 2 to 3, 4 to 7, longer."""
    return min(max(match_length, 1).bit_length(), _CLASSES) - 1


# Fitted to a 1.5B's answers to 25 prompts (code, math, edits, chat, summaries); `trust` tokens are what it is worth.
_START = (0.9, 1.0, -1.1, -0.2, 0.2, 0.0, -1.25)
