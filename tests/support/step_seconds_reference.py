"""What steps take, by one regression over all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def expected_seconds(
    steps: Sequence[tuple[int, int, int, float]], gammas: Sequence[int], batch_size: int, num_slots: int
) -> NDArray[np.float64]:
    """Posterior mean after all steps (gamma, size, slots, seconds), by candidate: the constants written out anew."""

    def place(gamma: int, power: int) -> tuple[float, float]:
        return math.log2(1 + gamma), float(power)

    def interpolated(gamma: int, size: int) -> list[tuple[float, tuple[float, float]]]:
        low = math.floor(math.log2(size))
        far = math.log2(size) - low
        return [(1 - far, place(gamma, low)), (far, place(gamma, low + 1))]

    def shape(a: tuple[float, float], b: tuple[float, float]) -> float:
        apart = (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2
        return 0.16 * math.exp(-apart / 12.5) + (0.0025 if a == b else 0.0)

    def walked(a: int, b: int) -> float:
        """Doublings over 512 that two lengths share, of a walk that is a line between doublings."""
        steps = 0.0
        for at in range(9):
            of_a, of_b = (min(max(round(8 * math.log2(slots / 512)) / 8 - at, 0.0), 1.0) for slots in (a, b))
            steps += of_a * of_b
        return steps

    def kernel(a: tuple[int, int, int], b: tuple[int, int, int], moved: int) -> float:
        """moved: steps of drift that both have seen."""
        length = walked(a[2], b[2]) * (0.09 + 0.01 * math.log2(1 + a[0]) * math.log2(1 + b[0]))
        return length * (1 + 0.0005 * moved) + sum(
            wa * wb * (shape(pa, pb) + 16 + moved * (0.0004 + 0.0005 * shape(pa, pb)))
            for wa, pa in interpolated(*a[:2])
            for wb, pb in interpolated(*b[:2])
        )

    def mean(gamma: int, size: int) -> float:
        return sum(
            weight * math.log(1 + 0.1 * gamma + 0.02 * 2**power * (1 + gamma))
            for weight, (_, power) in interpolated(gamma, size)
        )

    cells = [step[:3] for step in steps]
    covariance = np.array([[kernel(a, b, min(i, j) + 1) for j, b in enumerate(cells)] for i, a in enumerate(cells)])
    surprises = np.array([math.log(seconds) - mean(gamma, size) for gamma, size, _, seconds in steps])
    weights = np.linalg.solve(covariance + 0.0225 * np.eye(len(cells)), surprises)
    found = []
    for gamma in gammas:
        cross = [kernel((gamma, batch_size, num_slots), cell, number + 1) for number, cell in enumerate(cells)]
        found.append(math.exp(mean(gamma, batch_size) + float(np.array(cross) @ weights)))
    return np.array(found)
