"""The tuned constants of the policies, each in one place. Loads nothing.

Tuned on recorded answers of a 1.5B model to 25 prompts (code, mathematics, edits, chat, summaries).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Constants that no measurement of the running pair replaces."""

    # Seconds of a step.
    keep: float = 0.98
    """What each step leaves of the weight of earlier ones, in seconds and in rates."""
    recent_steps: int = 5
    """Steps of which the seconds of a plain step are the average, and those of a drafted token the median."""
    start_draft: float = 0.3
    """The assumed cost of a token of an untried draft, and of the draft's prefill, as a share of the target's."""
    knots: tuple[float, ...] = (0.0, 4.0, 8.0, 16.0)
    """Verified tokens beside the last committed one at which the target's seconds may begin to rise faster."""
    shrinkage: float = 0.5
    """Ridge of the slopes between the knots, in steps."""
    batch_shrinkage: float = 0.3
    """The same on a server, whose curve has a knot at every candidate."""
    tolerance: float = 1.5
    """A sample over this factor above what is expected counts as if it were on that bound."""

    # Rates, and probabilities.
    prior_weight: float = 5.0
    """Plain steps that a rate's start counts for; plain steps, and tokens, that the rate and the acceptance of all
    requests count for against a request's own."""
    trust: float = 20.0
    """Examples that the shipped weights of an online regression count for."""
    forgetting: float = 0.999
    """What each example leaves of an online regression's certainty, and each step of the rate by whole answers."""

    # When to draft.
    try_share: float = 0.015
    """Share of the time that drafting may lose."""
    start_allowance: float = 0.5
    """Plain steps that an untried draft may lose."""
    catching_up_share: float = 0.005
    """Share of the time that the draft's catching up may lose, in answers that end before it has paid."""
    carried_allowance: float = 2.0
    """Plain steps of earlier requests' gain that a request may lose."""
    most_allowance: float = 8.0
    """Plain steps of its own gain that a request may lose again."""
    plain_every: int = 16
    """Steps that draft between two plain ones, where drafting gains less than `start_speedup`; 8 times as many where
    it gains more."""
    check_every: int = 32
    """Steps between steps for the source of tokens that is held to be worse. A server tries another gamma half as
    often, and gives up after so many steps of unknown seconds."""
    start_speedup: float = 1.3
    """The gain that an untried draft may have."""
    untried_speedup: float = 1.17
    """The gain that an untried draft is believed to have, where it must catch up first."""
    catching_up_margin: float = 1.4
    """Factor by which the expected saving exceeds the cost of catching up."""
    long_lag: int = 32
    """Tokens to catch up on from which the draft's prefill is weighed against the answer's expected saving."""
    answer_tokens: int = 128
    """The assumed length of an answer."""
    least_speedup: float = 1.02
    """Factor in waiting that another gamma must gain on a server."""

    # N-gram lookup.
    least_reach: int = 8
    """Tokens of a proposal that are verified whatever the last outcomes."""

    # The paper's policy.
    first_wait: int = 16
    """Idle steps before a draft that does not pay is tried again, doubled with every try in vain."""
    last_wait: int = 256
    """The most idle steps between two tries."""


TUNING = Tuning()
