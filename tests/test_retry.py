"""Where memory runs out, the same batch goes through in smaller pieces, with the same result."""

from types import SimpleNamespace

import pytest
import torch
from plumbing.failures import RunFailed, explain, out_of_memory
from plumbing.retry import retry_on_oom
from torch import nn

WORDS = {  # of torch's allocators
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    ),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory."),
    "python": MemoryError(),
}


class Job:
    """A run whose forward pass (dropout, batch norm) fits only micro-batches of up to `room` rows."""

    def __init__(self, room, micro_batch=8, error=WORDS["cpu"]):
        self.room = room
        self.error = error
        self.device = torch.device("cpu")
        self.model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
        self.state = {"step": 4, "micro_batch": micro_batch}
        self.folder = SimpleNamespace(event=self.event)
        self.events = []
        self.seen = []

    def event(self, step, name, **fields):
        self.events.append((step, name, fields))

    def compute(self):
        """A pass over 8 rows; what it draws and moves before memory runs out must not count."""
        self.seen.append((self.model[1].running_mean.tolist(), torch.get_rng_state().sum().item()))
        total = 0.0
        for rows in torch.ones(8, 3, 2).split(self.state["micro_batch"]):
            loss = self.model(rows).square().mean()
            loss.backward()
            total += loss.item()
            if self.state["micro_batch"] > self.room:
                raise self.error
        return total


@pytest.mark.parametrize("error", WORDS.values(), ids=WORDS)
def test_a_retry_begins_where_the_first_try_began(error):
    torch.manual_seed(3)
    straight = Job(room=2, micro_batch=2)
    expected = retry_on_oom(straight, straight.compute)
    torch.manual_seed(3)
    retried = Job(room=2, error=error)
    assert retry_on_oom(retried, retried.compute) == expected
    assert retried.state["micro_batch"] == 2
    assert [fields for _, _, fields in retried.events] == [{"micro_batch": 4}, {"micro_batch": 2}]
    assert {step for step, _, _ in retried.events} == {4}
    assert len(retried.seen) == 3 and len(set(map(str, retried.seen))) == 1
    for one, other in zip(straight.model.parameters(), retried.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for name, buffer in straight.model.named_buffers():
        assert torch.equal(buffer, retried.model.get_buffer(name)), name


def test_an_evaluation_is_retried_as_well():
    """It has no gradients, and in eval mode moves no buffers."""
    job = Job(room=4)
    job.model.eval().requires_grad_(False)

    def evaluate():
        if job.state["micro_batch"] > job.room:
            raise MemoryError
        return sum(job.model(x).sum() for x in torch.ones(8, 3).split(job.state["micro_batch"]))

    assert retry_on_oom(job, evaluate) == pytest.approx(24, abs=0.01)
    assert [name for _, name, _ in job.events] == ["out_of_memory"]


def test_a_single_row_that_does_not_fit_ends_the_run_with_what_helps():
    job = Job(room=0)
    with pytest.raises(RunFailed, match="a single sequence.*--grad_checkpoint=true"):
        retry_on_oom(job, job.compute)
    assert job.state["micro_batch"] == 1


def test_other_errors_are_not_retried():
    job = Job(room=0, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        retry_on_oom(job, job.compute)
    assert len(job.seen) == 1 and not job.events


def test_what_ended_a_run_is_explained_in_one_line():
    assert all(map(out_of_memory, WORDS.values()))
    assert not out_of_memory(ValueError("out of memory"))
    assert explain(RunFailed("what helps: a lower --peak_lr")) == "what helps: a lower --peak_lr"
    assert "--n_embd" in explain(MemoryError())
    assert "No space left" in explain(OSError(28, "No space left on device"))
    assert "the same command resumes" in explain(OSError(5, "Input/output error"))
    assert "DataLoader worker" in explain(ConnectionResetError(104, "Connection reset by peer"))
    assert explain(TypeError("unsupported operand")) is None
