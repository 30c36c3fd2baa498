"""Checkpoint files: load, verify, fall back to an older one, restore, write in the background,
prune."""

import copy
import errno
import io
import os
import re
import shutil
import signal
import threading
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from plumbing import ranks
from plumbing.cli import RunFailed, fail
from plumbing.console import print0
from plumbing.files import replacing
from plumbing.fsdp import shard_like
from plumbing.out_of_memory import out_of_memory
from plumbing.snapshot import by_path, clone, leaves, mapped, set_rng_state, tensors

# The entries of a checkpoint on which the next steps depend
HASHED = ("model", "optimizer", "scaler", "ema", "state", "rng")
FORMAT = 2  # the entry `format` of a checkpoint
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ONCE_FIXED = "once that is fixed, the same command resumes from the newest checkpoint"
PAUSE = 5  # seconds between two tries of a save that is required
LIMIT = 60  # seconds of such tries; on a full disk they go on
LIMIT_AFTER_SIGNAL = 10


class Damaged(ValueError):
    """The file is not a checkpoint, or was damaged after writing. The message says what is wrong,
    in a few words."""


def file_name(step: int) -> str:
    return f"ckpt_{step:08}.pt"


def load(path: Path, verify: bool = True) -> dict:
    """Load the checkpoint at `path` on the CPU. No code in it can run.

    verify: first read the whole file and compare the zip's checksums, because torch.load loads a
    flipped bit without an error. Raises Damaged; OSError if the file cannot be read; BadInput if it
    is of another format.
    """
    try:
        if verify:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    raise zipfile.BadZipFile
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage surfaces as any of half a dozen types
        for cause in (error, error.__context__):  # zipfile raises BadZipFile for a failed read
            if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                cause.filename = str(path)
                raise cause from None
        if out_of_memory(error):
            raise
        raise Damaged("a checksum is wrong, it is cut off, or no checkpoint") from error
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        raise Damaged("it is no checkpoint of train.py")
    found = checkpoint.get("format", 1)
    if found != FORMAT:
        where = "check out the commit that its run.json names"
        fail(f"{path} has format {found}, and this code reads {FORMAT}; to use it, {where}")
    if step_of(path) not in (None, checkpoint["state"]["step"]):
        raise Damaged("its name has another step")
    return checkpoint


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint; None: best.pt, or a name that train.py does not give,
    such as ckpt_3.pt."""
    number = re.fullmatch(r"(?:ckpt|milestone)_(\d{8,})", path.stem)
    return number and int(number[1])


def numbered(folder: Path, kind: str) -> list[Path]:
    """Paths of all KIND_STEP.pt in `folder`, newest first."""
    paths = [path for path in folder.glob(f"{kind}_*.pt") if step_of(path) is not None]
    return sorted(paths, key=step_of, reverse=True)


def newest_first(folder: Path) -> list[Path]:
    """Paths of the checkpoints in `folder`, in the order in which a resume tries them."""
    return [*numbered(folder, "ckpt"), *numbered(folder, "milestone"), *folder.glob("best.pt")]


def newest_valid(folder: Path, set_aside: bool) -> Path | None:
    """Path of the newest undamaged checkpoint, or None. set_aside: if there is one, rename those on
    the way to it to NAME.pt.corrupt. A file that cannot be read raises OSError instead."""
    damaged = []
    for path in newest_first(folder):
        try:
            load(path)
        except Damaged as error:
            print0(f"{path.name} is damaged ({error}): an older checkpoint is tried")
            damaged.append(path)
            continue
        for bad in damaged if set_aside else ():
            os.replace(bad, bad.with_name(bad.name + ".corrupt"))
        return path
    return None


# ---- put back ------------------------------------------------------------------------------------


@torch.no_grad()
def restore(run, saved: dict) -> None:
    """Put back all that a checkpoint holds: weights, buffers, moments, scaler, averages, random and
    loop state. Of the loop's state, micro_batch stays as it is; so does the random state if it is
    of another number of ranks, and those settings of an optimizer whose knobs have changed."""
    here = run.model.state_dict()
    weights = mapped(lambda w, path: shard_like(here.get(path[0]), w), saved["model"])
    run.model.load_state_dict(weights)
    for name, weight in run.model.named_parameters():
        weight.requires_grad_(name not in saved["frozen"])
    for optimizer, built, own in zip(run.optimizers, run.groups, saved["optimizer"], strict=True):
        restore_optimizer(optimizer, built, own)
    averages = saved["model"] | saved["ema"]
    for name, average in run.ema.items():
        average.copy_(shard_like(average, averages[name]))
    run.scaler.load_state_dict(saved["scaler"])
    kept = run.state["micro_batch"]  # what fits into memory here does not depend on the checkpoint
    run.state.update(clone(saved["state"]) | {"micro_batch": kept})
    if len(saved["rng"]) == ranks.world_size():
        set_rng_state(saved["rng"][ranks.rank()], run.device)


def restore_optimizer(optimizer: torch.optim.Optimizer, built: list[dict], saved: dict) -> None:
    """Put back the state of an optimizer, and its groups. built: these as configure_optimizers
    made them for this process."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    owners = dict(enumerate(weights))  # the weight that a key of the optimizer's state stands for

    def own_part(leaf, path):
        owner = owners.get(path[0])
        part = clone(shard_like(owner, leaf))
        return part.to(owner.device) if owner is not None and torch.is_tensor(part) else part

    moments = mapped(own_part, saved["state"])
    groups = clone(saved["param_groups"])
    for now, then, group in zip(built, saved["built"], groups, strict=True):
        # a value that this process builds differently was changed by a knob: it stays as built
        group.update({k: v for k, v in now.items() if repr(then.get(k)) != repr(v)})
    own_keys = clone(saved | {"state": {}})
    optimizer.load_state_dict(own_keys | {"state": moments, "param_groups": groups})
    for i in owners.keys() & moments.keys():
        # load_state_dict casts to the weight's dtype, and garbles a str: put back what was saved
        optimizer.state[owners[i]].update(moments[i])


# ---- what a checkpoint cannot restore is refused, not lost on a resume ---------------------------


def refuse_what_is_lost(run, data: dict) -> None:
    """Raises BadInput if a resume could not restore the state of `run`, a weight it trains, or what
    open_dataset says of its data."""
    if lost := not_restorable({"FRESH_STATE": run.state, "data": data}):
        fail(lost)
    trained = {name for _, name in leaves(groups_of(run))}
    if None in trained:
        fail("an optimizer trains a weight that is not in model.parameters(): it would be lost")
    idle = {name for name, weight in run.model.named_parameters() if weight.requires_grad} - trained
    if idle:
        hint = "expected in a group, or frozen: requires_grad_(False)"
        fail(f"no optimizer trains {', '.join(sorted(idle))}; {hint}")


def not_restorable(value: Any) -> str | None:
    """What of `value` torch.load(weights_only=True) cannot read, in words, or None."""
    if is_restorable(value):
        return None
    odd = [f"{list(at)} is a {type(leaf)}" for at, leaf in leaves(value) if not is_restorable(leaf)]
    return f"checkpoints cannot restore what is no plain value: {'; '.join(odd)}"


def is_restorable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(mapped(lambda leaf, _: isinstance(leaf, torch.Tensor) or leaf, value), file)
        file.seek(0)
        torch.load(file, weights_only=True)
        return True
    except Exception:  # pickle and torch raise half a dozen types
        return False


def groups_of(run) -> list[list[list]]:
    """The names of the weights in each group of each optimizer; None for one that the model
    lacks."""
    names = {id(weight): name for name, weight in run.model.named_parameters()}
    return [
        [[names.get(id(weight)) for weight in group["params"]] for group in optimizer.param_groups]
        for optimizer in run.optimizers
    ]


def refuse_unequal_replicas(run) -> None:
    """Raises RunFailed if ranks differ in what a checkpoint keeps of rank 0 alone: weights and
    buffers that are not sharded, and the loop's state."""
    counters = "num_batches_tracked"  # of BatchNorm; ranks may take more micro-batches than others
    if ranks.world_size() == 1:
        return
    kept = by_path({**run.model.state_dict(), "FRESH_STATE": run.state})
    alike = [n for n in kept if not hasattr(kept[n], "to_local") and counters not in n]
    everyone = ranks.from_all_ranks({n: ranks.checksum(kept[n]) for n in alike})
    names = [n for n in alike if len({checksums[n] for checksums in everyone}) > 1]
    if names:
        raise RunFailed(
            f"at step {run.state['step']} the ranks hold different bits in {', '.join(names)}: a "
            "step must draw and add the same numbers on every rank; the newest checkpoint is "
            "from before"
        )


# ---- writing -------------------------------------------------------------------------------------


class Saver:
    """Writes checkpoints in a thread: the loop waits for the previous save and a copy in memory.
    keep_last: how many ckpt_STEP.pt stay, the newest ones."""

    def __init__(self, run, keep_last: int):
        self.run = run
        self.keep_last = keep_last
        self.groups = groups_of(run)  # a checkpoint with other groups could not be resumed
        self.thread = None  # that writes the newest save, on rank 0
        self.error = None  # that the newest save met
        self.is_retried = False  # whether the newest save has failed before
        self.unsaved_best = None  # the checkpoint of a best.pt that could not be written
        run.signals.newest_save = run.state["step"]

    def save(self, names: list[str], required: bool = False) -> None:
        """Write one file under all of `names`, ckpt_STEP.pt last: so a save that a kill interrupts
        is taken again, with the others, by the process that resumes. All ranks call it together.

        Training continues at once, and an error is an event; unless `required`: then it waits until
        the file is on the disk, on a full one until there is room, or Ctrl-C comes; an error that
        lasts raises RunFailed."""
        names = sorted(names, key=lambda name: name.startswith("ckpt_"))
        refuse_unequal_replicas(self.run)
        self.wait()
        checkpoint = mapped(on_host, self.run.checkpoint())
        lost = not_restorable(checkpoint)
        if checkpoint["groups"] != self.groups:
            lost = "an optimizer has other param_groups than configure_optimizers built"
        if lost:
            raise RunFailed(f"{lost}; {ONCE_FIXED}")
        self.is_retried = False
        began = time.monotonic()
        self.start_to_write(checkpoint, names)
        while required and ranks.from_rank0(self.must_try_again, names[-1], began):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # KeyboardInterrupt
            time.sleep(PAUSE)
            self.start_to_write(checkpoint, names)

    def start_to_write(self, checkpoint: dict, names: list[str]) -> None:
        if ranks.rank() == 0:
            self.thread = threading.Thread(None, self.write, "writer", (checkpoint, names))
            self.thread.start()

    def wait(self) -> Exception | None:
        """Wait until the newest save has ended. Returns its error, if any."""
        if self.thread:
            self.thread.join()
        return self.error

    def must_try_again(self, name: str, began: float) -> bool:
        """Whether `name` could not be saved, in tries that began at that time.monotonic(). Raises
        RunFailed, with the exit code of a signal that came, if the error lasts."""
        error = self.wait()
        stop = self.run.signals.stop
        limit = LIMIT_AFTER_SIGNAL if stop else LIMIT
        is_disk_full = getattr(error, "errno", None) in NO_ROOM
        if error and not is_disk_full and time.monotonic() - began > limit:
            newest = f"step {self.run.signals.newest_save:,} in {self.run.folder.path}"
            why = f"{name} could not be saved: {reason_of(error)}"
            failure = RunFailed(f"{why}; the newest checkpoint: {newest}; {ONCE_FIXED}")
            failure.exit_code = 128 + stop if stop else 1
            raise failure
        if is_disk_full and not self.is_retried:
            print0(
                f"waiting for {size(self.run) / 1e6:,.1f} MB on the disk to save {name}; tried "
                f"again every {PAUSE} s; Ctrl-C ends the run without it"
            )
        self.is_retried = True
        return error is not None

    def write(self, checkpoint: dict, names: list[str]) -> None:
        """Log the hash, write the files, and prune. Rows reach the disk before the checkpoint. An
        error is an event, and must not end the run here."""
        state = checkpoint["state"]
        if "best.pt" in names:
            self.unsaved_best = checkpoint
        self.error = None
        try:
            if not self.is_retried:
                self.announce(checkpoint, names)
            self.run.folder.log.sync()  # raises OSError if rows wait for the disk
            self.write_files(checkpoint, names)
            self.run.signals.newest_save = state["step"]
            if self.unsaved_best and self.unsaved_best is not checkpoint:
                self.write_files(self.unsaved_best, ["best.pt"])
            self.unsaved_best = None
            self.prune()
        except Exception as error:
            below = error.__context__  # torch wraps the error of the disk in one of its own
            self.error = below if isinstance(below, OSError) else error
            reason = reason_of(self.error)
            if not self.is_retried:
                self.run.folder.event(state["step"], "save_failed", file=names[-1], error=reason)

    def announce(self, checkpoint: dict, names: list[str]) -> None:
        """Log the hash of the save."""
        step = checkpoint["state"]["step"]
        digest = digest_of_state(checkpoint)
        due = {"evaluation_due": True} if checkpoint["state"]["evaluation_due"] else {}
        self.run.folder.record(step, "saved", sha256=digest, files=names, **due)

    def write_files(self, checkpoint: dict, names: list[str]) -> None:
        folder = self.run.folder.checked_path()
        with replacing(folder / names[0]) as temporary:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
        for name in names[1:]:
            with replacing(folder / name) as temporary:
                try:
                    os.link(folder / names[0], temporary)
                except OSError:  # a file system without hard links
                    shutil.copyfile(folder / names[0], temporary)

    def prune(self) -> None:
        for path in numbered(self.run.folder.path, "ckpt")[self.keep_last :]:
            path.unlink(missing_ok=True)


def on_host(leaf: Any, path: tuple) -> Any:
    """A copy of a leaf of a checkpoint, on rank 0 alone. All ranks call it together: sharded
    tensors are gathered, one at a time."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    tensor = ranks.full_tensor(leaf.detach())
    return tensor.to("cpu", copy=True) if ranks.rank() == 0 else None


def reason_of(error: Exception) -> str:
    """In words, on one line."""
    return getattr(error, "strerror", None) or repr(error)[:160]


def digest_of_state(checkpoint: dict) -> str:
    """SHA-256 of all that the next steps depend on, in the order of the names."""
    digest = sha256()
    for path, leaf in sorted(leaves({k: checkpoint[k] for k in HASHED}), key=lambda x: str(x[0])):
        digest.update(str(path).encode())
        digest.update(ranks.as_bytes(leaf))
    return digest.hexdigest()


def size(run) -> int:
    """Bytes of a checkpoint: weights, two moments of each, and averages, if there are any."""
    copies = 4 if run.ema else 3
    return copies * sum(tensor.nbytes for tensor in tensors(run.model.state_dict()))
