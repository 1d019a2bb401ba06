"""When a look-up pays, and how far: learned online from match length and continuation counts.

A look-up is verified while P(all right) > tokens/s now achieved * seconds per verified token, as in `throughput`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spec_stack.controller.acceptance import OnlineLogistic, sigmoid
from spec_stack.controller.base import StepRecord
from spec_stack.controller.step_cost import TOLERANCE, USUAL_UNREAD, PerContextLength, RequestRate, StepCost

# Looked-up tokens that are verified whatever the last outcomes.
_LEAST_REACH = 8
# Looked-up tokens that the estimate counts for against the request's outcomes, and what is kept of those.
_OWN_TRUST, _OWN_KEEP = 5.0, 0.95
# Chance under which nothing more is verified, and the same while nothing has been measured.
_LEAST_PRICE, _COLD_PRICE = 0.02, 0.1
# One in so many steps where a look-up wins goes to the draft, and the other way round, to keep both rates current.
_TRY_EVERY = 32
# Of log2 match length, log times seen, log others seen, behind the first, log2 place, shared, bias: fitted to a 1.5B's
# answers to 25 prompts (code, math, edits, chat, summaries).
_START = (0.9, 1.0, -1.1, -0.2, 0.2, 0.0, -1.25)


class NgramToken(NamedTuple):
    """A looked-up token.

    length: tokens before it that match the text, looked-up ones included. num_seen: times it followed them, 1 or more.
    num_others: times another token did. is_shared: found in another request's text.
    """

    token_id: int
    length: int
    num_seen: int
    num_others: int
    is_shared: bool = False


@dataclass(frozen=True)
class NgramProposal:
    """The value of a look-up.

    found: tokens of a continuation that are worth verifying. gain: tokens gained over a plain step, their time paid.
    match_length: matching tokens before the best continuation; 0 without one.
    """

    found: Sequence[NgramToken] = ()
    gain: float = 0.0
    match_length: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [each.token_id for each in self.found]


@dataclass
class _Own:
    """Right and expected looked-up tokens of a request, from one source."""

    right: float = 0.0
    expected: float = 0.0

    def learn(self, is_right: bool, chance: float) -> None:
        self.right = _OWN_KEEP * self.right + is_right
        self.expected = _OWN_KEEP * self.expected + chance

    @property
    def share(self) -> float:
        return (self.right + _OWN_TRUST) / (self.expected + _OWN_TRUST)


class NgramPolicy:
    """Learns the accuracy of look-ups, the draft's gain, and the cost of both. One request at a time.

    P(a looked-up token is right, given all before it) is a logistic model of match length and counts, scaled by this
    request's outcomes. The request's own text and shared texts are calibrated apart.
    """

    def __init__(self) -> None:
        self._chances = OnlineLogistic(_START)
        self._costs = PerContextLength(StepCost)
        # At the last step's length.
        self._cost = StepCost()
        # In tokens per plain step; and the gain of a step that goes to the draft, in tokens.
        self._rate = RequestRate(1.0, weight=2.0)
        self._gain = RequestRate(1.0, weight=2.0)
        self._num_settled = 0
        self._offer = NgramProposal()
        self._tail: Sequence[NgramToken] = ()
        self._begin_request()

    def _begin_request(self) -> None:
        # By `NgramToken.is_shared`.
        self._own = {False: _Own(), True: _Own()}
        # Most looked-up tokens: grows while all are right, and falls towards the accepted number.
        self._reach = 2 * _LEAST_REACH
        self._rate.begin_request()
        self._gain.begin_request()

    def chance(self, found: NgramToken, place: int) -> float:
        """P(a looked-up token is right), given that the `place` tokens before it are."""
        return min(self._typical_chance(found, place) * self._own[found.is_shared].share, 0.999)

    def _typical_chance(self, found: NgramToken, place: int) -> float:
        return sigmoid(self._chances.logit(_features(found, place)))

    @property
    def _tokens_per_s(self) -> float:
        return self._rate.value / self._cost.plain_s if self._cost.ready_to_verify else 0.0

    def price(self, beside: int = 0) -> float:
        """The chance at which one more verified token pays for its time `beside` so many others."""
        if not self._cost.ready_to_verify:
            return _COLD_PRICE
        return max(self._tokens_per_s * self._cost.verify_per_token_s(beside), _LEAST_PRICE)

    def offer(self, continuations: Sequence[Iterable[NgramToken]], most: int) -> NgramProposal:
        """The best continuation as a whole step of `most` tokens at most."""
        self._offer, self._tail = self._best(continuations, most, 1.0, 0), ()
        return self._offer

    def prefers(self, offer: NgramProposal) -> bool:
        """Return whether the step goes to the look-up instead of the draft."""
        if not offer.found:
            return False
        self._num_settled += 1
        wins = offer.gain > max(self._gain.value, 0.0)
        return wins != (self._num_settled % _TRY_EVERY == 0)

    def takes_over(
        self,
        continuations: Sequence[Iterable[NgramToken]],
        most: int,
        chance: float,
        with_next: float,
        num_drafted: int,
    ) -> bool:
        """Return whether a look-up behind drafted tokens is worth more than further drafting.

        chance, with_next: P(all drafted tokens are right), and P(these and the draft's next one are).
        """
        offer = self._best(continuations, most, chance, num_drafted)
        # The maximum of two estimates is biased upwards, so it must be clearly greater.
        to_come = self._to_come(most, chance, with_next, num_drafted)
        return bool(offer.found) and offer.gain >= 1.5 * to_come + 0.5

    def _to_come(self, most: int, chance: float, with_next: float, num_drafted: int) -> float:
        """The draft's expected gain in tokens, its time paid, if all its next tokens were as sure as the next one."""
        if not self._cost.ready:
            return with_next
        gain, share = 0.0, with_next / chance
        for place in range(most):
            chance *= share
            worth = chance - self._tokens_per_s * self._cost.per_token_s(num_drafted + place)
            if worth <= 0:
                break
            gain += worth
        return gain

    def tail(
        self, continuations: Sequence[Iterable[NgramToken]], most: int, chance: float, num_drafted: int
    ) -> NgramProposal:
        """The look-up worth verifying behind so many drafted tokens that are all right with this chance."""
        offer = self._best(continuations, most, chance, num_drafted)
        self._tail = offer.found
        return offer

    def _best(
        self, continuations: Sequence[Iterable[NgramToken]], most: int, chance: float, beside: int
    ) -> NgramProposal:
        offers = [self._worth(continuation, most, chance, beside) for continuation in continuations]
        return max(offers, key=lambda offer: offer.gain, default=NgramProposal())

    def _worth(self, continuation: Iterable[NgramToken], most: int, chance: float, beside: int) -> NgramProposal:
        gain, match_length = 0.0, 0
        worthwhile: list[NgramToken] = []
        for place, found in enumerate(continuation):
            match_length = match_length or found.length
            if place == min(most, self._reach):
                break
            chance *= self.chance(found, place)
            price = self.price(beside + place)
            if chance <= price:
                break
            gain += chance - price
            worthwhile.append(found)
        return NgramProposal(worthwhile, gain, match_length)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; a prefill step begins a request."""
        self._cost = self._costs.at(record)
        if record.is_prefill:
            self._begin_request()
            return
        if record.num_looked_up and record.num_accepted >= record.num_drafted:
            found = self._tail if record.num_drafted else self._offer.found
            self._learn(found[: record.num_looked_up], record.num_accepted - record.num_drafted)
        if not record.draft_read_prompt and math.isfinite(record.seconds):
            self._observe_times(record)

    def _learn(self, looked_up: Sequence[NgramToken], num_accepted: int) -> None:
        if num_accepted == len(looked_up):
            self._reach = max(self._reach, 2 * len(looked_up))
        else:
            self._reach = max(_LEAST_REACH, (self._reach + 2 * num_accepted) // 2)
        for place, found in enumerate(looked_up[: num_accepted + 1]):
            is_right = place < num_accepted
            self._own[found.is_shared].learn(is_right, self._typical_chance(found, place))
            self._chances.learn(_features(found, place), is_right)

    def _observe_times(self, record: StepRecord) -> None:
        cost, draft_s = self._cost, record.draft_s
        if record.num_unread > USUAL_UNREAD and cost.ready:
            # Looked-up tokens are fed when the draft is next used, so those seconds say nothing of a drafted token.
            draft_s = min(draft_s, cost.draft_s(record.num_drafted))
        cost.observe(record.num_drafted, draft_s, record.verify_s, record.num_recomputed, record.num_looked_up)
        if not cost.ready_to_verify:
            return
        bound = TOLERANCE * cost.seconds(record.num_drafted, record.num_looked_up)
        self._rate.add(record.num_tokens, min(record.seconds, bound) / cost.plain_s)
        if record.proposer != "lookup":
            # The step's gain, the seconds of its proposal paid at the present rate.
            spent = draft_s + cost.verify_s(record.gamma) - cost.plain_s
            self._gain.add(max(record.num_accepted - self._tokens_per_s * spent, -float(record.gamma + 1)), 1.0)


def _features(found: NgramToken, place: int) -> list[float]:
    return [
        math.log2(min(found.length, 64)),
        math.log(min(found.num_seen, 16)),
        math.log(found.num_others + 0.5),
        float(place > 0),
        math.log2(1 + place),
        float(found.is_shared),
        1.0,
    ]
