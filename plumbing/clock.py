"""Where the time of a process goes: seconds by kind."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Clock:
    """Adds up seconds by kind: lap(kind) counts the time since the previous lap, or the start."""

    def __init__(self, since_process_start: bool = True):
        self.last = time.perf_counter() - (process_age() if since_process_start else 0.0)
        self.seconds = Counter(start=0.0, train=0.0, evaluate=0.0, sample=0.0, save=0.0)

    def lap(self, kind: str, since: float = 0.0) -> float:
        """since: a later begin of the lap; the time before it is left for the next one."""
        elapsed = time.perf_counter() - max(since, self.last)
        self.last += elapsed
        self.seconds[kind] += elapsed
        return elapsed

    @contextmanager
    def apart(self, kind: str) -> Iterator[None]:
        """A context whose time counts as `kind`, not for the lap around it."""
        since = time.perf_counter()
        yield
        self.lap(kind, since)


def process_age() -> float:
    """Seconds since this process began, imports included; 0 if the system does not say."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
