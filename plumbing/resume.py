"""May this run continue? What is known to have changed since its checkpoint, and is it finished?"""

import copy
import math
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from plumbing import checkpoint, code
from plumbing.cli import Config, fail, product, show
from plumbing.console import best_words, change_words, print0, shown
from plumbing.data import Reader, to_device
from plumbing.fields import means_of, sets_of
from plumbing.files import digest_of, read_json
from plumbing.machine import choose_dtype, device_name
from plumbing.ranks import from_rank0, world_size
from plumbing.run_folder import RunFolder
from plumbing.snapshot import evaluating
from plumbing.witness import ResumeCheck

# Knobs that are resolved once, and the value that asks for nothing. A resume takes the checkpoint's
# values, unless the command asks for others.
KEPT = {"dtype": "auto", "compile": "auto", "warmup_steps": None, "decay_steps": 0}
PLACES = ("out_dir", "data_dir", "resume")  # knobs that a resume does not mention
# Facts that a resume mentions, beside knobs and code, if they have changed
FACTS = ("script", "torch", "python", "device", "threads", "ranks", "micro_batch", "git_commit")
# What a run has of its best evaluation, in its state
BEST = ("best_score", "best_val_loss", "best_step", "score_to_beat", "evals_since_best")


# ---- what computes -------------------------------------------------------------------------------


def identity(run: Any, config: Config, data: dict, saved: dict | None) -> dict:
    """What a run is, as its checkpoints say it: `config` (every knob as resolved), `data`, and `run`
    (what else its numbers depend on). data: what open_dataset says of it. saved: the checkpoint to
    resume from. Raises BadInput if a knob that a script has added bears the name of something
    else."""
    path = Path(config["init_from"])
    knobs = config.scopes[0][0]["ADDED_KNOBS"]
    more = {
        "written": {name: config.base[name] for name in KEPT},
        "dataset": data["name"],
        "data": data["fingerprint"],
        "rows": len(run.train_data),
        "files": sorted([Path(path).name, digest_of(path)] for path in data.get("files", ())),
        "init_sha256": digest_of(path) if path.is_file() else None,
        "began_from": run.path and str(run.path.resolve()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device_name(run.device),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "script": code.script_fact(),
        "code": code.loaded(),
        "added_knobs": {name: vars(knob) for name, knob in knobs.items()},
    }
    for name in knobs.keys() & {*more, *FACTS, *data}:
        fail(f"train.knob({name!r}, ...): run.json says something else under this name; rename it")
    if saved:
        more["init_sha256"] = saved["run"].get("init_sha256")
    if saved and run.folder.owns(run.path):
        more["began_from"] = saved["run"].get("began_from")
    return {"config": dict(config), "data": data, "run": more}


def facts(run: Any, is_compiled: bool) -> dict:
    """What the checkpoints and run.json say of a run from its warm-up pass on: its identity, whether
    it was compiled, and, on rank 0, the commit of the repository. Nothing changes it afterwards."""
    commit = run.folder.facts.get("git", {}).get("commit")
    return run.facts | {
        "config": run.facts["config"] | {"compile": is_compiled},
        "run": run.facts["run"] | {"git_commit": commit},
    }


def flat(facts: dict) -> dict:
    """The knobs as resolved, and what else the facts of a run, or a checkpoint, say, in one dict."""
    return facts["config"] | facts["run"]


def known_changes(then: dict, now: dict, knobs: dict) -> dict[str, list]:
    """{name: [then, now]} of what differs between two identities: knobs, facts, and .py files that
    both have loaded. This is information: nothing depends on it."""
    then, now = ({**each, "ranks": each["world_size"], **each["code"]} for each in (then, now))
    both = [name for name in (*knobs, *FACTS, *now["code"]) if name in then and name in now]
    changed = [name for name in both if then[name] != now[name] and name not in PLACES]
    return {name: [then[name], now[name]] for name in changed}


def changes_since(run: Any) -> dict[str, list]:
    """{name: [then, now]} of what is known to have changed since the checkpoint of `run`."""
    if not run.path:
        return {}
    now = flat(run.facts) | {"micro_batch": run.state["micro_batch"]}
    return known_changes(run.resumed_from, now, run.knobs)


def record_start(run: Any) -> None:
    """After the warm-up pass: write run.json, log from which checkpoint and with which knobs a run
    goes on, and compare its rows with those past that checkpoint. Rank 0 only."""
    run.folder.facts |= run.facts
    run.folder.write_facts()
    if run.path:
        changed = changes_since(run)
        fields = {"checkpoint": run.path.name, "knobs": run.facts["config"], "changed": changed}
        run.folder.record(run.state["step"], "resume", **fields)
        if run.folder.owns(run.path):
            run.hooks.append(ResumeCheck(run, changed))


def load_checkpoint(run: Any, saved: dict, fresh_state: dict, position: tuple) -> None:
    """Go on from the checkpoint `saved`. Of another run its weights go on, and of its state what
    `position` names: its course does not. Raises BadInput if `saved` fits neither way."""
    from_rank0(refuse_another_run, run, saved)
    run.resumed_from = flat(saved) | {"micro_batch": saved["state"]["micro_batch"]}
    if run.resumed_from["batch_size"] == run.facts["config"]["batch_size"]:
        # what fits into memory was found out
        run.state["micro_batch"] = run.resumed_from["micro_batch"]
    checkpoint.restore(run, saved)
    if not run.folder.owns(run.path):
        kept = {key: run.state[key] for key in position}
        run.state.update(copy.deepcopy(fresh_state) | kept)


@torch.no_grad()
def reset_best(run: Any, saved: dict, fresh_state: dict) -> None:
    """For a run of before 2026-11-28, whose checkpoints do not say how many rows the data has, and
    which was evaluated by the cross-entropy of model(inputs). If the model returns another loss, as
    with an auxiliary term in it, say so, and forget the best."""
    if "rows" in saved["run"] or not run.folder.owns(run.path):
        return
    dataset, *_ = sets_of(run.val_data).values()
    with evaluating(run), suppress(Exception):  # without logits it had an evaluation of its own
        inputs, targets = to_device(Reader(dataset, 0)[0, 1], run.device)
        now = means_of(run.model(inputs, targets), in_training=False)["loss"]
        logits = run.model(inputs).float()
        if not now.isclose(cross_entropy(logits.flatten(0, -2), targets.flatten()), rtol=1e-4):
            run.state |= {name: fresh_state[name] for name in BEST}
            print0(
                "evaluated by the cross-entropy of model(inputs) so far, and from here on by the "
                "loss that the model returns, which is another one: the best begins anew"
            )


# ---- may this run continue? ----------------------------------------------------------------------


def find_checkpoint(folder: RunFolder, resume: str, set_aside: bool) -> Path | None:
    """Path of the checkpoint to start from, or None for a new run. Rank 0 only. resume: "auto",
    "never", "restart" or a path. set_aside: rename damaged checkpoints. Raises BadInput if `resume`
    contradicts the folder."""
    path = None
    try:
        if folder.holds_run() and resume != "restart":
            if resume == "never":
                again = folder.fresh_out_dir()
                fail(f"--resume=never, and {folder.path} holds a run; write {again}")
            path = checkpoint.newest_valid(folder.path, set_aside)
            if not path and (checkpoint.newest_first(folder.path) or folder.log.has_steps()):
                found = f"the run in {folder.path} has no checkpoint that can be read"
                fail(f"{found}; to start again write --resume=restart or {folder.fresh_out_dir()}")
        if resume not in ("auto", "never", "restart"):
            path = checkpoint_asked_for(folder, path, Path(resume))
    except OSError as error:  # of a read: not damage, so nothing is renamed
        place = shown(error.filename or folder.path)
        fail(f"{place} cannot be read ({error.strerror}); it may be undamaged: it stays as it is")
    return path


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
    except (checkpoint.Damaged, FileNotFoundError) as error:
        fail(f"--resume={asked}: {error}; write auto, never, restart or a checkpoint's path")
    if newest:
        found = f"{folder.path} holds a run that did not begin from it"
        fail(f"--resume={asked}: {found}; leave out --resume, or write {folder.fresh_out_dir()}")
    return asked


def resolve_auto_knobs(
    config: Config, saved: dict | None, device: torch.device
) -> tuple[dict, dict]:
    """({knob: value}, {knob: why}) of the knobs in KEPT: on a resume as in the checkpoint `saved`,
    unless the command asks for another value; else by the hardware and other knobs. A new run's
    `compile` is left to choose_compile()."""
    kept = {name: config[name] for name in KEPT}
    reasons = {}
    if saved:
        then = flat(saved)
        for name in KEPT:
            if not asks_for(name, config, then):
                kept[name] = then[name]
                reasons[name] = "as in the run so far"
        refuse_ended_schedule(config, then["decay_steps"])
    if "warmup_steps" not in reasons and "warmup_steps" not in config.typed:
        kept["warmup_steps"] = min(kept["warmup_steps"], config["max_steps"] // 10)
    kept["decay_steps"] = kept["decay_steps"] or config["max_steps"]
    kept["dtype"], reason = choose_dtype(kept["dtype"], device)
    return kept, {"dtype": reason} | reasons


def asks_for(name: str, config: Config, then: dict) -> bool:
    """Whether a flag, or an edited config file, asks for another value of a knob than the run has
    whose identity is `then`."""
    same = then[name] if name in config.typed else then["written"][name]
    return config[name] not in (KEPT[name], same)


def refuse_ended_schedule(config: Config, planned: int) -> None:
    """Raises BadInput if max_steps was raised past the end of a schedule as first planned."""
    more = config["max_steps"]
    if config["schedule"] in ("constant", "step") or config["decay_steps"] or more <= planned:
        return
    here = f"--out_dir={shown(config['out_dir'])}"
    fail(
        f"this run was planned for {planned:,} steps, where its learning rate ends; "
        f"for --max_steps={more} write {here} --decay_steps={more} (plan anew from here) "
        f"or {here} --decay_steps={planned} (train on at the last rate)"
    )


def refuse_another_run(run: Any, saved: dict) -> None:
    """Raises BadInput if the checkpoint `saved` is of another run, or of one whose steps see another
    number of sequences. Rank 0 only."""
    own = run.folder.owns(run.path)
    again = run.folder.fresh_out_dir() if own else "no --resume"
    for name, (was, new) in other_run(run, saved).items():
        hint = f" or, to resume, --{name}={show(was)}" if name in run.knobs else ""
        if name == "dataset" and not own:
            hint += f" or, for its weights alone, --init_from={run.path} in place of --resume"
        message = f"{name} changed from {was} to {new}: this run cannot be resumed with that"
        fail(f"{message}; write {again}{hint}")
    then = flat(saved)
    now = run.facts["config"]
    # a checkpoint of before 2026-11-26 says how many sequences all its ranks had
    was = then.get("global_batch", product(then, run.knobs))
    new = product(now, run.knobs)
    if was != new:
        size = math.gcd(was, now["batch_size"])
        here = f"--out_dir={shown(run.folder.path)}"
        fail(
            f"the batch changed from {was} to {new} sequences: this run cannot be resumed with that; "
            f"write {again} or, to resume, {here} --batch_size={size} --accum_steps={was // size}"
        )


def other_run(run: Any, saved: dict) -> dict[str, list]:
    """{name: [then, now]} of what makes `run` another one than that of the checkpoint `saved`: knobs
    whose comments say `fixed`, data, shapes of weights, the optimizers' groups."""
    then = flat(saved)
    now = flat(run.facts)
    names = [name for name in then if name in run.knobs and run.knobs[name].policy == "fixed"]
    names += ["data", "files", *({"rows"} & then.keys())]  # older checkpoints do not have it
    if "portable" in (then["deterministic"], now["deterministic"]):
        names.append("deterministic")
    pairs = {name: [then.get(name), now.get(name)] for name in names}
    old = saved["model"]
    new = run.model.state_dict()
    for name in new | old:
        pairs[name] = [getattr(part.get(name), "shape", "absent") for part in (old, new)]
    if saved["groups"] != checkpoint.groups_of(run):
        pairs["the grouping of weights by configure_optimizers"] = ["the run's", "another"]
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def is_finished(run: Any) -> bool:
    """Whether the run has no step left to take: by max_steps, or by its own patience."""
    config = run.facts["config"]
    state = run.state
    out_of_patience = 0 < config["patience"] <= state["evals_since_best"]
    is_over = state["step"] >= config["max_steps"] or out_of_patience
    return is_over and not state["evaluation_due"]


def close_finished(run: Any) -> None:
    """Say that a run is finished and what to type to train longer, and record its end if a kill
    came before that. Rank 0 only. Raises BadInput if the command asks for another run."""
    config = run.facts["config"]
    state = run.state
    step = state["step"]
    name = shown(run.path.parent)
    knob = "--patience" if step < config["max_steps"] else "--max_steps"
    has_end = config["schedule"] not in ("constant", "step")
    more = f"{knob} and --decay_steps" if has_end and knob == "--max_steps" else knob
    longer = (
        f"to train it longer, raise {more} with --out_dir={name}; to start again, write "
        f"--resume=restart or {run.folder.fresh_out_dir()}"
    )
    changed = changes_since(run)
    asked = ("script", *(key for key in run.knobs if run.knobs[key].names_folder()))
    others = change_words({key: changed[key] for key in asked if key in changed})
    files = change_words({key: changed[key] for key in changed if key.endswith(".py")})
    if others or not run.folder.owns(run.path):
        fail(f"{name} holds a finished run{others and f'; changed since: {others}'}; {longer}")
    best = best_words(config["best_metric"], state)
    since = files and f"; changed since: {files}"
    print0(f"{name} is finished: {step:,} steps, {best}{since}; {longer}")
    run.folder.facts = read_json(run.folder.path / "run.json")
    if run.folder.facts.get("ended", "unknown") is None:
        run.folder.end(run, "finished")
