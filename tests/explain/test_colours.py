"""The page's colours, as its style sheet names them: told apart by those who see colours otherwise, light and dark."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import pytest

STYLE = (files("spec_stack.explain") / "page.css").read_text(encoding="utf-8")
WRITERS = ("draft", "ngram", "bonus", "correction", "plain", "other")
REASONS = ("attention", "word", "ends", "protected", "recalled", "cached")
Colour = tuple[float, float, float]
# Linear RGB as it is seen without one kind of cone: Machado, Oliveira and Fernandes (2009), severity 1.
SIGHTS: dict[str, tuple[Colour, Colour, Colour]] = {
    "trichromat": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanope": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranope": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanope": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def colours(dark: bool) -> dict[str, Colour]:
    """The style sheet's variables that are colours, as linear RGB."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    named = {}
    for name, value in re.findall(r"--([a-z]+): #([0-9a-f]{6});", blocks[dark]):
        parts = [int(value[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        named[name] = (red, green, blue)
    return named


def contrast(one: Colour, other: Colour) -> float:
    """WCAG's ratio."""
    low, high = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (one, other))
    return (high + 0.05) / (low + 0.05)


def difference(one: Colour, other: Colour, sight: str) -> float:
    """CIE 1976 colour difference, as one such reader sees it; about 2 is the least that anybody notices."""

    def lab(colour: Colour) -> Colour:
        seen = [sum(a * b for a, b in zip(row, colour, strict=True)) for row in SIGHTS[sight]]
        red, green, blue = (min(1.0, max(0.0, part)) for part in seen)
        xyz = (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
        )
        x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
        return 116 * y - 16, 500 * (x - y), 200 * (y - z)

    return float(sum((a - b) ** 2 for a, b in zip(lab(one), lab(other), strict=True)) ** 0.5)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("names", [WRITERS, REASONS])
def test_those_who_see_colours_otherwise_tell_writers_and_reasons_apart(
    names: tuple[str, ...], sight: str, dark: bool
) -> None:
    named = colours(dark)
    least = min((difference(named[one], named[other], sight), one, other) for one, other in combinations(names, 2))
    assert least[0] >= 20, least


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_marks_stand_out_from_the_card(dark: bool) -> None:
    named = colours(dark)
    card = named["card"]
    for name in ("ink", "pale", *REASONS):
        assert contrast(named[name], card) >= 4.5, name
    for name in (*WRITERS, "query"):
        assert contrast(named[name], card) >= 3.0, name
