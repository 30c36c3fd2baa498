"""Which checkpoint a run starts from, by --resume and by what its folder holds."""

from pathlib import Path

from plumbing import checkpoints, identity
from plumbing.configurator import fail
from plumbing.console import shown
from plumbing.files import read_json
from plumbing.ranks import from_rank0, say


def find_checkpoint(folder, resume):
    """Path of the checkpoint to start from, or None for a new run. Rank 0 only.

    folder: a RunFolder, which is locked where it holds a run. resume: "auto", "never" or a path.
    Exits with 2 where the two do not fit together, or no checkpoint can be read.
    """
    try:
        if not folder.holds_run():
            return None if resume in ("auto", "never") else seed(folder, resume)
        folder.hold()
        if resume == "never":
            fail(
                f"--resume=never, and {folder.path} holds a run; write --out_dir={folder.fresh_name()}"
            )
        path = checkpoints.newest_valid(folder.path)
        if path:
            refuse_another_seed(folder, path, resume)
            refuse_an_old_format(folder, path)
            return path
        if folder.holds_steps() or any(folder.path.glob("*.corrupt")):
            fail(
                f"{folder.path} holds a run, but no checkpoint that can be read; to start again write"
                f" --out_dir={folder.fresh_name()}"
            )
        # stopped before its first step was saved
        return None if resume == "auto" else seed(folder, resume)
    except OSError as error:  # in reading: not damage, so nothing is renamed
        place = shown(error.filename or folder.path)
        fail(f"{place} cannot be read ({error.strerror}); it may be whole, and stays as it is")


def seed(folder, path):
    """The path of another run's checkpoint, which has been verified."""
    try:
        checkpoints.load(path)
        refuse_an_old_format(folder, Path(path))
        return Path(path)
    except (checkpoints.Damaged, FileNotFoundError, IsADirectoryError) as error:
        reason = getattr(error, "strerror", None) or error
        fail(f"--resume={path}: {reason}; expected auto, never or the path of a checkpoint")


def refuse_another_seed(folder, path, resume):
    """A run goes its own way: another checkpoint than the one it began from starts a run of its own."""
    if resume == "auto":
        return
    began_from = checkpoints.load(path, verify=False)["run"].get("began_from")
    if began_from != str(Path(resume).resolve()):
        seed(folder, resume)  # says so where it is no checkpoint at all
        began = f"began from {shown(began_from)}" if began_from else "began from no checkpoint"
        fail(
            f"--resume={resume}: {folder.path} holds a run that {began}; to resume it leave out "
            f"--resume, to start from that file write --out_dir={folder.fresh_name()}"
        )


def refuse_an_old_format(folder, path):
    if "sequences" not in checkpoints.load(path, verify=False)["state"]:
        commit = read_json(path.parent / "run.json").get("git", {}).get("commit")
        ours = path.parent.resolve() == folder.path.resolve()
        other = f"write --out_dir={folder.fresh_name()}" if ours else "leave out --resume"
        fail(
            f"{shown(path)} was written by an older train.py (commit {commit or 'unknown'}), which counted "
            f"batches; check out that commit to resume it, or {other}"
        )


def admit(run, path, saved):
    """Exits with 2 where `run` is not the run of the checkpoint; else continues its micro-batches."""
    then = saved["run"]
    now = run.facts["run"]
    fresh_name = from_rank0(run.folder.fresh_name)
    identity.refuse_another_run(then, now, fresh_name)
    identity.refuse_other_shapes(saved["model"], run.model.state_dict(), fresh_name)
    is_seed = path.parent.resolve() != run.folder.path.resolve()
    now["began_from"] = str(path.resolve()) if is_seed else then.get("began_from")
    if now["batch_size"] == then["batch_size"]:
        run.state.update({key: saved["state"][key] for key in checkpoints.MICRO_BATCHES})


def is_finished(folder, path, saved, config, max_steps, patience):
    """Whether the run has no step left to take, which is then printed.

    Exits with 2 where it was asked for anything else.
    """
    state = saved["state"]
    if state["step"] < max_steps and not (patience and state["evals_since_best"] >= patience):
        return False
    more = "raise --max_steps" if state["step"] >= max_steps else "raise --patience"
    if path.parent.resolve() != folder.path.resolve():
        fail(f"{shown(path)} is at step {state['step']:,} of --max_steps={max_steps}; {more}")
    new = identity.changed_knobs(saved["config"], config)
    new = {knob: pair for knob, pair in new.items() if knob not in identity.FREE}
    if new:
        words = ", ".join(
            f"{knob} was {then} and is {now} now" for knob, (then, now) in new.items()
        )
        fail(
            f"{folder.path} holds a finished run: {words}; for a run with that write "
            f"--out_dir={folder.fresh_name()}, to train this one longer {more}"
        )
    say(
        f"{folder.path} is finished: {state['step']:,} steps, best validation loss "
        f"{state['best_val_loss']:.4f} at step {state['best_step']:,}. To train longer, {more}; to "
        f"start again, write --out_dir={folder.fresh_name()}"
    )
    return True
