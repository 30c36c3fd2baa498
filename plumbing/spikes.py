"""A loss far above its running mean, measured in running standard deviations (Finch 2009)."""

import math

WARMUP = 50  # losses to count before one can be a spike
LEAST_WEIGHT = 0.01  # of a new loss in the running mean and variance


def is_spike(loss, sigma, state):
    """Whether `loss` is over `sigma` deviations above the mean. If not, it is added to `state`."""
    deviation = loss - state["loss_mean"]
    count = state["loss_count"]
    if count >= WARMUP and deviation > sigma * math.sqrt(state["loss_var"]):
        return True
    weight = max(LEAST_WEIGHT, 1 / (count + 1))
    state["loss_mean"] += weight * deviation
    state["loss_var"] = (1 - weight) * (state["loss_var"] + weight * deviation**2)
    state["loss_count"] += 1
    return False
