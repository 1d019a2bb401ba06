"""Forms of facts and questions put together from parts, for training: so many that a small model cannot know them all.

A form of `wording` is seen thousands of times, and a model of a few million parameters learns it by heart. These are
drawn from a few hundred parts in thousands of combinations, beside them verbs of every day and values of any make-up.
No part is one of the test half's forms.
"""

from __future__ import annotations

import random
import re
from functools import cache

from experiments.pair.values import LETTERS, number
from experiments.pair.wording import Relation, listed

_OF = listed(
    """the {a} of {e}, {e}'s {a}, the {a} for {e}, the {a} that {e} has, the {a} belonging to {e}, the {a} used by {e},
    the {a} with {e}, the {a} given to {e}, the {a} held by {e}, the {a} on file for {e}, the {a} kept for {e},
    the {a} under the name of {e}, the {a} in the case of {e}, the {a} next to {e}, the {a} that belongs to {e}"""
)
_BE = listed(
    """is, was, equals, reads, became, remains, stays, will be, has been, is still, was changed to, is given as,
    is listed as, was noted as, stands at, came to, must be, should be, has become, is known to be, is now, would be,
    had to be, is simply, is called, says, may be"""
)
_IS_FIRST = listed(
    """is, was, became, remains, serves as, stands for, was chosen as, was named as, is known as, is still, will be,
    is written as, has become, is given as, must be"""
)
_HAVE = listed(
    """has, had, got, received, took, picked, selected, wants, needs, gives, holds, carries, lists, bears, kept,
    entered, typed, ordered, requested, changed to, switched to, moved to, always takes, was given, has taken,
    decided on"""
)
_WENT_ON = listed(
    """went on, came first, was fine, looked good, stayed there, is new, stood out, can wait, did well, made sense,
    was on the list, came last, is well known"""
)
_LEAD = (
    *("", "", "", "", "After the meeting, ", "By then ", "In the end ", "Since Monday ", "On page three: ", "Later "),
    *("Before that, ", "Yesterday ", "For years ", "Next to that, ", "Of course ", "Today ", "There, ", "And so "),
)
_TAIL = (
    *("", "", "", "", " since then", " from now on", ", said the clerk", ", it seems", " as usual", " so far"),
    *(", by all accounts", " without exception", " in every list", " after all", ", you see"),
)
_SHOW = listed(
    """What is, What was, Which is, Tell me, Say, Give me, Give, Find, Show me, I want, I need to know, Look for,
    Search for, Read out, Write, Print, Return, Fetch, Get, Report, Recall, Do you remember, Where do I see, What about,
    Can you see, Can you find, Do you have, Bring me, Look up, Repeat, Please give, Please say, We need, Who knows,
    How about, I would like to know, Can you read, Have you seen"""
)
_END = ("?", "?", "?", ".", ".", "", " in the text?", " above?", " here?", ", please.", " from the document.", " now?")
_ASK = (
    *("Which {a} did {e} get?", "Which {a} was given to {e}?", "With which {a} did {e} come?", "{e} has which {a}?"),
    *("{e}: which {a}?", "If I look at {e}, which {a} do I find?", "What can you say about {e}'s {a}?"),
    *("There is {e}. Which {a} is it?", "I see {e} but not the {a}. What is it?", "What {a} goes to {e}?"),
    *("What {a} stands beside {e}?", "Of {e} I want the {a}.", "When you think of {e}, which {a} is that?"),
)
_KEYS = (
    *("{a} {e}", "{e} {a}", "{e} + {a}", "{a} @ {e}", "{e} > {a}", "{a} -> {e}", "get {a} {e}", "{e} {a} value"),
    *("lookup {e} {a}", "{a} | {e}", "{e}.{a}", "{a}({e})", "{e} and {a}", "{a} in {e}", "? {e} {a}", "{e}, {a}?"),
    *("{e} [{a}]", "{a}={e}", "show {a} {e}", "{e} what {a}", "{a} with {e}", "{e} its {a}"),
)
_MARKS = (*"-/_#+.*=&%:,;.:", "..", " / ", ": ")
# As the values of the test half look: these are left to it.
_OTHERS = re.compile(r"v[\d.]+|\d+:\d+|[0-9a-f]{6}|0\d+ \d+|\d+,\d+")
# Verbs by their base, past and participle.
_VERBS = listed(
    """build built built, paint painted painted, carry carried carried, open opened opened, close closed closed,
    visit visited visited, watch watched watched, follow followed followed, sell sold sold, buy bought bought,
    bring brought brought, find found found, lose lost lost, want wanted wanted, choose chose chosen, draw drew drawn,
    clean cleaned cleaned, lift lifted lifted, push pushed pushed, pull pulled pulled, plant planted planted,
    collect collected collected, order ordered ordered, borrow borrowed borrowed, hide hid hidden, break broke broken,
    count counted counted, cut cut cut, drop dropped dropped, fill filled filled, guard guarded guarded,
    help helped helped, invite invited invited, kick kicked kicked, love loved loved, miss missed missed,
    move moved moved, need needed needed, offer offered offered, pack packed packed, print printed printed,
    promise promised promised, rent rented rented, save saved saved, send sent sent, show showed shown,
    sign signed signed, store stored stored, test tested tested, throw threw thrown, touch touched touched,
    trust trusted trusted, wash washed washed, hear heard heard, see saw seen, remember remembered remembered,
    describe described described, forget forgot forgotten, catch caught caught, burn burned burned"""
)


def statement(rng: random.Random) -> str:
    """A sentence with a fact in it."""
    draw = rng.random()
    if draw < 0.5:
        core = f"{rng.choice(_OF)} {rng.choice(_BE)} {{v}}"
    elif draw < 0.65:
        core = f"{{v}} {rng.choice(_IS_FIRST)} {rng.choice(_OF)}"
    else:
        have, its = rng.choice(_HAVE), rng.choice(("", "the ", "its ", "a "))
        core = rng.choice(
            (
                f"{{e}} {have} {{v}} as {its}{{a}}",
                f"for the {{a}}, {{e}} {have} {{v}}",
                f"{{e}} {have} the {{a}} {{v}}",
                f"as {its}{{a}} {{e}} {have} {{v}}",
                f"{{e}} {have} {its}{{a}}, {{v}}",
                f"{{e}} {have} {{v}} for {its}{{a}}",
                f"{{e}} {have} {its}{{a}} of {{v}}",
                f"with {its}{{a}} of {{v}}, {{e}} {rng.choice(_WENT_ON)}",
                f"{{e}}: {its}{{a}} {rng.choice(_BE)} {{v}}",
                f"{rng.choice(_OF)}: {{v}}",
                f"{rng.choice(_OF)}, {{v}}, {rng.choice(_WENT_ON)}",
            )
        )
    lead = rng.choice(_LEAD)
    if not lead and core[0] != "{":
        core = core[0].upper() + core[1:]
    return lead + core + rng.choice(_TAIL) + "."


def question(rng: random.Random) -> str:
    """A question for a fact's value."""
    draw = rng.random()
    if draw < 0.6:
        return f"{rng.choice(_SHOW)} {rng.choice(_OF)}{rng.choice(_END)}"
    return rng.choice(_ASK if draw < 0.75 else _KEYS)


def value(rng: random.Random, words: list[str]) -> str:
    """A value of any make-up: numbers, letters and words in a row, with a mark between them or none."""
    while True:
        mark = rng.choice(("", "", " ", *_MARKS))
        parts = []
        for _ in range(rng.randint(1, 4)):
            draw = rng.random()
            if draw < 0.4:
                parts.append(number(rng, 1, 4))
            elif draw < 0.7:
                letters = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 3)))
                parts.append(letters if rng.random() < 0.6 else letters.lower())
            else:
                parts.append(rng.choice(words))
        made = mark.join(parts)
        if len(made) > 1 and not _OTHERS.fullmatch(made):
            return made


@cache
def relations() -> tuple[Relation, ...]:
    """Facts said with verbs of every day: who did it, and to what or whom."""
    made = []
    for verb in _VERBS:
        base, past, participle = verb.split()
        facts = (f"{{e}} {past} {{v}}.", f"{{e}} {past} the {{v}}.", f"The {{v}} was {participle} by {{e}}.")
        facts += (f"It was {{e}} that {past} the {{v}}.", f"One day {{e}} {past} the {{v}} again.")
        asked = (f"What did {{e}} {base}?", f"What was {participle} by {{e}}?", f"Which thing did {{e}} {base}?")
        asked += (f"{{e}} {past} what?", f"Say what {{e}} {past}.")
        inverse = (f"Who {past} the {{v}}?", f"By whom was the {{v}} {participle}?", f"Tell me who {past} the {{v}}.")
        made += [Relation(who, "object", facts, asked, inverse) for who in ("person", "company")]
        people = (f"{{e}} {past} {{v}}.", f"It was {{v}} whom {{e}} {past}.", f"{{v}} was {participle} by {{e}}.")
        whom = (f"Whom did {{e}} {base}?", f"Who was {participle} by {{e}}?", f"{{e}} {past} whom?")
        made.append(
            Relation("person", "person", people, whom, (f"Who {past} {{v}}?", f"By whom was {{v}} {participle}?"))
        )
        made.append(Relation("person", "wild", facts, asked, inverse))
    return tuple(made)
