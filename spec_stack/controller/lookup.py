"""When a look-up pays, and how far: learned online from how long a match was and how much of it was accepted.

A looked-up token costs its place in the verification and no forward of the draft. So a continuation is verified as far
as the chance that all of it is right exceeds tokens/s now achieved * seconds per verified token, the rule by which
`throughput` drafts; and the step goes to the look-up where what that is expected to gain exceeds what the draft has
lately gained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spec_stack.controller.acceptance import sigmoid
from spec_stack.controller.base import StepRecord
from spec_stack.controller.cost import DiscountedRate, StepCostModel

_LEVELS = 7
_CLASSES = 4
_LEAST_REACH = 8


@dataclass(frozen=True)
class LookupOptions:
    """How look-ups are judged.

    Parameters
    ----------
    trust : float
        Tokens that the start of an acceptance estimate is worth.
    forgetting : float
        Weight of what was seen before, per look-up, in (0, 1].
    optimism : float
        In standard errors: what is stopped early never shows what it missed.
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

    trust: float = 4.0
    forgetting: float = 0.995
    optimism: float = 0.5
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
        if self.optimism < 0:
            raise ValueError(f"optimism must be 0 or more, got {self.optimism}")
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
    match_length : int
        Tokens in common.
    num_tokens : int
        Tokens of the continuation that are worth verifying; 0 where none is.
    gain : float
        Tokens gained by them over a step of plain decoding, their own time paid.
    """

    match_length: int
    num_tokens: int
    gain: float


class LookupGate:
    """Learns how far look-ups are right, what the draft gains instead, and what both cost. One request at a time.

    The chance that a looked-up token is right, those before it being so, is a Beta estimate by match length (to the
    power of two below it, the tokens of the look-up before it counted in) and by whether it is the first one.
    """

    def __init__(self, options: LookupOptions | None = None) -> None:
        self.options = options or LookupOptions()
        # By level and whether another looked-up token was right before: accepted and judged tokens, discounted.
        self._accepted = [[0.0, 0.0] for _ in range(_LEVELS)]
        self._judged = [[0.0, 0.0] for _ in range(_LEVELS)]
        self._cost = StepCostModel()
        self._rate = DiscountedRate()
        self._gains: list[float | None] = [None] * _CLASSES
        self._typical_gain = 1.0
        self._num_settled = [0] * _CLASSES
        self._offer = Offer(0, 0, 0.0)
        self._tail_length = 0
        # Tokens that a look-up may have: grows while they are all right, and falls towards what was.
        self._reach = 2 * _LEAST_REACH

    def chance(self, match_length: int, is_first: bool) -> float:
        """That the token after so many in common is right."""
        level, late = _level(match_length), int(not is_first)
        seen = self.options.trust + self._judged[level][late]
        mean = (self.options.trust * _START[level][late] + self._accepted[level][late]) / seen
        return min(mean + self.options.optimism * math.sqrt(mean * (1 - mean) / seen), 0.999)

    @property
    def price(self) -> float:
        """The chance at which one more verified token is worth its time."""
        if not self._cost.ready_to_verify:
            return self.options.cold_price
        return max(self._rate.tokens_per_s * self._cost.verify_per_token_s, self.options.least_price)

    def offer(self, match_length: int, most: int) -> Offer:
        """What a look-up is worth as a whole step, of `most` tokens at most. The gate remembers it until `observe`."""
        num_tokens, gain = self._worth(match_length, most, 1.0)
        self._offer, self._tail_length = Offer(match_length, num_tokens, gain), 0
        return self._offer

    def prefers(self, offer: Offer) -> bool:
        """Whether the step goes to the look-up rather than to the draft."""
        if offer.num_tokens == 0:
            return False
        which = _class(offer.match_length)
        wins = offer.gain > max(self._gain(which), 0.0)
        self._num_settled[which] += 1
        return wins != (self._num_settled[which] % self.options.try_every == 0)

    def takes_over(self, match_length: int, most: int, chance: float) -> bool:
        """Whether a look-up behind drafted tokens, all right with this chance, is worth more than drafting on."""
        _, gain = self._worth(match_length, most, chance)
        return gain > chance * max(self._gain(_class(match_length)), 0.0)

    def num_worthwhile(self, match_length: int, most: int, chance: float) -> int:
        """Looked-up tokens worth verifying behind drafted ones that are all right with this chance."""
        num_tokens, _ = self._worth(match_length, most, chance)
        self._tail_length = match_length
        return num_tokens

    def _worth(self, match_length: int, most: int, chance: float) -> tuple[int, float]:
        price, gain, num_tokens = self.price, 0.0, 0
        level, own = -1, 0.0
        while match_length and num_tokens < min(most, self._reach):
            if num_tokens < 2 or _level(match_length + num_tokens) != level:
                level = _level(match_length + num_tokens)
                own = self.chance(match_length + num_tokens, num_tokens == 0)
            chance *= own
            if chance <= price:
                break
            gain += chance - price
            num_tokens += 1
        return num_tokens, gain

    def _gain(self, which: int) -> float:
        known = self._gains[which]
        return self._typical_gain if known is None else known

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; a prefill step says nothing."""
        if record.is_prefill:
            return
        if record.num_looked_up and record.num_accepted >= record.num_drafted:
            length = self._tail_length if record.num_drafted else self._offer.match_length
            self._learn(length, record.num_looked_up, record.num_accepted - record.num_drafted)
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

    def _learn(self, length: int, num_tokens: int, num_accepted: int) -> None:
        for row in (*self._accepted, *self._judged):
            row[0] *= self.options.forgetting
            row[1] *= self.options.forgetting
        if num_accepted == num_tokens:
            self._reach = max(self._reach, 2 * num_tokens)
        else:
            self._reach = max(_LEAST_REACH, (self._reach + 2 * num_accepted) // 2)
        for place in range(min(num_accepted + 1, num_tokens)):
            level, late = _level(length + place), int(place > 0)
            self._judged[level][late] += 1
            self._accepted[level][late] += place < num_accepted

    def _learn_gain(self, record: StepRecord) -> None:
        """What a step that went to the draft gained, the seconds of what it proposed paid at the present rate."""
        spent = min(record.draft_s, 3 * self._cost.draft_s(record.num_drafted)) if record.num_drafted else 0.0
        spent += self._cost.verify_per_token_s * record.gamma
        gained = max(record.num_accepted - self._rate.tokens_per_s * spent, -float(record.gamma + 1))
        weight, which = self.options.gain_weight, _class(self._offer.match_length)
        self._typical_gain += weight * (gained - self._typical_gain)
        self._gains[which] = self._gain(which) + weight * (gained - self._gain(which))


def _level(match_length: int) -> int:
    """The power of two that a length reaches: 0 for 1, 1 for 2 and 3, …"""
    return min(max(match_length, 1).bit_length(), _LEVELS) - 1


def _class(match_length: int) -> int:
    """Which steps share what the draft gains: no match or a single token, 2 to 3, 4 to 7, longer."""
    return min(max(match_length, 1).bit_length(), _CLASSES) - 1


# Longer matches are surer, and so is a look-up that was right once; round figures, worth `trust` tokens each.
_START = [[sigmoid(0.9 * level - 1.2), sigmoid(0.9 * level - 0.4)] for level in range(_LEVELS)]
