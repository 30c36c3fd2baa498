"""Better, or luck? Verdicts on paired losses: by one planned look, or after each seed; or on many
edits.

Differences are losses of one configuration minus those of another on the same seeds: below 0 is
better. Nothing here knows of a run.
"""

import math
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

SHARE = 0.05  # of comparisons without a difference that may be called better or worse
PRIOR = 4.0  # variance of the standardized difference that e_value() expects
POWER = 0.8416  # standard normal quantile of a power of 80%
MOST_SEEDS = 10_000  # that seeds_needed() considers


@dataclass
class Verdict:
    word: str  # better | worse | not shown | identical
    low: float  # the 95% interval of the mean difference
    high: float
    needed: int  # seeds that would show the difference with a power of 80%, if it is as it seems

    def __str__(self):
        if self.word != "not shown":
            return self.word
        outside = "excludes no difference yet"
        if math.isfinite(self.low):
            outside = f"excludes differences outside {self.low:+.4f} to {self.high:+.4f}"
        number = f"more than {MOST_SEEDS:,}" if self.needed > MOST_SEEDS else f"about {self.needed}"
        return f"not shown ({outside}; {number} seeds would show one of this size)"


def e_value(differences: list) -> float:
    """Evidence against "the mean is 0": over all looks together, it exceeds 20 with a probability
    of at most 5% if that is true. A Bayes factor is such a number where the prior of the unknown
    deviation is the right Haar measure, under which the t statistic's distribution knows no
    deviation; the difference in deviations is N(0, PRIOR). (Wang & Ramdas 2023, "Anytime-valid
    t-tests and confidence sequences for Gaussian means with unknown variance"; Perez-Ortiz et al.
    2024.) With v = n - 1 and k = 1 + n * PRIOR:  E = k ** -1/2 * ((1 + t*t/v) / (1 + t*t/(v*k))) **
    (n/2)."""
    n = len(differences)
    if n < 2 or not any(differences):
        return 1.0
    k = 1 + n * PRIOR
    deviation = stdev(differences)
    if deviation == 0:
        return k ** ((n - 1) / 2)
    effect = mean(differences) / deviation
    signal = n * effect * effect / (n - 1)
    ratio = (1 + signal) / (1 + signal / k)
    return ratio ** (n / 2) / math.sqrt(k)


def t_for_e_value(n: int, evidence: float) -> float:
    """The t statistic of n differences at which e_value() is `evidence`; inf if none is enough."""
    k = 1 + n * PRIOR
    ratio = (evidence * math.sqrt(k)) ** (2 / n)
    if ratio >= k:
        return math.inf
    return math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / k))


def t_tail(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """(t, share of Student's t beyond -t and t), for increasing t. With t = sqrt(freedom) *
    tan(angle), its density is that of the angle, cos(angle) ** (freedom - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.cumsum(density[1:] + density[:-1])
    t = math.sqrt(freedom) * np.tan(angle[1:])
    return t, 1 - mass / mass[-1]


def t_quantile(freedom: int, share: float = SHARE) -> float:
    """Beyond which, on both sides, `share` of Student's t lies."""
    t, beyond = t_tail(freedom)
    return float(np.interp(1 - share, 1 - beyond, t))


def verdict_on(differences: list, comparisons: int = 1, every_look: bool = True) -> Verdict:
    """every_look: valid however often one looks, by e_value(); else the paired t-test (Student
    1908), for one look. comparisons: how many are made in all (Bonferroni)."""
    n = len(differences)
    middle = mean(differences)
    share = SHARE / comparisons

    def critical_t(n):
        return t_for_e_value(n, 1 / share) if every_look else t_quantile(n - 1, share)

    if not any(differences):
        return Verdict("identical", 0.0, 0.0, n)
    deviation = stdev(differences)
    half = critical_t(n) * deviation / math.sqrt(n) if deviation else 0.0
    if deviation == 0 and e_value(differences) < 1 / share:
        half = math.inf  # equal differences of so few seeds show nothing yet
    word = "not shown"
    if abs(middle) > half:
        word = "better" if middle < 0 else "worse"
    effect = abs(middle) / deviation if deviation else math.inf
    needed = n if word != "not shown" else max(n + 1, seeds_needed(effect, critical_t))
    return Verdict(word, middle - half, middle + half, needed)


def seeds_needed(effect: float, critical_t) -> int:
    """The smallest n at which a mean of `effect` deviations is shown with a power of 80%, by the
    normal approximation of the noncentral t (Johnson & Kotz 1970). critical_t(n): what t must
    exceed."""
    low, high = 2, MOST_SEEDS + 1
    while low < high:
        n = (low + high) // 2
        t = critical_t(n)
        spread = math.sqrt(1 + t * t / (2 * (n - 1))) if t < math.inf else math.inf
        if effect * math.sqrt(n) >= t + POWER * spread:
            high = n
        else:
            low = n + 1
    return low


def kept_by_e_bh(e_values: list, share: float = SHARE) -> list[int]:
    """Places of those to keep, of which at most `share` are false on average, however dependent
    they are and whenever each stopped: the largest k of which each is at least count / (k * share)
    (Wang & Ramdas 2022, "False discovery rate control with e-values", e-BH)."""
    order = sorted(range(len(e_values)), key=lambda place: -e_values[place])
    kept = 0
    for k, place in enumerate(order, 1):
        if e_values[place] * k * share >= len(e_values):
            kept = k
    return sorted(order[:kept])
