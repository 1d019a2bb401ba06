"""When n-gram lookup pays, and how far: learned online from match length and continuation counts.

N-gram tokens are verified while P(all right) > tokens/s now achieved * seconds per verified token, as in `throughput`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.acceptance import OnlineLogistic, sigmoid
from spec_stack.controller.base import StepRecord
from spec_stack.controller.step_times import TOLERANCE, Allowance, RequestRate, StepCost, StepTimes
from spec_stack.controller.tuning import TUNING

# Steps by which a policy that takes plain ones has taken one.
_FIRST_STEPS = 3
# Of log2 match length, log times seen, log others seen, bias: fitted to recorded answers.
_START = (0.9, 1.0, -1.1, -1.25)


class NgramToken(NamedTuple):
    """A token of a continuation.

    length: tokens before it that match the text, n-gram tokens included. num_seen: times it followed them, 1 or more.
    num_others: times another token did. is_shared: found in another request's text.
    """

    token_id: int
    length: int
    num_seen: int
    num_others: int
    is_shared: bool = False


@dataclass(frozen=True)
class NgramProposal:
    """The value of an n-gram lookup.

    found: tokens of a continuation that are worth verifying. gain: tokens gained over a plain step, their time paid.
    """

    found: Sequence[NgramToken] = ()
    gain: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [each.token_id for each in self.found]


class NgramPolicy:
    """Learns the accuracy of n-gram lookup, the draft's gain, and the cost of both. One request at a time.

    P(an n-gram token is right, given all before it) is a logistic model of match length and counts: one for the
    request's own text, one for shared texts. times: of the steps, which the request's policy reads too.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._allowance = Allowance()
        # By `NgramToken.is_shared`.
        self._chances = {False: OnlineLogistic(_START), True: OnlineLogistic(_START)}
        # At the last step's length.
        self._cost = StepCost()
        # In tokens per plain step; and the gain of a step that goes to the draft, in tokens.
        self._rate, self._gain = RequestRate(1.0), RequestRate(1.0)
        self._num_decided = 0
        self._whole: Sequence[NgramToken] = ()
        self._tail: Sequence[NgramToken] = ()
        self._begin_request()

    def _begin_request(self) -> None:
        # Most n-gram tokens: grows while all are right, and falls towards the accepted number.
        self._reach = 2 * TUNING.least_reach
        self._rate.begin_request()
        self._gain.begin_request()
        self._allowance.begin_request()

    def chance(self, found: NgramToken) -> float:
        """P(an n-gram token is right), given that all before it are."""
        return sigmoid(self._chances[found.is_shared].logit(_features(found)))

    @property
    def _tokens_per_s(self) -> float:
        return self._rate.value / self._cost.plain_s if self._cost.knows_plain else 0.0

    def price(self, num_others: int = 0) -> float:
        """The chance at which one more verified token pays for its time beside `num_others` others."""
        return self._tokens_per_s * self._cost.verify_per_token_s(num_others)

    def offer(self, continuations: Sequence[Iterable[NgramToken]], most: int) -> NgramProposal:
        """The best continuation as a whole step of `most` tokens at most."""
        proposal = self._best(continuations, most)
        self._whole, self._tail = proposal.found, ()
        return proposal

    def prefers_ngram(self, offer: NgramProposal) -> bool:
        """Return whether the step goes to n-gram lookup instead of the draft.

        Now and then it goes to the worse one, to keep both rates current.
        """
        if not offer.found:
            return False
        self._num_decided += 1
        wins = offer.gain > max(self._gain.value, 0.0)
        return wins != (self._num_decided % TUNING.check_every == 0)

    def tail(
        self, continuations: Sequence[Iterable[NgramToken]], most: int, chance: float, num_drafted: int
    ) -> NgramProposal:
        """The n-gram tokens worth verifying behind so many drafted tokens that are all right with this chance."""
        proposal = self._best(continuations, most, chance, num_drafted)
        self._tail = proposal.found
        return proposal

    def _best(
        self, continuations: Sequence[Iterable[NgramToken]], most: int, chance: float = 1.0, num_drafted: int = 0
    ) -> NgramProposal:
        most = self._affordable(most, num_drafted)
        offers = [self._offer(islice(each, most), chance, num_drafted) for each in continuations]
        return max(offers, key=lambda offer: offer.gain, default=NgramProposal())

    def _offer(self, continuation: Iterable[NgramToken], chance: float, num_drafted: int) -> NgramProposal:
        """The first tokens of a continuation, each likelier than its price."""
        gain, tokens = 0.0, list[NgramToken]()
        for place, found in enumerate(continuation, start=num_drafted):
            chance *= self.chance(found)
            price = self.price(place)
            if chance <= price:
                break
            gain += chance - price
            tokens.append(found)
        return NgramProposal(tokens, gain)

    def _affordable(self, most: int, num_drafted: int) -> int:
        """The most n-gram tokens that the allowance covers if all are rejected; at most twice as many as ever verified,
        since seconds far beyond the measured ones are unknown.

        One is tried as soon as anything is left: a stall may have made it look dear.
        """
        left_s = self._left_s
        most = min(most, MAX_LOOKED_UP, self._reach, 2 * self._cost.most_verified or 2)
        least = 1 if left_s > 0 else 0
        while most > least and self._extra_s(num_drafted, most) > left_s:
            most -= 1
        return most

    @property
    def _left_s(self) -> float:
        """Seconds that n-gram lookup may lose now; unbounded under a policy that takes no plain steps."""
        if self._cost.knows_plain:
            return self._allowance.num_steps * self._cost.plain_s
        return 0.0 if self._cost.num_steps < _FIRST_STEPS else math.inf

    def _extra_s(self, num_drafted: int, num_tokens: int) -> float:
        """Seconds to verify n-gram tokens beside drafted ones."""
        return self._cost.verify_s(num_drafted + num_tokens) - self._cost.verify_s(num_drafted)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; a prefill step begins a request."""
        self._cost = self.times.observe(record)
        if record.is_prefill:
            self._begin_request()
            return
        if record.num_ngram_tokens and record.num_accepted >= record.num_drafted:
            found = self._tail if record.num_drafted else self._whole
            self._learn(found[: record.num_ngram_tokens], record.num_accepted - record.num_drafted)
        if not record.draft_prefilled_prompt and math.isfinite(record.seconds) and self._cost.knows_plain:
            self._observe_times(record)

    def _learn(self, found: Sequence[NgramToken], num_accepted: int) -> None:
        if num_accepted == len(found):
            self._reach = max(self._reach, 2 * len(found))
        else:
            self._reach = max(TUNING.least_reach, (self._reach + 2 * num_accepted) // 2)
        for place, each in enumerate(found[: num_accepted + 1]):
            self._chances[each.is_shared].learn(_features(each), place < num_accepted)

    def _observe_times(self, record: StepRecord) -> None:
        cost = self._cost
        bound = TOLERANCE * cost.seconds(record.num_drafted, record.num_ngram_tokens)
        num_plain_steps = min(record.seconds, bound) / cost.plain_s
        self._rate.add(record.num_tokens, num_plain_steps)
        if record.num_drafted:
            # Drafted tokens have an allowance of their own.
            num_plain_steps = 1 + self._extra_s(record.num_drafted, record.num_ngram_tokens) / cost.plain_s
        num_tokens = 1 + record.num_accepted - record.num_drafted_accepted
        self._allowance.add(num_tokens, num_plain_steps, record.num_ngram_tokens > 0)
        if record.proposer != "ngram":
            # The step's gain, the seconds of its proposal paid at the present rate.
            spent = self.times.drafting_s(record) + cost.verify_s(record.gamma) - cost.plain_s
            self._gain.add(max(record.num_accepted - self._tokens_per_s * spent, -float(record.gamma + 1)), 1.0)


def _features(found: NgramToken) -> list[float]:
    return [math.log2(min(found.length, 64)), math.log(min(found.num_seen, 16)), math.log(found.num_others + 0.5), 1.0]
