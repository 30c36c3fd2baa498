"""Which checkpoint a run starts from, by --resume and by what its folder holds."""

from pathlib import Path

from plumbing import checkpoints, identity
from plumbing.configurator import fail
from plumbing.console import shown
from plumbing.files import read_json
from plumbing.ranks import from_rank0, say


def find_checkpoint(folder, resume):
    """Path of the checkpoint to start from, or None for a new run. Rank 0 only.

    folder: a RunFolder, which is locked if it holds a run. resume: "auto", "never" or a path. Exits
    with 2 if the two do not fit together, or no checkpoint can be read.
    """
    path = None
    try:
        if folder.holds_run():
            folder.lock()
            if resume == "never":
                fail(
                    f"--resume=never, and {folder.path} holds a run; write {folder.fresh_out_dir()}"
                )
            path = checkpoints.newest_valid(folder.path)
            # with none of these it was stopped before its first save: nothing is lost
            if not path and (folder.holds_steps() or any(folder.path.glob("*.corrupt"))):
                fail(
                    f"{folder.path} holds a run, but no checkpoint that can be read; to start again "
                    f"write {folder.fresh_out_dir()}"
                )
        if resume not in ("auto", "never"):
            path = checkpoint_asked_for(folder, path, Path(resume))
        if path:
            refuse_an_old_format(folder, path)
    except OSError as error:  # in reading: not damage, so nothing is renamed
        place = shown(error.filename or folder.path)
        fail(f"{place} cannot be read ({error.strerror}); it may be whole, and stays as it is")
    return path


def checkpoint_asked_for(folder, newest, asked):
    """The path to start from for --resume=asked: `asked`, or `newest` of a run that began from it.

    newest: the newest checkpoint in `folder`, or None. Exits with 2 for a path that fits neither.
    """
    began_from = newest and checkpoints.load(newest, verify=False)["run"].get("began_from")
    if began_from == str(asked.resolve()):
        return newest
    try:
        checkpoints.load(asked)
    except (checkpoints.Damaged, FileNotFoundError, IsADirectoryError) as error:
        reason = getattr(error, "strerror", None) or error
        fail(f"--resume={asked}: {reason}; expected auto, never or the path of a checkpoint")
    if newest:
        began = f"began from {shown(began_from)}" if began_from else "began from no checkpoint"
        fail(
            f"--resume={asked}: {folder.path} holds a run that {began}; to resume it leave out "
            f"--resume, to start from that file write {folder.fresh_out_dir()}"
        )
    return asked


def refuse_an_old_format(folder, path):
    if "sequences" not in checkpoints.load(path, verify=False)["state"]:
        commit = read_json(path.parent / "run.json").get("git", {}).get("commit")
        other = f"write {folder.fresh_out_dir()}" if folder.owns(path) else "leave out --resume"
        fail(
            f"{shown(path)} was written by an older train.py (commit {commit or 'unknown'}), which counted "
            f"batches; check out that commit to resume it, or {other}"
        )


def admit(run, path, saved):
    """Exits with 2 unless `run` continues the run of the checkpoint; takes over its micro-batches."""
    then = saved["run"]
    now = run.facts["run"]
    fresh_out_dir = from_rank0(run.folder.fresh_out_dir)
    identity.refuse_another_run(then, now, fresh_out_dir)
    identity.refuse_other_shapes(saved["model"], run.model.state_dict(), fresh_out_dir)
    same_folder = run.folder.owns(path)
    now["began_from"] = then.get("began_from") if same_folder else str(path.resolve())
    if now["batch_size"] == then["batch_size"]:
        saved_state = saved["state"].items()
        run.state.update({k: v for k, v in saved_state if k in checkpoints.MICRO_BATCHES})


def is_finished(folder, path, saved, config, max_steps, patience):
    """Whether the run has no step left to take, which is then printed.

    Exits with 2 if the command asks for anything else than the run that is finished.
    """
    state = saved["state"]
    if state["step"] < max_steps and not (patience and state["evals_since_best"] >= patience):
        return False
    more = "raise --max_steps" if state["step"] >= max_steps else "raise --patience"
    if not folder.owns(path):
        fail(f"{shown(path)} is at step {state['step']:,} of --max_steps={max_steps}; {more}")
    changed = identity.changed_knobs(saved["config"], config)
    changed = [
        f"{knob} was {then} and is {now} now"
        for knob, (then, now) in changed.items()
        if knob not in identity.FREE
    ]
    if changed:
        fail(
            f"{folder.path} holds a finished run: {', '.join(changed)}; for a run with that write "
            f"{folder.fresh_out_dir()}, to train this one longer {more}"
        )
    say(
        f"{folder.path} is finished: {state['step']:,} steps, best validation loss "
        f"{state['best_val_loss']:.4f} at step {state['best_step']:,}. To train longer, {more}; to "
        f"start again, write {folder.fresh_out_dir()}"
    )
    return True
