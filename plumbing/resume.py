"""May this run continue? What is known to have changed since its checkpoint, and is it finished?"""

import platform
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from plumbing import checkpoint
from plumbing.cli import Config, fail, product, show
from plumbing.console import REPO, best_words, shown
from plumbing.files import digests_by_name, read_json
from plumbing.machine import choose_dtype, device_name
from plumbing.ranks import say, world_size
from plumbing.run_folder import RunFolder
from plumbing.safe_step import leaves

# Knobs that are resolved once. A resume takes the checkpoint's values, unless the command asks for
# others.
KEPT = ("dtype", "compile", "batch_size", "accum_steps", "warmup_steps", "decay_steps")
SPLIT = {"batch_size", "accum_steps"}  # of the global batch, one as given with the other
ASKS_NOTHING = {"dtype": "auto", "compile": "auto", "decay_steps": 0}
# What a resume mentions, beside knobs and code, if it has changed
FACTS = ("torch", "python", "device", "threads", "ranks", "micro_batch", "git_commit")


# ---- what computes -------------------------------------------------------------------------------


def identity_of(config: Config, knobs: dict, data: dict, device: torch.device) -> dict:
    """What a checkpoint keeps as `run`: all knobs as resolved, and facts. knobs: globals of
    train.py. data: its facts["data"]."""
    return {name: knobs[name] for name in config.knobs} | {
        "written": {name: config.base[name] for name in KEPT},
        "global_batch": product(knobs, SPLIT) * world_size(),
        "dataset": data["name"],
        "data": data["fingerprint"],
        "files": digests_by_name(data.get("files", ())),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "code": own_code(),
    }


def own_code() -> dict[str, str]:
    """{name: hash of the bytes} of the loaded .py files in the repository, by their paths there,
    and of the script if it is elsewhere, as `__main__`."""
    found = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        is_own = path.is_relative_to(REPO) and "-packages" not in str(path)
        if path.suffix == ".py" and path.is_file() and (is_own or name == "__main__"):
            key = str(path.relative_to(REPO)) if is_own else name
            found[key] = sha256(path.read_bytes()).hexdigest()[:16]
    return found


def known_changes(then: dict, now: dict, knobs: dict) -> dict[str, list]:
    """{name: [then, now]} of what differs between two identities: knobs, facts, and .py files that
    both have loaded. This is information: nothing depends on it."""
    then, now = ({**each, "ranks": each["world_size"], **each["code"]} for each in (then, now))
    names = [name for name in knobs if not name.endswith("_dir") and name != "resume"]
    names = [name for name in (*names, *FACTS, *now["code"]) if name in then and name in now]
    return {name: [then[name], now[name]] for name in names if then[name] != now[name]}


# ---- rows that this resume computes again --------------------------------------------------------


def rows_of_course(rows: list[dict], run: Any) -> list[dict]:
    """Of `rows` past the checkpoint of `run`, with the `resume` events before and among them, the
    train and eval rows that were computed on today's course: with the same values of the knobs
    whose comments have no word."""
    now = run.facts["run"]
    course = [name for name, knob in run.knobs.items() if not knob.policy]
    writer = {"knobs": run.before, "changed": {}}  # the process that wrote the checkpoint
    first = next((row for row in rows if row["kind"] == "event"), writer)
    held = first["knobs"] | {name: then for name, (then, _) in first["changed"].items()}
    found = []
    for row in rows:
        if row["kind"] == "event":
            held = row["knobs"]
        elif all(held.get(name, now[name]) == now[name] for name in course):
            found.append(row)
    return found


# ---- may this run continue? ----------------------------------------------------------------------


def find_checkpoint(folder: RunFolder, resume: str) -> tuple[Path | None, list[Path]]:
    """(path of the checkpoint to start from or None for a new run, damaged files that are newer).
    Rank 0 only. resume: "auto", "never", "restart" or a path. Raises BadInput if it contradicts the
    folder."""
    path, damaged = None, []
    try:
        if folder.holds_run() and resume != "restart":
            if resume == "never":
                again = folder.fresh_out_dir()
                fail(f"--resume=never, and {folder.path} holds a run; write {again}")
            path, damaged = checkpoint.newest_valid(folder.path)
            if not path:
                refuse_lost_run(folder, damaged)
        if resume not in ("auto", "never", "restart"):
            path = checkpoint_asked_for(folder, path, Path(resume))
    except OSError as error:  # of a read: not damage, so nothing is renamed
        place = shown(error.filename or folder.path)
        fail(f"{place} cannot be read ({error.strerror}); it may be undamaged: it stays as it is")
    return path, damaged


def refuse_lost_run(folder: RunFolder, damaged: list[Path]) -> None:
    """Raises BadInput if the folder's run has trained, and has no checkpoint that can be read."""
    rows = folder.rows.read_text(errors="replace") if folder.rows.is_file() else ""
    if damaged or '"kind": "train"' in rows:
        found = f"the run in {folder.path} has no checkpoint that can be read"
        fail(f"{found}; to start again write --resume=restart or {folder.fresh_out_dir()}")


def checkpoint_asked_for(folder, newest: Path | None, asked: Path) -> Path:
    """The path for --resume=asked: `asked`, or `newest`, the newest in `folder`, if the run there
    began from `asked`. Raises BadInput if neither applies."""
    began_from = newest and checkpoint.load(newest, verify=False)["run"].get("began_from")
    if began_from == str(asked.resolve()):
        return newest
    if asked.is_dir():
        fail(f"--resume={asked} is a folder; for its best weights write --resume={asked}/best.pt")
    try:
        checkpoint.load(asked)
    except checkpoint.Damaged as error:
        fail(f"--resume={asked}: the file is damaged ({error}); write another checkpoint's path")
    except FileNotFoundError:
        fail(f"--resume={asked}: no such file; write auto, never, restart or a checkpoint's path")
    if newest:
        fail(
            f"--resume={asked}: {folder.path} holds a run that began from "
            f"{began_from or 'no checkpoint'}; to resume it leave out --resume, "
            f"to start from that file write {folder.fresh_out_dir()}"
        )
    return asked


def resolve_auto_knobs(
    config: Config, saved: dict | None, device: torch.device, own: bool
) -> tuple[dict, dict]:
    """({knob: value}, {knob: why}) of the knobs in KEPT: on a resume as in the checkpoint `saved`,
    unless the command asks for another value; else by the hardware and other knobs. A new run's
    `compile` is left to choose_compile(). own: whether the checkpoint is of the run's own
    folder."""
    kept = {name: config[name] for name in KEPT}
    reasons = {}
    if saved:
        then = saved["run"]
        asked = {name for name in KEPT if asks_for(name, config, saved)}
        if asked & SPLIT:
            asked |= SPLIT
        for name in set(KEPT) - asked:
            kept[name] = then[name]
            reasons[name] = "as in the run so far"
        if then["world_size"] != world_size() and not asked & SPLIT:
            kept |= split_global_batch(then)
        refuse_ended_schedule(config, then["decay_steps"], own)
    if "warmup_steps" not in reasons:
        kept["warmup_steps"] = min(kept["warmup_steps"], config["max_steps"])
    kept["decay_steps"] = kept["decay_steps"] or config["max_steps"]
    kept["dtype"], reason = choose_dtype(kept["dtype"], device)
    return kept, {"dtype": reason} | reasons


def asks_for(name: str, config: Config, saved: dict) -> bool:
    """Whether a command asks for another value of a knob than the run in checkpoint `saved` has: by
    a flag, or by an edited config file."""
    same = [ASKS_NOTHING.get(name)]
    if name not in config.typed:
        same.append(saved["run"]["written"][name])
    else:
        same.append(saved["run"][name])
        if name in SPLIT:  # other ranks may have split it anew
            same.append(saved["config"][name])
    return config[name] not in same


def refuse_ended_schedule(config: Config, planned: int, own: bool) -> None:
    """Raises BadInput if max_steps was raised past the end of a schedule as first planned."""
    more = config["max_steps"]
    if config["schedule"] in ("constant", "step") or config["decay_steps"] or more <= planned:
        return
    here = f"--out_dir={shown(config['out_dir'])} "
    again = ", or --resume=restart (this one is kept as NAME.old_1)"
    if not own:  # which leaves its folder empty
        here = again = ""
    fail(
        f"this run was planned for {planned:,} steps, where its learning rate ends; "
        f"for --max_steps={more} write {here}--decay_steps={more} (plan anew from here), "
        f"{here}--decay_steps={planned} (train on at the last rate){again}"
    )


def split_global_batch(then: dict) -> dict[str, int]:
    """The knobs in SPLIT that keep a run's global batch with today's number of ranks."""
    whole, count = then["global_batch"], world_size()
    rows, rest = divmod(whole, count)
    if rest:
        found = f"the {whole} sequences of this run's batch do not divide by {count} ranks"
        fail(f"{found}; expected a number of ranks that divides them")
    most = min(rows, then["batch_size"])
    micro = max(size for size in range(1, most + 1) if rows % size == 0)
    return {"batch_size": micro, "accum_steps": rows // micro}


def continue_from(run: Any, saved: dict, config: Config) -> None:
    """Raises BadInput if `saved` is of another run. Keeps its micro-batches if batch_size is
    equal."""
    own = run.folder.owns(run.path)
    then, now = saved["run"], run.facts["run"]
    for name, (was, new) in other_run(run, saved).items():
        found = f"{name} changed from {was} to {new}: this run cannot be resumed with that"
        again = run.folder.fresh_out_dir() if own else "no --resume"
        if name in saved["config"]:
            again += f" or, to resume, --{name}={show(was)}"
        fail(f"{found}; write {again}")
    step = saved["state"]["step"]
    if own and "max_steps" in config.typed and config["max_steps"] < step:
        found = f"--max_steps={config['max_steps']}: {shown(run.path)} is at step {step:,}"
        fail(f"{found}; expected no fewer, or {run.folder.fresh_out_dir()}")
    now["began_from"] = then.get("began_from") if own else str(run.path.resolve())
    if now["batch_size"] == then["batch_size"]:
        run.state["micro_batch"] = saved["state"]["micro_batch"]


def other_run(run: Any, saved: dict) -> dict[str, list]:
    """{name: [then, now]} of what makes `run` another one than that of the checkpoint `saved`: knobs
    whose comments say `fixed`, data, shapes of weights, the optimizers' groups."""
    facts = saved["run"], run.facts["run"]
    names = [name for name, knob in run.knobs.items() if knob.policy == "fixed"]
    names += ["global_batch", "data", "files"]
    if "portable" in [each["deterministic"] for each in facts]:
        names.append("deterministic")
    then, now = ({name: each.get(name) for name in names} for each in facts)
    then |= parts_of(saved["model"], saved["groups"])
    now |= parts_of(run.model.state_dict(), checkpoint.groups_of(run))
    found = {name: [then.get(name, "absent"), now.get(name, "absent")] for name in now | then}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def parts_of(weights: dict, groups: list) -> dict[str, Any]:
    """{name: shape} of the weights, and the place of each in the optimizers' groups: (optimizer,
    group, number)."""
    shapes = {name: [*getattr(weight, "shape", [])] for name, weight in weights.items()}
    return shapes | {f"the place of {name} in the groups": at for at, name in leaves(groups)}


def is_finished(run: Any) -> bool:
    """Whether the run has no step left to take: by max_steps, or by its own patience."""
    config, state = run.facts["config"], run.state
    out_of_patience = 0 < config["patience"] <= state["evals_since_best"]
    return state["step"] >= config["max_steps"] or out_of_patience


def close_finished(run: Any) -> None:
    """Say that a run is finished and what to type to train longer, and record its end if a kill
    came before that. Rank 0 only. Raises BadInput if the command asks for anything else than that
    run."""
    config, state = run.facts["config"], run.state
    step, name = state["step"], shown(run.folder.path)
    again = f"--resume=restart or {run.folder.fresh_out_dir()}"
    more = "raise --patience" if step < config["max_steps"] else "raise --max_steps"
    if not run.folder.owns(run.path):
        fail(f"{shown(run.path)} is at step {step:,} of --max_steps={config['max_steps']}; {more}")
    longer = f"to train it longer, {more} with --out_dir={name}"
    for knob, value in run.facts["run"].items():
        then = run.before.get(knob, value)
        if then != value and knob in run.knobs and run.knobs[knob].names_folder():
            fail(
                f"{name} holds a finished run: {knob} changed from {then} to {value}; "
                f"for a run with that write {again}; {longer}"
            )
    best = best_words(config["best_metric"], state)
    say(f"{name} is finished: {step:,} steps, {best}; {longer}; to start again, write {again}")
    run.folder.facts = read_json(run.folder.path / "run.json")
    if run.folder.facts.get("ended", "unknown") is None:
        run.folder.end("finished", None, state, config["report"])
