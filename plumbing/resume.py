"""May this run continue? From where, with what changed, and is it finished already?"""

import ast
import functools
import os
import platform
import sys
import sysconfig
from hashlib import sha256
from pathlib import Path

import torch

from plumbing import checkpoint
from plumbing.cli import fail
from plumbing.console import REPO, best_words, shown
from plumbing.files import digests_by_name, read_json
from plumbing.machine import choose_dtype, device_name, matmul_bits
from plumbing.ranks import from_rank0, say, world_size
from plumbing.run_folder import RunFolder
from plumbing.safe_step import leaves

# If one of these differs, it is another run: a resume is refused.
REFUSED = (
    "n_layer n_head n_embd ngram_rows conv_width block_size dropout label_smoothing n_future_tokens "
    "seed optimizer schedule dtype global_batch dataset data files"
).split()
# If one of these differs, the run resumes with an `inexact_resume` event.
INEXACT = (
    "torch device matmul_bits compile deterministic threads world_size batch_size accum_steps shard "
    "offload code"
).split()
# These change no bit of a step, except through plateau_factor or a rollback: a finished run stays
# finished if they differ. All other knobs (peak_lr, weight_decay, ...) may change on a resume too.
FREE = (
    "out_dir data_dir max_steps patience min_delta num_workers prefetch_factor hang_minutes "
    "log_interval eval_interval eval_tokens best_metric sample_interval save_interval save_minutes "
    "keep_last milestone_interval report audit_interval wandb_log wandb_project wandb_run_name "
    "dollars_per_hour resume offline_dataset"
).split()
# Typed, these make another run, with a folder of its own: what a resume refuses, and the course.
NAMED = (
    "momentum weight_decay beta1 beta2 grad_clip ema_decay peak_lr min_lr warmup_steps decay_steps "
    "cooldown_steps step_size gamma plateau_factor plateau_patience max_skipped max_rollbacks"
).split() + REFUSED
# Resolved from "auto", 0, max_steps or the ranks, and kept on a resume unless the command differs.
RESOLVED = "dtype compile warmup_steps decay_steps batch_size accum_steps".split()
# Code that only prints or draws, and so never makes a resume inexact.
ONLY_SHOWS = ("plumbing/console.py", "report.py", "reporting/")


def identity_of(knobs: dict, data: dict, device: torch.device) -> dict:
    """What a checkpoint keeps as `run`. knobs: globals of train.py. data: its facts["data"]."""
    known = {key: knobs[key] for key in (*REFUSED, *INEXACT, *RESOLVED) if key in knobs}
    return known | {
        "global_batch": knobs["batch_size"] * knobs["accum_steps"] * world_size(),
        "dataset": data["name"],
        "data": data["fingerprint"],
        "files": digests_by_name(data.get("files", ())),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device_name(device),
        "matmul_bits": matmul_bits(device, getattr(torch, knobs["dtype"])),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "code": code_hashes(),
    }


def code_hashes() -> dict:
    """{path: [SHA-256 of the bytes, of the syntax tree]} of every source that this process has loaded,
    `__main__` too, but for the standard library, installed packages, and code that only shows."""
    real = functools.cache(os.path.realpath)  # of folders: what they hold may be links to a cache
    installed = tuple(real(sysconfig.get_path(of)) + "/" for of in ("stdlib", "purelib", "platlib"))
    left_out = (*installed, *(f"{REPO}/{path}" for path in ONLY_SHOWS))
    modules = list(sys.modules.values())
    files = {os.path.split(getattr(each, "__file__", None) or "") for each in modules}
    hashes = {}
    for path in sorted(os.path.join(real(f), name) for f, name in files if name.endswith(".py")):
        if not path.startswith(left_out) and os.path.isfile(path):
            hashes[path.removeprefix(f"{REPO}/")] = hashes_of_source(Path(path).read_bytes())
    return hashes


@functools.cache
def hashes_of_source(source: bytes) -> list[str]:
    """[SHA-256 of the bytes, of the tree]: a comment or a docstring changes only the first."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring, or another constant that nothing uses
    return [sha256(each).hexdigest() for each in (source, ast.dump(tree).encode())]


def changes(then: dict, now: dict) -> dict:
    """{key: [then, now]} where two identities differ. Code: only files that both have loaded, and a
    file whose bytes alone differ has not changed, unless another Python read it."""
    files = then.get("files", [])
    if isinstance(files, dict):  # {path: SHA-256}, of an older version
        files = sorted([os.path.basename(path), digest] for path, digest in files.items())
    then = then | {"files": files}
    changed = {key: [then.get(key), now[key]] for key in now if then.get(key) != now[key]}
    before, after = changed.pop("code", ({}, {}))
    decides = 1 if then.get("python") == now["python"] else 0  # the tree, or the bytes
    differ = [f for f in after if before.get(f, after[f])[decides] != after[f][decides]]
    if differ:
        changed["code"] = [{file: hashes[file][0] for file in differ} for hashes in (before, after)]
    return changed


def inexact(then: dict, now: dict) -> dict:
    """{key: [then, now]} of the differences that make a resume inexact."""
    return {key: pair for key, pair in changes(then, now).items() if key in INEXACT}


def changed_knobs(then: dict, now: dict) -> dict:
    """{knob: [then, now]} where two configs differ as typed, except for folders and `resume`."""
    return {
        key: [then[key], now[key]]
        for key in now
        if key in then and then[key] != now[key] and not key.endswith("_dir") and key != "resume"
    }


def find_checkpoint(folder: RunFolder, resume: str, to_train: bool) -> Path | None:
    """Path of the checkpoint to start from, or None for a new run. Rank 0 only. resume: "auto", "never",
    "restart" or a path. to_train: lock the folder if it holds a run, and set damaged files aside.
    Raises BadInput if `resume` contradicts the folder."""
    path = None
    fresh = folder.fresh_out_dir()
    try:
        if folder.holds_run():
            if to_train:
                folder.lock()
            if resume == "never":
                fail(f"--resume=never, and {folder.path} holds a run; write {fresh}")
            if resume == "restart":
                return None
            path = checkpoint.newest_valid(folder.path, set_aside=to_train)
            has_rows = not path and folder.rows.is_file()
            rows = folder.rows.read_text(errors="replace") if has_rows else ""  # of a lost run
            if not path and ('"kind": "train"' in rows or any(folder.path.glob("*.corrupt"))):
                found = f"the run in {folder.path} has no checkpoint that can be read"
                fail(f"{found}; to start again write --resume=restart or {fresh}")
        if resume not in ("auto", "never", "restart"):
            path = checkpoint_asked_for(folder, path, Path(resume))
    except OSError as error:  # of a read: not damage, so nothing is renamed
        place = shown(error.filename or folder.path)
        fail(f"{place} cannot be read ({error.strerror}); it may be undamaged: it stays as it is")
    return path


def checkpoint_asked_for(folder, newest: Path | None, asked: Path) -> Path:
    """The path for --resume=asked: `asked`, or `newest`, the newest in `folder`, if the run there began
    from `asked`. Raises BadInput if neither applies."""
    began_from = newest and checkpoint.load(newest, verify=False)["run"].get("began_from")
    if began_from == str(asked.resolve()):
        return newest
    try:
        checkpoint.load(asked)
    except (checkpoint.Damaged, FileNotFoundError, IsADirectoryError) as error:
        reason = getattr(error, "strerror", None) or error
        fail(f"--resume={asked}: {reason}; expected auto, never, restart or a checkpoint's path")
    if newest:
        fail(
            f"--resume={asked}: {folder.path} holds a run that began from {began_from or 'no checkpoint'}; "
            f"to resume it leave out --resume, to start from that file write {folder.fresh_out_dir()}"
        )
    return asked


def resolve_auto_knobs(knobs: dict, config: dict, saved: dict | None, device: torch.device) -> dict:
    """Set the RESOLVED knobs: on a resume as in the checkpoint `saved`, else by hardware and knobs.

    A new run's `compile` is left to choose_compile(). knobs: globals of train.py. Returns reasons.
    """
    reasons = {}
    if saved:
        for knob in RESOLVED:
            if config[knob] == saved["config"].get(knob):
                knobs[knob] = saved["run"][knob]
                reasons[knob] = "as in the run so far"
        split_as_before = {"batch_size", "accum_steps"} <= reasons.keys()
        if saved["run"]["world_size"] != world_size() and split_as_before:
            split = split_global_batch(saved["run"], knobs["batch_size"])
            knobs["batch_size"], knobs["accum_steps"] = split
        refuse_ended_schedule(knobs, config, saved["run"]["decay_steps"])
    if "warmup_steps" not in reasons:
        knobs["warmup_steps"] = min(knobs["warmup_steps"], knobs["max_steps"])
    knobs["decay_steps"] = knobs["decay_steps"] or knobs["max_steps"]
    knobs["dtype"], reason = choose_dtype(knobs["dtype"], device)
    return {"dtype": reason} | reasons


def refuse_ended_schedule(knobs: dict, config: dict, planned: int) -> None:
    """Raises BadInput if max_steps was raised past the end of a schedule as first planned."""
    more, here = config["max_steps"], f"--out_dir={shown(config['out_dir'])}"
    if knobs["schedule"] in ("constant", "step") or config["decay_steps"] or more <= planned:
        return
    fail(
        f"this run was planned for {planned:,} steps, where its learning rate ends; for --max_steps="
        f"{more} write {here} --decay_steps={more} (plan anew from here), {here} --decay_steps="
        f"{planned} (train on at the last rate), or --resume=restart (this one is kept as NAME.old_1)"
    )


def split_global_batch(then: dict, batch_size: int) -> tuple[int, int]:
    """(batch_size, accum_steps) that keep a run's global batch with today's number of ranks."""
    rows, rest = divmod(then["global_batch"], world_size())
    if rest:
        found = f"the {then['global_batch']} sequences of this run's batch do not divide by"
        fail(f"{found} {world_size()} ranks; expected a number of ranks that divides them")
    micro = max(size for size in range(1, min(rows, batch_size) + 1) if rows % size == 0)
    return micro, rows // micro


def continue_from(run, saved: dict) -> None:
    """Raises BadInput if `saved` is of another run. Keeps its micro-batches if batch_size is equal."""
    fresh_out_dir = from_rank0(run.folder.fresh_out_dir)
    then, now, built = saved["run"], run.facts["run"], run.checkpoint()
    changed = changes(then, now)
    refused = {key: changed[key] for key in REFUSED if key in changed}
    own = run.folder.owns(run.path)
    new = [name for name in built["model"] if name not in saved["model"]]
    if new and not own:
        fail(
            f"{shown(run.path)} lacks {len(new)} weights of this model, such as {new[0]}; to begin with "
            "the others, leave out --resume and load them in build_model (docs/questions.md, LoRA)"
        )
    parts, here = (parts_of(built | each) for each in (saved, built))
    for name in here | parts:  # in the program's order
        if parts.get(name) != here.get(name):
            refused[name] = parts.get(name, "absent"), here.get(name, "absent")
    for key, (was, new) in refused.items():
        to_resume = f" or, to resume, --{key}={was}" if key in saved["config"] else ""
        fail(
            f"{key} was {was} in the run so far and is {new} now: that is another run; "
            f"write {fresh_out_dir}{to_resume}"
        )
    now["began_from"] = then.get("began_from") if own else str(run.path.resolve())
    if now["batch_size"] == then["batch_size"]:
        for key in checkpoint.MICRO_BATCHES:
            run.state[key] = saved["state"].get(key, run.state[key])


def parts_of(saved: dict) -> dict:
    """{name: shape} of the weights, the number of weights in each group of the optimizers, and the
    place of each weight there: (optimizer, group, number)."""
    groups = [[len(g["params"]) for g in each["param_groups"]] for each in saved["optimizer"]]
    shapes = {name: [*getattr(w, "shape", [])] for name, w in saved["model"].items()}
    places = {f"the place of {name} in the groups": at for at, name in leaves(saved["groups"])}
    return shapes | {"the optimizers' groups": groups} | places


def is_finished(run) -> bool:
    """Whether the run has no step left to take. If so, prints what to type to train longer, and
    records its end if a kill came before that. Rank 0 only. Raises BadInput if the command asks for
    anything other than the finished run."""
    config, state = run.facts["config"], run.state
    step, name = state["step"], shown(run.folder.path)
    again = f"--resume=restart or {run.folder.fresh_out_dir()}"
    out_of_patience = 0 < config["patience"] <= state["evals_since_best"]
    more = "raise --patience" if step < config["max_steps"] else "raise --max_steps"
    if step < config["max_steps"] and not out_of_patience:
        return False
    if not run.folder.owns(run.path):
        fail(f"{shown(run.path)} is at step {step:,} of --max_steps={config['max_steps']}; {more}")
    others = [
        f"{knob} was {then} and is {now} now"
        for knob, (then, now) in changed_knobs(run.before["config"], config).items()
        if knob not in FREE
    ]
    code = changes(run.before["run"], run.facts["run"]).get("code", [{}])[0]
    others += [f"{file} has changed" for file in code]
    if others:
        fail(
            f"{name} holds a finished run: {', '.join(others)} since; for a run with that write {again}, "
            f"to train this one longer {more} with --out_dir={name}"
        )
    say(
        f"{name} is finished: {step:,} steps, {best_words(config['best_metric'], state)}. To train "
        f"longer, {more} with --out_dir={name}; to start again, write {again}"
    )
    run.folder.complete_end("finished", state, config["report"])
    return True


def mention_unfinished(config: dict, out_dir: str) -> None:
    """Where typed flags make another run, but the config's own folder holds one that could go on with
    them, such as a lower rate: say what to type."""
    own = config["out_dir"]
    facts = read_json(f"{own}/run.json")
    if own != out_dir and facts.get("config") and facts.get("ended") != "finished":
        changed = changed_knobs(facts["config"], config)
        if not changed.keys() & {*REFUSED, "batch_size", "accum_steps"}:
            own = shown(own)
            say(f"{own} holds an unfinished run; to go on with it add --out_dir={own}")
