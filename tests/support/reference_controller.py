"""Slow, plain versions of what the controller computes, by another route. Imports nothing from the package."""

from __future__ import annotations

import math


def fixed_gamma_steps(correct: list[bool], start: int, end: int, gamma: int, reserve: int) -> list[tuple[int, int]]:
    """(gamma, accepted) of every step of fixed-gamma greedy decoding of a text."""
    steps = []
    position = start
    while position < end:
        drafted = min(gamma, end - position - reserve)
        accepted = 0
        for index in range(drafted):
            if not correct[position + index]:
                break
            accepted += 1
        steps.append((drafted, accepted))
        position += accepted + 1
    return steps


def least_seconds(correct: list[bool], position: int, end: int, costs: list[float], reserve: int) -> float:
    """The least time to reach the end by trying every gamma in every step; costs[gamma] in seconds."""
    if position >= end:
        return 0.0
    best = math.inf
    for gamma in range(min(len(costs) - 1, end - position - reserve) + 1):
        accepted = 0
        while accepted < gamma and correct[position + accepted]:
            accepted += 1
        rest = least_seconds(correct, position + accepted + 1, end, costs, reserve)
        best = min(best, costs[gamma] + rest)
    return best


def shrunk_slopes(
    points: list[tuple[float, float]], base: float, discount: float, shrinkage: float, knots: list[float]
) -> list[float]:
    """Slopes, none under 0, of a curve from a base that may bend upwards at knots: those that cost least, by small
    steps downhill. The newest point has weight 1 and each older one less; a slope's square costs the shrinkage."""
    weights = [discount ** (len(points) - 1 - index) for index in range(len(points))]
    bent = [[max(x - knot, 0.0) for knot in knots] for x, _ in points]
    slopes = [0.0] * len(knots)
    largest = sum(w * sum(b * b for b in row) for w, row in zip(weights, bent, strict=True)) + shrinkage
    for _ in range(20_000):
        errors = [
            y - base - sum(s * b for s, b in zip(slopes, row, strict=True))
            for row, (_, y) in zip(bent, points, strict=True)
        ]
        downhill = [
            sum(w * error * row[at] for w, error, row in zip(weights, errors, bent, strict=True)) - shrinkage * slope
            for at, slope in enumerate(slopes)
        ]
        slopes = [max(slope + step / largest, 0.0) for slope, step in zip(slopes, downhill, strict=True)]
    return slopes


def survival(own: list[float], following: list[float]) -> list[tuple[float, float]]:
    """By drafted token, the chance that it and all before are right, and that the next one is too; of each token's
    logit, and of the next one's asked of it."""
    chances = []
    for count in range(1, len(own) + 1):
        all_right = math.prod(1 / (1 + math.exp(-value)) for value in own[:count])
        chances.append((all_right, all_right / (1 + math.exp(-following[count - 1]))))
    return chances


def network_output(weights: list[list[list[float]]], biases: list[list[float]], values: list[float]) -> float:
    """Dense layers with ReLU between them, number by number."""
    for layer, (matrix, bias) in enumerate(zip(weights, biases, strict=True)):
        outputs = []
        for column in range(len(bias)):
            total = bias[column]
            for row, value in enumerate(values):
                total += value * matrix[row][column]
            outputs.append(total if layer == len(weights) - 1 else max(total, 0.0))
        values = outputs
    return values[0]
