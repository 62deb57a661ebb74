"""A trial step of Adam in one pass: weights, state and gradients are read once, trial weights are written.

It rounds as torch's fused step on a CPU does: products that are added to averages are not rounded before.
"""

import numpy as np

from bireme.compiled import compiled_dividing, compiled_fused


@compiled_fused
def _between(start: np.float32, weight: np.float32, difference: np.float32) -> np.float32:
    return start + weight * difference


@compiled_dividing
def try_adam(
    weights: np.ndarray,
    gradients: np.ndarray,
    means: np.ndarray,
    squares: np.ndarray,
    trial: np.ndarray,
    factors: np.ndarray,
) -> None:
    """Write what a step would make of the weights into `trial`.

    `factors` are, in float32: the factor of the gradients, the part of the weights that decay adds to them,
    the part of the weights that decay leaves, 1 − beta1, beta2, 1 − beta2, the root of the second bias
    correction, epsilon, and minus the size of a step.
    """
    scale, added, left, new, old_square, new_square, root, epsilon, size = factors
    one = np.float32(1.0)
    for i in range(len(weights)):
        gradient = _between(gradients[i] * scale, added, weights[i])
        difference = gradient - means[i]
        if new < np.float32(0.5):
            mean = _between(means[i], new, difference)
        else:
            mean = _between(gradient, new - one, difference)
        square = _between(squares[i] * old_square, new_square * gradient, gradient)
        trial[i] = weights[i] * left + size * mean / (np.sqrt(square) / root + epsilon)
