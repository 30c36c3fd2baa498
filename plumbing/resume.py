"""Choose the checkpoint that a run starts from, by --resume and the content of its folder."""

from pathlib import Path

from plumbing import checkpoints, identity
from plumbing.configurator import fail
from plumbing.console import shown
from plumbing.files import read_json
from plumbing.ranks import say


def find_checkpoint(folder, resume):
    """Path of the checkpoint to start from, or None for a new run. Rank 0 only.

    folder: a RunFolder, which is locked if it holds a run. resume: "auto", "never" or a path. Exits
    with 2 if the two contradict each other, or no checkpoint can be read.
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
            # with neither of these, it stopped before its first save: nothing is lost
            if not path and (folder.holds_steps() or any(folder.path.glob("*.corrupt"))):
                fail(
                    f"{folder.path} holds a run, but no checkpoint that can be read; to start again "
                    f"write {folder.fresh_out_dir()}"
                )
        if resume not in ("auto", "never"):
            path = checkpoint_asked_for(folder, path, Path(resume))
        if path and "sequences" not in checkpoints.load(path, verify=False)["state"]:
            commit = read_json(path.parent / "run.json").get("git", {}).get("commit")
            other = f"write {folder.fresh_out_dir()}" if folder.owns(path) else "leave out --resume"
            fail(
                f"{shown(path)} was written by an older train.py (commit {commit or 'unknown'}), which "
                f"counted batches; check out that commit to resume it, or {other}"
            )
    except OSError as error:  # of a read: not damage, so nothing is renamed
        place = shown(error.filename or folder.path)
        fail(f"{place} cannot be read ({error.strerror}); it may be undamaged: it stays as it is")
    return path


def checkpoint_asked_for(folder, newest, asked):
    """The path for --resume=asked: `asked`, or `newest` if the run in `folder` began from `asked`.

    newest: the newest checkpoint in `folder`, or None. Exits with 2 if neither applies.
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


def continue_from(run, path, saved):
    """Exits with 2 if `saved` is of another run. Keeps its micro-batches if batch_size is equal."""
    identity.refuse_another_run(run, saved)
    then = saved["run"]
    now = run.facts["run"]
    now["began_from"] = then.get("began_from") if run.folder.owns(path) else str(path.resolve())
    if now["batch_size"] == then["batch_size"]:
        for key in checkpoints.MICRO_BATCHES:
            run.state[key] = saved["state"].get(key, run.state[key])


def is_finished(folder, path, saved, config, report):
    """Whether the run has no step left to take. If so, prints what to type to train longer.

    Exits with 2 if the command asks for anything other than the finished run.
    """
    state = saved["state"]
    step = state["step"]
    more = "raise --max_steps"
    if step < config["max_steps"]:
        if not 0 < config["patience"] <= state["evals_since_best"]:
            return False
        more = "raise --patience"
    if not folder.owns(path):
        fail(f"{shown(path)} is at step {step:,} of --max_steps={config['max_steps']}; {more}")
    others = [
        f"{knob} was {then} and is {now} now"
        for knob, (then, now) in identity.changed_knobs(saved["config"], config).items()
        if knob not in identity.FREE
    ]
    if others:
        fail(
            f"{folder.path} holds a finished run: {', '.join(others)}; for a run with that write "
            f"{folder.fresh_out_dir()}, to train this one longer {more}"
        )
    say(
        f"{folder.path} is finished: {step:,} steps, best validation loss "
        f"{state['best_val_loss']:.4f} at step {state['best_step']:,}. To train longer, {more}; to "
        f"start again, write {folder.fresh_out_dir()}"
    )
    folder.complete_end("finished", state, report)
    return True
