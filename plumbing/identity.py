"""The identity of a run: what a resume refuses, what costs exactness, what is free to change."""

import sys
from hashlib import sha256
from pathlib import Path

import torch

from plumbing.configurator import fail
from plumbing.devices import choose_dtype, device_name, matmul_bits
from plumbing.ranks import from_rank0, world_size

REPO = Path(__file__).resolve().parent.parent

# If one of these differs, it is another run: a resume exits with 2.
REFUSED = (
    "n_layer n_head n_embd block_size dropout label_smoothing ngram_rows conv_width n_future_tokens "
    "seed optimizer schedule dtype global_batch dataset data"
).split()
# If one of these differs, the run resumes with an `inexact_resume` event.
INEXACT = (
    "torch device matmul_bits compile deterministic threads world_size batch_size accum_steps shard offload "
    "code"
).split()
# These change no bit of a step, except through plateau_factor or a rollback: a finished run stays
# finished if they differ. All other knobs (peak_lr, weight_decay, ...) may change on a resume too.
FREE = (
    "out_dir data_dir max_steps patience min_delta num_workers prefetch_factor hang_minutes "
    "log_interval eval_interval eval_tokens sample_interval save_interval save_minutes keep_last "
    "milestone_interval report audit_interval wandb_log wandb_project wandb_run_name "
    "dollars_per_hour resume offline_dataset"
).split()
# Resolved from "auto", 0, max_steps or the ranks, and kept on a resume unless the command differs.
RESOLVED = "dtype compile warmup_steps decay_steps batch_size accum_steps".split()


def identity_of(knobs, data, device):
    """What a checkpoint keeps as `run`. knobs: globals of train.py. data: name and fingerprint."""
    known = {key: knobs[key] for key in (*REFUSED, *INEXACT, *RESOLVED) if key in knobs}
    return known | {
        "global_batch": knobs["batch_size"] * knobs["accum_steps"] * world_size(),
        "dataset": data["name"],
        "data": data["fingerprint"],
        "torch": str(torch.__version__),
        "device": device_name(device),
        "matmul_bits": matmul_bits(device, getattr(torch, knobs["dtype"])),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "code": code_hashes(),
    }


def code_hashes():
    """{path: SHA-256} of every .py file of the repository that this process has loaded."""
    hashes = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py") and "site-packages" not in file.removeprefix(str(REPO)):
            path = Path(file).resolve()
            if path.is_relative_to(REPO) and path.is_file():
                hashes[path.relative_to(REPO).as_posix()] = sha256(path.read_bytes()).hexdigest()
    return {name: hashes[name] for name in sorted(hashes) if name[0] != "."}  # not .venv/


def changes(then, now):
    """{key: [then, now]} where two identities differ. Code: only files that both have loaded."""
    changed = {key: [then.get(key), now[key]] for key in now if then.get(key) != now[key]}
    if "code" in changed:
        before, after = changed.pop("code")
        differ = [name for name in after if before.get(name, after[name]) != after[name]]
        if differ:
            changed["code"] = [{name: files[name] for name in differ} for files in (before, after)]
    return changed


def inexact(then, now):
    """{key: [then, now]} of the differences that make a resume inexact."""
    return {key: pair for key, pair in changes(then, now).items() if key in INEXACT}


def resolve_auto_knobs(knobs, config, saved, device):
    """Set the RESOLVED knobs: on a resume as in the checkpoint `saved`, else by hardware and knobs.

    A new run's `compile` is left to choose_compile(). knobs: globals of train.py. Returns reasons.
    """
    reasons = {}
    if saved:
        for knob in RESOLVED:
            if config[knob] == saved["config"].get(knob):
                knobs[knob] = saved["run"][knob]
                reasons[knob] = "as in the run so far"
        if saved["run"]["world_size"] != world_size():  # the product counts, not its factors
            split = split_global_batch(saved["run"], knobs["batch_size"])
            knobs["batch_size"], knobs["accum_steps"] = split
    if "warmup_steps" not in reasons:
        knobs["warmup_steps"] = min(knobs["warmup_steps"], knobs["max_steps"])
    knobs["decay_steps"] = knobs["decay_steps"] or knobs["max_steps"]
    knobs["dtype"], reason = choose_dtype(knobs["dtype"], device)
    return {"dtype": reason} | reasons


def split_global_batch(then, batch_size):
    """(batch_size, accum_steps) that keep a run's global batch with today's number of ranks."""
    rows, rest = divmod(then["global_batch"], world_size())
    if rest:
        fail(
            f"the {then['global_batch']} sequences of this run's batch do not divide by "
            f"{world_size()} ranks; expected a number of ranks that divides them"
        )
    micro = max(size for size in range(1, min(rows, batch_size) + 1) if rows % size == 0)
    return micro, rows // micro


def refuse_another_run(run, saved):
    """Exits with 2, and says what differs, if `saved` is a checkpoint of another run than `run`."""
    fresh_out_dir = from_rank0(run.folder.fresh_out_dir)
    then = saved["run"]
    now = run.facts["run"]
    changed = changes(then, now)
    for key in REFUSED:
        if key in changed:
            to_resume = f" or, to resume, --{key}={then.get(key)}" if key in saved["config"] else ""
            fail(
                f"{key} was {then.get(key)} in the run so far and is {now[key]} now: that is another "
                f"run; write {fresh_out_dir}{to_resume}"
            )
    weights = run.model.state_dict()
    for name in saved["model"] | weights:
        shapes = [
            list(getattr(w[name], "shape", ())) if name in w else "absent"
            for w in (saved["model"], weights)
        ]
        if shapes[0] != shapes[1]:
            fail(
                f"{name} is {shapes[0]} in the checkpoint and {shapes[1]} in the model: that is "
                f"another model; write {fresh_out_dir}"
            )


def changed_knobs(then, now):
    """{knob: [then, now]} where two configs differ as typed, except for folders and `resume`."""
    return {
        key: [then[key], now[key]]
        for key in now
        if key in then and then[key] != now[key] and not key.endswith("_dir") and key != "resume"
    }
