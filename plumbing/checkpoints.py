"""Checkpoint files: load, verify, fall back to an older one, write in the background, prune."""

import contextlib
import copy
import errno
import math
import os
import re
import shutil
import threading
import time
import zipfile
from functools import partial

import torch

from plumbing import ranks, rng
from plumbing.devices import copies_in_background, synchronize
from plumbing.failures import RunFailed, out_of_memory
from plumbing.files import fsync, replacing
from plumbing.nested import clone, leaves, mapped, tensors
from plumbing.restorable import not_restorable, refuse_unequal_replicas

PARTS = ("model", "optimizer", "scaler", "ema", "state", "rng", "config", "data", "run")
MICRO_BATCHES = ("micro_batch", "eval_micro_batch")  # keys of the state


class Damaged(ValueError):
    """The file is not a checkpoint, or was damaged after writing. The message is one line."""


def file_name(step):
    return f"ckpt_{step:08}.pt"


def step_of(path):
    return int(path.stem.split("_")[1])


# ---- reading -------------------------------------------------------------------------------------


def load(path, verify=True, mmap=True):
    """Load the checkpoint at `path` on the CPU, memory-mapped if `mmap`. No code in it can run.

    verify: first read the whole file and compare the zip's checksums, because torch.load loads a
    flipped bit without an error. Raises Damaged, or OSError if the file cannot be read.
    """
    try:
        if verify:
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise Damaged(f"wrong checksum in {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if missing := set(PARTS) - set(checkpoint):
            raise Damaged(f"lacks {', '.join(sorted(missing))}")
        if not isinstance(checkpoint["state"].get("step"), int):
            raise Damaged("its state has no step")
        return checkpoint
    except Exception as error:  # damage surfaces as any of half a dozen types
        for cause in (error, error.__context__):  # zipfile raises BadZipFile for a failed read
            if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                cause.filename = str(path)
                raise cause from None
        no_mmap = "unable to mmap" in str(error) or isinstance(error, UnicodeError)
        if mmap and no_mmap:  # some file systems cannot, nor can torch if the name is not UTF-8
            return load(path, verify=False, mmap=False)
        if out_of_memory(error) or isinstance(error, Damaged):
            raise
        raise Damaged((str(error) or type(error).__name__).splitlines()[0][:120]) from error


def numbered(folder, kind):
    """Paths of all KIND_STEP.pt in `folder`, newest first. Files with other names are ignored."""
    paths = (path for path in folder.glob(f"{kind}_*.pt") if path.stem[len(kind) + 1 :].isdecimal())
    return sorted(paths, key=step_of, reverse=True)


def newest_first(folder):
    """Paths of the checkpoints in `folder`, in the order in which a resume tries them."""
    return [*numbered(folder, "ckpt"), *numbered(folder, "milestone"), *folder.glob("best.pt")]


def newest_valid(folder, usable=lambda step, state: True):
    """Path of the newest undamaged checkpoint for which usable(step, state) is true, or None.

    Damaged ones are renamed to NAME.pt.corrupt. A file that cannot be read raises OSError instead.
    """
    for path in newest_first(folder):
        try:
            state = load(path)["state"]
            if usable(state["step"], state):
                return path
        except Damaged as error:
            aside = path.with_name(path.name + ".corrupt")
            ranks.say(
                f"{path.name} is damaged ({error}): set aside as {aside.name}; trying older ones"
            )
            with contextlib.suppress(OSError):  # a folder that has become read-only
                os.replace(path, aside)
    return None


def remove_after(folder, step):
    """Remove each ckpt_STEP.pt later than `step`. Milestones and best.pt stay."""
    for path in numbered(folder, "ckpt"):
        if step_of(path) > step:
            remove(path)


def remove(path):
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        ranks.say(f"{path.name} cannot be removed ({error.strerror})")


def own_part(weights, leaf, path):
    """Copy `leaf`, at `path` in an optimizer's state, out of the memory-mapped file. For a sharded
    weight, only this rank's rows are read."""
    mine = ranks.shard_like(weights[path[0]], leaf) if isinstance(path[0], int) else leaf
    return clone(leaf) if mine is leaf else mine


def differs(one, other):
    return repr(one) != repr(other)  # not by !=, which tensors answer by a tensor


def on_devices_of(now, saved):
    """`saved`, each of its tensors on the device of the one at the same path in `now`."""
    devices = {path: leaf.device for path, leaf in leaves(now) if isinstance(leaf, torch.Tensor)}
    return mapped(lambda leaf, path: leaf.to(devices[path]) if path in devices else leaf, saved)


@torch.no_grad()
def restore(run, checkpoint):
    """Restore `run` from a result of run.checkpoint(), sharded or not. These stay: micro-batches,
    optimizer settings whose knobs changed, and the RNG state if the number of ranks changed."""
    here = run.model.state_dict()
    run.model.load_state_dict(
        mapped(lambda w, path: ranks.shard_like(here.get(path[0]), w), checkpoint["model"])
    )
    optimizers = zip(run.optimizers, run.groups, checkpoint["optimizer"], strict=True)
    for optimizer, built, saved in optimizers:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        moments = mapped(partial(own_part, weights), saved["state"])
        own = [(weights[i], each) for i, each in moments.items() if isinstance(i, int)]
        groups = [  # as saved, except for the values that changed knobs now build differently
            group | {k: v for k, v in now.items() if k not in group or differs(then.get(k, v), v)}
            for now, then, group in zip(built, saved["built"], saved["param_groups"], strict=True)
        ]
        own_keys = {key: clone(saved[key]) for key in saved if key not in ("state", "built")}
        optimizer.load_state_dict(own_keys | {"state": moments, "param_groups": groups})
        for weight, each in own:  # torch casts tensors to the weight's dtype, and garbles a str
            optimizer.state[weight] = on_devices_of(optimizer.state[weight], each)
    run.scaler.load_state_dict(checkpoint["scaler"])
    averages = checkpoint["model"] | checkpoint["ema"]
    for name, average in run.ema.items():
        average.copy_(ranks.shard_like(average, averages[name]))
    micro_batches = {key: run.state[key] for key in MICRO_BATCHES}
    run.state.update(clone(checkpoint["state"]) | micro_batches)
    if len(checkpoint["rng"]) == ranks.world_size():
        rng.set_rng_state(checkpoint["rng"][ranks.rank()], run.device)


# ---- writing -------------------------------------------------------------------------------------


class Saver:
    """Writes checkpoints in a thread: the loop waits for the previous save and a copy in memory.

    keep_last: number of checkpoints to keep for which may_roll_back_to(step, state) is true.
    """

    def __init__(self, run, keep_last, may_roll_back_to):
        self.run = run
        self.folder = run.folder.path
        self.keep_last = keep_last
        self.may_roll_back_to = may_roll_back_to
        self.buffers = {}  # path in a checkpoint -> CPU tensor, reused by the next save
        self.thread = None
        self.error = None  # of the newest save
        self.last_save = time.monotonic()

    def save(self, names, required=False):
        """Write one file under all of `names`, in this order. All ranks call it together.

        required: wait until it is on the disk; after three failed tries, raise RunFailed. Otherwise
        training continues at once, and the next call records an error as an event.
        """
        refuse_unequal_replicas(self.run)
        self.wait()
        checkpoint = mapped(self.on_host, self.run.checkpoint())
        if lost := not_restorable(checkpoint, "checkpoint"):
            raise RunFailed(
                f"{lost}; once that is fixed, the same command resumes from the newest checkpoint"
            )
        self.last_save = time.monotonic()
        for seconds in (0, 1, 2) if required else (0,):
            time.sleep(seconds)
            self.error = None
            if ranks.rank() == 0:
                synchronize(self.run.device)  # the copies to the host are asynchronous
                self.thread = threading.Thread(None, self.write, "writer", (checkpoint, names))
                self.thread.start()
            if not required:
                return
            self.wait()
            if not any(ranks.agree(self.error is not None)):
                return
        raise RunFailed(
            f"{names[-1]} could not be saved: {self.error}; once that is fixed, the same command "
            f"resumes from the newest checkpoint in {self.folder}"
        )

    def on_host(self, leaf, path):
        """Copy a leaf of a checkpoint. Rank 0 copies tensors to buffers that the next save reuses.
        All ranks call it together: a sharded tensor is gathered, one at a time."""
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        tensor = ranks.whole(leaf.detach())
        if ranks.rank() > 0:
            return None
        buffer = self.buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=copies_in_background(tensor.device))

    def minutes_since_save(self):
        return (time.monotonic() - self.last_save) / 60

    def wait(self):
        """Wait until the newest save has ended, and record its error, if any, as an event."""
        if self.thread:
            self.thread.join()
            if self.error:
                self.run.folder.event(self.run.state["step"], "save_failed", error=self.error)
        self.thread = None

    def write(self, checkpoint, names):
        try:
            weights = [checkpoint["model"].get(n) for n, _ in self.run.model.named_parameters()]
            if not all_finite([weights, checkpoint["optimizer"], checkpoint["ema"]]):
                raise ValueError("a weight or moment is not finite")
            folder = self.run.folder.mine()
            with contextlib.suppress(OSError):
                fsync(folder / "metrics.jsonl")  # rows reach the disk before the checkpoint
            with replacing(folder / names[0]) as temporary:
                torch.save(checkpoint, temporary)
            for name in names[1:]:
                with replacing(folder / name) as temporary:
                    try:
                        temporary.unlink()
                        os.link(folder / names[0], temporary)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(folder / names[0], temporary)
            self.prune(checkpoint["state"])
        except Exception as error:  # whatever it is, it must not end the run here
            self.error = (str(error) or type(error).__name__).splitlines()[0][:160]
            if re.search("inline_container|iostream", self.error):  # torch's for a failed write
                free = shutil.disk_usage(self.folder).free / 1e6
                self.error = f"a write failed, with {free:,.0f} MB of the disk free"
            ranks.say(f"could not save {names[-1]} ({self.error})")

    def prune(self, state):
        """Keep the newest ckpt_STEP.pt, and the newest `keep_last` that a rollback may use."""
        if state["skips_in_row"]:
            return  # a rollback cannot use this checkpoint, so it replaces none
        paths = numbered(self.folder, "ckpt")
        targets = [path for path in paths if self.may_roll_back_to(step_of(path), state)]
        for path in set(paths[1:]) - set(targets[: self.keep_last]):
            remove(path)


def all_finite(value):
    return all(tensor.isfinite().all() for tensor in tensors(value))


def size(run, needs):
    """Bytes of the tensors in a checkpoint, which holds all of the model even if it is sharded.

    needs: what memory.training_memory returned, for this rank's part and without offloaded tensors.
    """
    weights = sum(weight.nbytes for weight in run.model.parameters())
    moments = 2 * weights  # AdamW's, if `needs` does not say
    if needs["weights"] and needs["optimizer"] is not None:
        moments = math.ceil(weights * needs["optimizer"] / needs["weights"])
    return sum(each.nbytes for each in tensors([run.model.state_dict(), run.ema])) + moments
