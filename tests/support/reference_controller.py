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


def weighted_line(points: list[tuple[float, float]], discount: float) -> tuple[float, float]:
    """Base and slope of least squares, the newest point with weight 1 and each older one with less."""
    weights = [discount ** (len(points) - 1 - index) for index in range(len(points))]
    total = sum(weights)
    mean_x = sum(weight * x for weight, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(weight * y for weight, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(weight * (x - mean_x) ** 2 for weight, (x, _) in zip(weights, points, strict=True))
    covariance = sum(weight * (x - mean_x) * (y - mean_y) for weight, (x, y) in zip(weights, points, strict=True))
    slope = covariance / spread
    return mean_y - slope * mean_x, slope


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


def gap_by_bins(probabilities: list[float], outcomes: list[int], num_bins: int) -> float:
    """Expected calibration error over equal-count bins; the number of examples must be a multiple of num_bins."""
    pairs = sorted(zip(probabilities, outcomes, strict=True), key=lambda pair: pair[0])
    size = len(pairs) // num_bins
    gaps = []
    for number in range(num_bins):
        part = pairs[number * size : (number + 1) * size]
        gaps.append(abs(sum(p for p, _ in part) / size - sum(y for _, y in part) / size))
    return sum(gaps) / num_bins
