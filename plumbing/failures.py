"""Errors that end a run: which of them are not the program's fault, and what to do next."""

import re
import sys

import torch
import torch.distributed as dist

from plumbing.cli import RunFailed
from plumbing.ranks import rank, stragglers


def out_of_memory(error):
    """Whether `error` means that memory ran out. The allocators of the CPU and of MPS raise a plain
    RuntimeError, which only its text identifies."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def explain(error):
    """One line on what `error` means and what to do next, or None if the program is at fault.

    Rank 0 reports it when the run ends. Other ranks print it to stderr now, unless all raise it.
    """
    last_line = (str(error).strip().splitlines() or [""])[-1]
    resume = "the same command resumes from the newest checkpoint"
    why = None
    if isinstance(error, RunFailed):
        why = str(error)
    elif out_of_memory(error):
        why = "out of memory outside the forward and backward pass; try a smaller --n_embd"
    elif "index out of range in self" in last_line or "device-side assert" in str(error):
        why = "a token id outside the model's vocabulary; expected ids below vocab_size"
    elif isinstance(error, ConnectionError):  # the only connections are to workers
        why = f"a DataLoader worker is gone ({last_line}); {resume}"
    elif isinstance(error, OSError) or "DataLoader worker (pid" in last_line:
        why = f"{last_line}; once that is fixed, {resume}"
    elif dist.is_initialized() and ("gloo" in str(error) or "NCCL" in str(error)):
        detail = last_line.rpartition("] ")[2].partition(". ")[0]
        why = f"another rank is gone ({detail}); {resume}"
        if re.search("timed out|timeout", str(error), re.IGNORECASE):
            late = " and ".join(map(str, stragglers())) or "unknown"
            why = f"rank {late} kept the others waiting for more than hang_minutes; {resume}"
    agreed = isinstance(error, RunFailed) and error.__cause__ is None  # all ranks raise it together
    if why and rank() > 0 and not agreed:
        print(f"rank {rank()}: failed: {why}", file=sys.stderr, flush=True)
    return why
