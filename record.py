"""What a run leaves behind: its folder and lock, run.json, metrics.jsonl, the files of checkpoints.

A reader of the training loop never needs to open this file; train.py says when, this says how.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import torch

import machine
from configurator import fail
from machine import rank, say, world_size
from model import training_memory

REPO = Path(__file__).resolve().parent


# What a resumed run may not change; what costs it its exactness; all the rest is free to change.
REFUSED = (
    "n_layer n_head n_embd block_size dropout label_smoothing seed optimizer schedule dtype "
    "global_batch dataset data"
).split()
INEXACT = (
    "torch device compile deterministic threads world_size batch_size accum_steps shard offload "
    "code"
).split()


# ---- run.json ------------------------------------------------------------------------------------


def now():
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def clean(value):
    """`value` as JSON can hold it: a non-finite float becomes None (json.dumps would write NaN)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path, value):
    """Write `value` so that `path` is at every moment either the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(clean(value), file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_json(path):
    """The dict in `path`, or {} where there is no readable one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def git_state():
    """{commit, dirty, diff_sha256} of the repository; the image has GIT_COMMIT in place of .git."""

    def git(*args):
        command = ["git", "-C", str(REPO), *args]
        return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").decode().strip()).resolve() != REPO:
            raise OSError("the .git above belongs to another project")
        diff = git("diff", "HEAD")
        commit = git("rev-parse", "HEAD").decode().strip()
        return {"commit": commit, "dirty": bool(diff), "diff_sha256": sha256(diff)}
    except (OSError, subprocess.SubprocessError):
        commit = os.environ.get("GIT_COMMIT")
        return {"commit": commit, "dirty": None, "diff_sha256": None}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def code_fingerprint():
    """SHA-256 of the two files that decide what a run computes."""
    return {name: sha256((REPO / name).read_bytes()) for name in ("train.py", "model.py")}


# ---- metrics.jsonl -------------------------------------------------------------------------------


waiting = []  # lines that metrics.jsonl could not take yet


def write_rows(folder, rows):
    """Append to metrics.jsonl: one JSON object a line, a number that is not finite as null.

    Training does not stop where that cannot be done: it is said once, and the rows wait.
    """
    if rank() != 0:
        return
    for row in rows:
        finite = clean(row)
        waiting.append(json.dumps(finite if finite == row else finite | {"finite": False}) + "\n")
    del waiting[:-10_000]
    content = "".join(waiting).encode()
    try:
        with open(folder / "metrics.jsonl", "ab", buffering=0) as file:
            end = file.tell()
            if file.write(content) < len(content):  # a disk that is full takes half a line
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        waiting.clear()
    except OSError as error:
        say_once(f"metrics.jsonl cannot be written ({error.strerror}); training goes on without")


def say_once(message, said=set()):  # noqa: B006 (meant to last)
    if message not in said:
        said.add(message)
        say(message)


CALM = ("resume", "inexact_resume")  # events that are no trouble


def in_short(value):
    """What an event says, for the console: 4 digits, and of [then, now] what differs."""
    if isinstance(value, list) and len(value) == 2:
        then, now = value
        if isinstance(then, dict) and isinstance(now, dict):  # hashes of files
            return ", ".join(key for key in now if now[key] != then.get(key))
        return f"{then} -> {now}"
    return f"{value:.4g}" if isinstance(value, float) else value


def log_event(folder, step, event, **fields):
    """An event in metrics.jsonl and on the console."""
    details = "  ".join(f"{key} {in_short(value)}" for key, value in fields.items())
    words = wrapped(f"{event.replace('_', ' ')}: {details}", 8)
    say(f"{step:>7} {words if event in CALM else paint(words, 'red')}")
    write_rows(folder, [{"kind": "event", "step": step, "event": event, **fields}])


def cut_rows(path, step):
    """Drop train and eval rows past `step`, and a half-written last line; events all stay.

    Atomic, and it streams: a metrics file of a million lines needs no memory.
    """

    def stays(line):
        try:
            row = json.loads(line)
            return line.endswith("\n") and (row["kind"] == "event" or row["step"] <= step)
        except (ValueError, KeyError, TypeError):
            return False  # the line that a power cut tore

    waiting[:] = filter(stays, waiting)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w") as new:
            new.writelines(filter(stays, old))
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    except FileNotFoundError:
        pass
    except OSError as error:
        say_once(f"metrics.jsonl cannot be written ({error.strerror}); training goes on without")


# ---- what the numbers say ------------------------------------------------------------------------

TROUBLE = {
    "skips": "loss or gradient not finite, update after update",
    "zeros": "a gradient norm of exactly 0, update after update",
    "spike": "a loss spike",
}


def finish_rows(window, reports, seconds, tokens, run, max_flops, knobs):
    """Rows for metrics.jsonl of the steps in `window`, [(row so far, ...)], that took `seconds` in all.

    reports: what train_step returned for each. tokens: in one step. max_flops: peak of all devices,
    FLOP/s; NaN = unknown. knobs: the config.
    Returns (rows, trouble): `judge` objects to the last row, or trouble is None.
    """
    device, max_skipped = next(run.model.parameters()).device, knobs["max_skipped"]
    tokens_per_sec = len(window) * tokens / seconds
    common = {
        "step_ms": 1000 * seconds / len(window),
        "tokens_per_sec": tokens_per_sec,
        "mfu": run.model.flops_per_token() * tokens_per_sec / max_flops,
        "mem_gb": machine.memory_gb(device),
        "gpu_util": machine.gpu_util(device),
    }
    rows = []
    for (row, _), (loss, grad_norm, skipped) in zip(window, reports, strict=True):
        measured = {"loss": loss, "grad_norm": grad_norm, "skipped": int(skipped)}
        rows.append({"kind": "train"} | row | measured | common)
        trouble = judge(rows[-1], run.state, knobs)
        if skipped:
            log_event(run.folder, row["step"], "skipped", loss=loss, grad_norm=grad_norm)
        elif run.state["high_in_row"] == max_skipped:
            event = {"loss": loss, "first": run.state["first_loss"]}
            event["warning"] = f"above its first value for {max_skipped} steps; lower --peak_lr?"
            log_event(run.folder, row["step"], "diverging", **event)
        if trouble:
            return rows, trouble
    return rows, None


def judge(row, state, knobs):
    """Count what looks wrong in one finished step; returns the TROUBLE it amounts to, or None.

    It goes step by step, so that when the numbers are fetched (log_interval) changes nothing, and by
    numbers that are reduced, so that all ranks come to the same verdict.
    """
    loss, norm = row["loss"], row["grad_norm"]
    max_skipped, spike_sigma = knobs["max_skipped"], knobs["spike_sigma"]
    state["skipped"] += row["skipped"]
    state["skips_in_row"] = state["skips_in_row"] + 1 if row["skipped"] else 0
    state["zeros_in_row"] = state["zeros_in_row"] + 1 if norm == 0 else 0
    if row["skipped"]:
        return "skips" if state["skips_in_row"] >= max_skipped else None
    if state["zeros_in_row"] >= max_skipped:
        return "zeros"
    if state["first_loss"] == math.inf:
        state["first_loss"] = loss
    state["high_in_row"] = state["high_in_row"] + 1 if loss > state["first_loss"] else 0
    if spike_sigma:
        deviation, count = loss - state["loss_mean"], state["loss_count"]
        if count >= 50 and deviation > spike_sigma * math.sqrt(state["loss_var"]):
            return "spike"
        weight = max(0.01, 1 / (count + 1))
        state["loss_mean"] += weight * deviation
        state["loss_var"] = (1 - weight) * (state["loss_var"] + weight * deviation**2)
        state["loss_count"] += 1
    return None


def note_evaluation(val_loss, state, knobs):
    """Count what early stopping and the plateau rule look at. True where this is the best so far.

    The evaluation after the last step counts only where eval_interval asks for it: a run that is
    made longer afterwards must go the way of one that was long from the start.
    """
    best = val_loss < state["best_val_loss"]
    if best:
        state.update(best_val_loss=val_loss, best_step=state["step"])
    if not at_interval(state["step"], knobs["eval_interval"], state):
        return best
    if val_loss < state["loss_to_beat"] - knobs["min_delta"]:
        state.update(loss_to_beat=val_loss, evals_since_best=0, evals_on_plateau=0)
    else:
        state["evals_since_best"] += 1
        state["evals_on_plateau"] += 1
    if knobs["plateau_factor"] < 1 and state["evals_on_plateau"] >= knobs["plateau_patience"]:
        state.update(lr_factor=state["lr_factor"] * knobs["plateau_factor"], evals_on_plateau=0)
    return best


def diagnosis(trouble, recent, state):
    """Why going back cannot help, or has not helped, with the numbers of the `recent` rows."""
    bad = recent[-1]
    last = {k: " ".join(f"{row[k]:.3g}" for row in recent) for k in ("lr", "grad_norm", "loss")}
    return (
        f"{TROUBLE[trouble]}, at step {bad['step']} after {state['rollbacks']} rollbacks. The last "
        f"learning rates: {last['lr']}; gradient norms: {last['grad_norm']}; losses: {last['loss']}; "
        f"batches: {recent[0]['batch_index']} to {bad['batch_index']}. What helps: a lower --peak_lr, "
        f"more --warmup_steps, a smaller --grad_clip, --dtype=float32; then a new --out_dir"
    )


# ---- the folder ----------------------------------------------------------------------------------


def hold(folder, locks=[]):  # noqa: B006 (held for as long as the process lives)
    """Lock the folder of a run, so that no second one can start in it.

    lockf, not flock: it dies with its holder even while forked workers live on.
    """
    if locks:
        return
    try:
        locks.append(open(folder / ".lock", "a"))
        fcntl.lockf(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another run is at work in {folder}; write --out_dir={fresh_name(folder)}")
    except OSError as error:
        fail(f"{folder} cannot be written ({error.strerror}); write --out_dir=FOLDER")


def fresh_name(folder):
    """The first of NAME_2, NAME_3 ... beside the folder that is not there yet."""
    number = 2
    while (candidate := folder.with_name(f"{folder.name}_{number}")).exists():
        number += 1
    return shown(candidate)


def holds_rows(folder):
    """Did a run take a step here?"""
    try:
        with open(folder / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            return any('"kind": "train"' in line for line in file)
    except OSError:
        return False


def find_run(folder, resume, max_steps, patience):
    """The path of the checkpoint to go on from, or None. Rank 0 only: it takes the folder's lock."""
    held = any((folder / name).exists() for name in ("run.json", "metrics.jsonl"))
    held = held or any(folder.glob("*.pt"))
    fresh = fresh_name(folder)
    if held:
        hold(folder)
    if held and resume == "never":
        fail(f"--resume=never, and {folder} holds a run; write --out_dir={fresh}")
    if not held:
        if resume in ("auto", "never"):
            return None
        try:
            load_checkpoint(resume)
            return Path(resume)
        except ValueError as error:
            fail(f"--resume={resume}: {error}; expected auto, never or the path of a checkpoint")
    path, checkpoint = newest_valid(folder)
    if path is None:
        if holds_rows(folder) or any(folder.glob("*.corrupt")):
            fail(
                f"{folder} holds a run, but no checkpoint that can be read; to start afresh write "
                f"--out_dir={fresh}"
            )
        return None  # stopped before its first step
    state = checkpoint["state"]
    if state["step"] >= max_steps or patience and state["evals_since_best"] >= patience:
        say(
            f"{folder} is finished: {state['step']:,} steps, best validation loss "
            f"{state['best_val_loss']:.4f} at step {state['best_step']:,}. To go on, raise --max_steps;"
            f" to start afresh, write --out_dir={fresh}"
        )
        raise SystemExit(0)
    return path


def identity_of(knobs, data, device):
    """What makes a run this run and no other; it is kept in every checkpoint. data: name and
    fingerprint of what it learns."""
    here = {
        "global_batch": knobs["batch_size"] * knobs["accum_steps"] * world_size(),
        "dataset": data["name"],
        "data": data["fingerprint"],
        "torch": str(torch.__version__),
        "device": machine.device_name(device),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "code": code_fingerprint(),
    }
    return {key: here[key] if key in here else knobs[key] for key in REFUSED + INEXACT}


def compare(saved, now, folder):
    """Refuse what would make another run. Returns {key: [then, now]} of what else costs exactness."""
    then = saved["run"] | {key: saved["state"][key] for key in ("batch_size", "accum_steps")}
    changed = {key: [then.get(key), now[key]] for key in now if then.get(key) != now[key]}
    hints = {
        "global_batch": f"let --batch_size and --accum_steps make {then['global_batch']} again",
        "data": f"bring back the text that {then['dataset']} was",
    }
    for key in REFUSED:
        if key in changed:
            hint = hints.get(key, f"write --{key}={then.get(key)}")
            fail(
                f"{key} was {then.get(key)} in the run so far and is {now[key]} now: that is another run; "
                f"{hint} to go on, or write --out_dir={fresh_name(folder)}"
            )
    return changed


def compare_shapes(saved, now, folder):
    """Refuse a checkpoint of a model.py that named or shaped its weights in another way."""
    saved, now = ({k: list(w.shape) for k, w in weights.items()} for weights in (saved, now))
    for name in saved | now:
        then, here = saved.get(name, "absent"), now.get(name, "absent")
        if then != here:
            fail(
                f"{name} is {then} in the checkpoint and {here} in model.py: that is another model; "
                f"write --out_dir={fresh_name(folder)}"
            )


def bytes_to_keep(run, knobs):
    """What all the checkpoints that will be kept at one time take on the disk."""
    weights = sum(weight.nbytes for weight in run.model.parameters())
    moments = {"adamw": 2, "muon": 2, "momentum": 1, "sgd": 0}[knobs["optimizer"]]
    interval = knobs["milestone_interval"]
    milestones = knobs["max_steps"] // interval if interval else 0
    files = knobs["keep_last"] + milestones + 3  # best.pt, the newest, and the one being written
    return files * weights * (1 + moments + bool(run.ema))


def open_run(run, fixed, device, path, inexact):
    """Make the folder and its run.json, or add an entry for this resume from `path`. Rank 0 only.

    fixed: config, data and identity of the run. Exits where its checkpoints would not fit on the disk.
    """
    folder, needed = run.folder, bytes_to_keep(run, fixed["config"])
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        ours = [file.stat() for kind in ("*.pt", "*.tmp") for file in folder.glob(kind)]
        free = shutil.disk_usage(there).free  # and what lies there already, each inode once
        free += sum({stat.st_ino: stat.st_size for stat in ours}.values())
        if free < needed:
            fail(
                f"{folder} has {free / 1e6:,.0f} MB free, and the checkpoints of this run need"
                f" {needed / 1e6:,.0f}; free some, or write --keep_last=1 or --out_dir=FOLDER"
            )
        folder.mkdir(parents=True, exist_ok=True)
        hold(folder)
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        before = read_json(folder / "run.json") if path else {}
        resumes = before.get("resumes", [])
        step = -1  # not even the evaluation before the first step
        if path:
            step = load_checkpoint(path)["state"]["step"]
            resumes.append({"time": now(), "step": step, "from": str(path), "inexact": inexact})
        cut_rows(folder / "metrics.jsonl", step)
        facts = {
            "start": before.get("start", now()),
            "end": None,
            "ended": None,  # stays so where nobody was left to say how
            "command": sys.argv,
            **fixed,
            "git": git_state(),
            **machine.fingerprint(device),
            "resumes": resumes,
        }
        write_json(folder / "run.json", facts)
    except OSError as error:
        fail(f"{folder} cannot be written ({error.strerror}); write --out_dir=FOLDER")
    if fixed["config"]["wandb_log"]:
        start_sender(folder)


def close_run(folder, ended, seconds, state, with_report):
    """Say how the run ended, and what to do next: on the console, in metrics.jsonl and in run.json.

    ended: None where an error in the program is on its way out. with_report: draw report.png too.
    """
    ended, step = ended or "failed: an error in the program", state["step"]
    write_rows(
        folder,
        [{"kind": "event", "step": step, "event": "end", "ended": ended, "seconds": seconds}],
    )
    try:
        facts = {"end": now(), "ended": ended, "seconds": seconds, "state": state}
        write_json(folder / "run.json", read_json(folder / "run.json") | facts)
    except OSError as error:
        say(f"run.json cannot be written ({error.strerror})")
    if ended.startswith("failed"):
        line = f"{Path(sys.argv[0]).name}: {ended}"
        print(paint(line, "red", sys.stderr), file=sys.stderr)
    else:
        best = f"{state['best_val_loss']:.4f} at step {state['best_step']:,}"
        say(f"{ended} at step {step:,}; best validation loss {best}")
    spent = ", ".join(f"{kind} {value:.1f}" for kind, value in seconds.items())
    say(f"{sum(seconds.values()):.1f} s: {spent}")
    if ended.startswith(("stopped by", "left")):
        say(
            f"{shown(folder / checkpoint_name(step))} is kept; to go on, type the same command again"
        )
    if with_report:
        import report  # here: it takes a second to load what draws

        say("\n".join(map(shown, report.write_report(folder))))
    print_next(folder, ended)
    if sender:
        finish_sender(folder, sender.pop())


def forget_after(folder, step):
    """Remove what a rollback to `step` has undone: the future of a run that is no more."""
    try:
        for path in folder.glob("ckpt_*.pt"):
            if step_of(path) > step:
                path.unlink()
    except OSError as error:
        say(f"{path.name} is undone, and cannot be removed ({error.strerror})")
    cut_rows(folder / "metrics.jsonl", step)


sender = []  # the process that copies the rows to wandb, where it was asked for


def start_sender(folder):
    """Start to_wandb.py beside the run: in a session of its own, so that no Ctrl-C reaches it, and
    with a pipe that ends when this process does."""
    command = [sys.executable, str(REPO / "to_wandb.py"), str(folder), "--follow"]
    try:
        sender.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    except OSError as error:
        say(f"wandb    failed ({error.strerror}); training goes on without it")


def finish_sender(folder, process, seconds=30):
    """Let it send the last rows. Where that takes too long, it is ended: the rows are here anyway."""
    process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode < 0:
        say(f"wandb    was cut off; python to_wandb.py {folder} sends the rest")


def process_age():
    """Seconds since this process began, imports and all; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return 0.0


class Clock:
    """Every second since the start belongs to one kind: lap(kind) gives it all since the last lap."""

    def __init__(self):
        self.last = time.perf_counter() - process_age()
        self.seconds = dict.fromkeys(("start", "compile", "train", "evaluate", "save"), 0.0)

    def lap(self, kind):
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        self.seconds[kind] += elapsed
        return elapsed


# ---- the files of checkpoints --------------------------------------------------------------------


def checkpoint_name(step):
    return f"ckpt_{step:08}.pt"


def step_of(path):
    return int(path.stem.split("_")[1])


def load_checkpoint(path):
    """The checkpoint at `path`, on the CPU. Raises ValueError with the reason where it is no good.

    The zip's checksums are read first: torch.load accepts a flipped bit without a word. Nothing in
    the file can run code (weights_only).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum in {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"model", "optimizer", "scaler", "ema", "state", "rng", "config", "data", "run"}
        if missing := missing - set(checkpoint):
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        if not all(isinstance(value, int | float) for value in checkpoint["state"].values()):
            raise ValueError("its state is not one of numbers")
        return checkpoint
    except Exception as error:  # damage surfaces as any of half a dozen types
        if machine.out_of_memory(error):
            raise
        raise ValueError((str(error) or type(error).__name__).splitlines()[0][:120]) from error


def newest_valid(folder, usable=lambda checkpoint: True):
    """(path, checkpoint) of the newest good one, or (None, None). Damaged ones are set aside, by name."""
    paths = sorted(folder.glob("ckpt_*.pt"), key=step_of, reverse=True)
    paths += sorted(folder.glob("milestone_*.pt"), key=step_of, reverse=True)
    for path in [*paths, *folder.glob("best.pt")]:
        try:
            checkpoint = load_checkpoint(path)
        except ValueError as error:
            aside = path.with_name(path.name + ".corrupt")
            say(f"{path.name} is damaged ({error}): set aside as {aside.name}, trying an older one")
            with contextlib.suppress(OSError):  # a folder that has become read-only
                os.replace(path, aside)
            continue
        if usable(checkpoint):
            return path, checkpoint
    return None, None


def copy_tensors(value, buffers, place=""):
    """`value` with each tensor copied into a CPU buffer that is kept for the next time (by place).

    All ranks call it together: what is sharded is gathered, one tensor at a time. Rank 0 has the copy.
    """
    if isinstance(value, torch.Tensor):
        value = machine.whole(value)
        if rank() > 0:
            return None
        buffer = buffers.get(place)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            buffers[place] = buffer
        return buffer.copy_(value, non_blocking=True)
    if isinstance(value, dict):
        return {k: copy_tensors(v, buffers, f"{place}/{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [copy_tensors(v, buffers, f"{place}/{i}") for i, v in enumerate(value)]
    return value


class Saver:
    """Writes checkpoints in a thread of its own: the loop pays for a copy in memory and no more."""

    def __init__(self, folder, keep_last, save_interval):
        self.folder, self.keep_last, self.save_interval = folder, keep_last, save_interval
        self.buffers, self.thread, self.error = {}, None, None

    def save(self, checkpoint, names):
        """Begin to write one file under all of `names`. Returns why the save before this failed."""
        error = self.join()
        copy = copy_tensors(checkpoint, self.buffers)
        if rank() > 0:
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.thread = threading.Thread(target=self.write, args=(copy, names), name="writer")
        self.thread.start()
        return error

    def join(self):
        """Wait for the save under way. Returns why the last one failed, or None."""
        if self.thread:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        return error

    def write(self, checkpoint, names):
        temporary = self.folder / (names[0] + ".tmp")
        try:
            if not all(all_finite(checkpoint[part]) for part in ("model", "optimizer", "ema")):
                raise ValueError("a weight or moment is not finite")
            with contextlib.suppress(OSError):
                sync(self.folder / "metrics.jsonl")  # its rows come to the disk first
            open(temporary, "wb").close()  # says why where it cannot; torch.save would not
            torch.save(checkpoint, temporary)
            sync(temporary)
            for name in names[1:]:
                link = self.folder / (name + ".tmp")
                link.unlink(missing_ok=True)
                try:
                    os.link(temporary, link)
                except OSError:  # a file system without hard links
                    shutil.copyfile(temporary, link)
                    sync(link)
                os.replace(link, self.folder / name)
            os.replace(temporary, self.folder / names[0])
            sync(self.folder)
            self.prune(checkpoint["state"])
        except Exception as error:  # whatever it is, training goes on
            self.error = (str(error) or type(error).__name__).splitlines()[0][:160]
            if "inline_container" in self.error:  # torch's words for a write that came to nothing
                free = shutil.disk_usage(self.folder).free / 1e6
                self.error = f"a write failed, with {free:,.0f} MB of the disk free"
            print(f"could not save {names[0]} ({self.error}); training goes on", flush=True)
            for name in names:
                with contextlib.suppress(OSError):
                    (self.folder / (name + ".tmp")).unlink(missing_ok=True)

    def prune(self, state):
        """Keep the newest of all, and of those a rollback may go to the newest `keep_last`."""
        if state["skips_in_row"]:
            return  # the newest is none of those
        paths = sorted(self.folder.glob("ckpt_*.pt"), key=step_of)
        targets = [p for p in paths if at_interval(step_of(p), self.save_interval, state)]
        for path in set(paths[:-1]) - set(targets[-self.keep_last :]):
            path.unlink(missing_ok=True)


def at_interval(step, interval, state):
    """Is a save due by the step alone? Only there may a rollback go: when a signal or the clock asks
    for a save is chance, and chance must not decide what a run computes."""
    return step == state["first_step"] or (interval > 0 and step % interval == 0)


def all_finite(value):
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(all_finite, items))


def sync(path):
    """Have the disk hold what was written to a file, or the names in a folder."""
    if path.exists():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- the console ---------------------------------------------------------------------------------

STYLES = {"dim": 2, "red": 31, "green": 32}


def paint(words, style, stream=None):
    """`words` in colour, where a person looks at a terminal that has any (https://no-color.org)."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return words if plain or not stream.isatty() else f"\033[{STYLES[style]}m{words}\033[0m"


def shown(path):
    """The path as a person would type it here."""
    return min(os.path.relpath(path), str(path), key=len)


def wrapped(words, indent):
    """`words` in lines of 80, all but the first indented; a path or flag is never torn apart."""
    blank = " " * indent
    looks = {"initial_indent": blank, "subsequent_indent": blank, "break_long_words": False}
    return textwrap.fill(words, 80, break_on_hyphens=False, **looks)[indent:]


def say_fact(name, words):
    """A line of the header, such as `batch    32 x 1 x 1 = ...`."""
    say(paint(f"{name:<8}", "dim"), wrapped(words, 9))


def fit(value, width, digits):
    """`value` in `width` characters: `digits` after the point, or as many as there is room for."""
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:{width}.0e}"
    texts = (f"{value:{width}.{places}f}" for places in range(digits, -1, -1))
    return next((text for text in texts if len(text) <= width), f"{value:{width}.0e}")


def rate(per_second):
    """Tokens a second in 6 characters: 853 is 0.853k, 1234567 is 1.235M."""
    letter, size = "k", 1e3
    for larger, its_size in (("M", 1e6), ("G", 1e9)):
        if per_second >= 0.99995 * its_size:
            letter, size = larger, its_size
    return fit(per_second / size, 5, 3) + letter


def duration(seconds):
    """Time in up to 8 characters: 0:46, 12:04:05, 12d 4h."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    days = hours // 24
    if days >= 1e7:
        return f"{days:.0e}d"
    if days >= 1000:
        return f"{days}d"
    if hours >= 100:
        return f"{days}d {hours % 24}h"
    clock = f"{minutes % 60:02}:{int(seconds) % 60:02}"
    return f"{hours}:{clock}" if hours else clock.removeprefix("0")


def progress(step, max_steps):
    width = max(7, len(str(max_steps)))
    return f"{step:>{width}}/{max_steps:<{width}}"


def print_header(max_steps):
    widths = {"loss": 6, "norm": 6, "lr": 8, "ms": 6, "wait": 5, "tok/s": 6, "mfu": 6, "GB": 5}
    names = " ".join(f"{name:>{width}}" for name, width in widths.items())
    start = f"{'step/total':<{len(progress(0, max_steps))}}"
    say(paint(f"{start} {names} {'left':>8}", "dim"))


def print_line(row, max_steps):
    mfu = "   n/a" if math.isnan(row["mfu"]) else fit(100 * row["mfu"], 5, 1) + "%"
    left = duration((max_steps - row["step"]) * row["step_ms"] / 1000)
    say(
        progress(row["step"], max_steps),
        fit(row["loss"], 6, 4),
        fit(row["grad_norm"], 6, 3),
        f"{row['lr']:8.2e}",
        fit(row["step_ms"], 6, 1),
        fit(row["data_ms"], 5, 1),
        rate(row["tokens_per_sec"]),
        mfu,
        fit(row["mem_gb"], 5, 2),
        f"{left:>8}",
    )


def print_evaluation(row, max_steps, best):
    say(
        f"{progress(row['step'], max_steps)} val loss {row['val_loss']:.4f}  bits/byte"
        f" {row['val_bpb']:.4f}  accuracy {row['val_accuracy']:.1%}"
        f"{paint('  best', 'green') if best else ''}"
    )


def print_plan(c, meta, model, epoch, device, why, peak, path):
    """What will happen, in a few aligned lines, before it does.

    c: config and identity. epoch: steps in one. why: {knob: reason}. peak: (FLOP/s or None, source).
    """
    tokens = c["global_batch"] * c["block_size"]
    steps = f"{c['max_steps']:,}, {epoch:,} to an epoch; {c['optimizer']}, {c['schedule']}"
    needs, free = memory_of_step(c, model, device), free_memory(device)
    memory = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in needs.items())
    memory = f"{sum(needs.values()) / 1e9:.3f} GB for a step ({memory})"
    if free:
        memory += f"; {free / 1e9:.1f} GB free"
    at_best = f"n/a ({peak[1]})"
    if peak[0]:
        work = model.flops_per_token() * tokens * c["max_steps"] / (peak[0] * c["world_size"])
        at_best = (
            f"{peak[0] / 1e12:.3g} TFLOP/s ({peak[1]}); all steps at that rate: {duration(work)}"
        )
    facts = {
        "run": f"goes on from {shown(path)}" if path else f"new, in {shown(c['out_dir'])}",
        "model": f"{c['n_layer']} x {c['n_embd']} wide, {c['n_head']} heads;"
        f" {model.num_params():,} parameters",
        "data": f"{c['dataset']}, {meta['tokenizer']}: {meta['train_tokens']:,} tokens to train on,"
        f" {meta['val_tokens']:,} to validate; vocabulary {meta['vocab_size']:,}",
        "batch": f"{c['batch_size']} x {c['accum_steps']} x {c['world_size']} = {c['global_batch']}"
        f" sequences of {c['block_size']} = {tokens:,} tokens a step",
        "steps": f"{steps} {c['peak_lr']:g} to {c['min_lr']:g}",
        "device": f"{c['device']}, {c['threads']} threads",
        "dtype": f"{c['dtype']} ({why['dtype']})",
        "compile": f"{str(c['compile']).lower()} ({why['compile']}); deterministic {str(c['deterministic']).lower()}",
        "peak": at_best,
        "memory": memory,
    }
    for name, words in facts.items():
        say_fact(name, words)
    if free and sum(needs.values()) > free:
        say(paint("         more than is free; --grad_checkpoint=true needs less", "red"))


def memory_of_step(c, model, device):
    """{kind: bytes} that the tensors of a training step take on one device, as model.py reckons them.

    Sharded, a device has its share of the rest, and at most one block's weights whole; offloaded,
    the host has that share, and on a GPU it is not counted.
    """
    knobs = (c["batch_size"], c["optimizer"], c["dtype"], c["grad_checkpoint"])
    needs = training_memory(model.config, *knobs, device.type)
    if c["shard"]:
        here = 0 if c["offload"] and device.type != "cpu" else 1 / c["world_size"]
        one_block = 4 * sum(weight.numel() for weight in model.blocks[0].parameters())
        shares = {kind: size * here for kind, size in needs.items() if kind != "activations"}
        needs |= shares | {"weights": shares["weights"] + one_block}
    return needs


def free_memory(device):
    """Bytes that a run could take on the device now, or None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def print_next(folder, ended):
    """What to type now, ready to be pasted."""

    def command(script):
        return shlex.join(["python", shown(REPO / script), shown(folder)])

    commands = {command("sample.py"): "text from its best weights"}
    commands[f"{command('report.py')} OTHER"] = "beside another run"
    if not ended.startswith(("finished", "stopped early")):
        commands = {command("report.py"): "what happened, as a picture and in words"}
        if world_size() == 1 and not ended.startswith("failed"):
            commands = {shlex.join(["python", *sys.argv]): "goes on"} | commands
    width = min(50, max(map(len, commands)))
    for line, what in commands.items():
        say(f"{line:<{width}}  {paint(f'# {what}', 'dim')}")


def print_sample(run, meta):
    """A little of what the model would write. It draws from a generator of its own."""
    import sample  # here, because only a run that gets this far needs it

    try:
        text = sample.sample_text(run.model, meta)
        say(f"\n{text.strip()}\n")
        row = {"kind": "event", "step": run.state["step"], "event": "sample", "text": text}
        write_rows(run.folder, [row])
    except Exception as error:  # a sample is never worth a run
        say(f"no sample ({error})")
