"""May this run continue? What really computed so far, what has changed since, and is it
finished?"""

import ast
import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType

import torch

from plumbing import checkpoint
from plumbing.cli import Config, Knob, fail, product
from plumbing.console import REPO, best_words, shown
from plumbing.files import digests_by_name, pieces, read_json
from plumbing.machine import choose_dtype, device_name
from plumbing.ranks import say, world_size
from plumbing.run_folder import RunFolder
from plumbing.safe_step import leaves

# What an identity holds besides knobs, under the policy of plumbing/cli.py that decides a
# difference.
DECISIVE = {
    "fixed": ("global_batch", "data", "files"),
    "bits": ("torch device capability inductor threads world_size code".split()),
}
ANY_MACHINE = ("device", "threads")  # do not count where --deterministic=portable
MEASURES = ("eval_tokens", "best_metric")  # other values ask for another result of a finished run
JUDGING = ("eval_interval", "eval_tokens", "best_metric", "min_delta")  # of what is the best
# What only prints, draws or drives train.py, and what makes a dataset, which has a fingerprint.
NO_IDENTITY = ("plumbing/console.py", "report.py", "reporting/", "prepare_data.py")
NO_IDENTITY += ("replay.py", "check.py", "bench.py", "sample.py")
MOST_DEPTH = 9  # of functions that hold functions
FORKED = ("train", "model", "optim")  # modules whose functions a notebook may replace


# ---- identity: what really computed --------------------------------------------------------------


def identity_of(config: Config, knobs: dict, data: dict, device: torch.device) -> dict:
    """What a checkpoint keeps as `run`; rehearsed() completes it. knobs: globals of train.py,
    resolved. data: its facts["data"]."""
    decisive, kept = {}, {}
    for name, knob in config.knobs.items():
        if knob.policy - {"free"}:
            decisive[name] = knobs[name]
        if "kept" in knob.policy:
            kept[name] = knobs[name]
    return decisive | {
        "kept": kept,
        "global_batch": product(knobs, ("batch_size", "accum_steps")) * world_size(),
        "dataset": data["name"],
        "data": data["fingerprint"],
        "files": digests_by_name(data.get("files", ())),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "main": source_of(sys.modules["__main__"])[0],
        "code": code_of_process(),
    }


def rehearsed(identity: dict, is_compiled: bool) -> None:
    """Complete an identity by what only a rehearsal tells. All ranks call it together."""
    identity["compile"] = is_compiled
    identity["inductor"] = inductor_on_cpu() if is_compiled else None


def inductor_on_cpu() -> str:
    """The vector instructions and the compiler of torch.compile's code for this CPU."""
    from torch._inductor import cpp_builder, cpu_vec_isa  # no public way tells

    compiler = cpp_builder.get_cpp_compiler()
    return f"{cpu_vec_isa.pick_vec_isa()}, {cpp_builder.get_compiler_version_info(compiler)}"


seen = {}  # (path, id of the module's spec) -> (spec, name, hashes): as the module was first seen


def code_of_process() -> dict[str, list[str]]:
    """{name: [SHA-256 of the bytes, of the syntax tree]} of the user's sources that are loaded, and
    of functions that a notebook has replaced. Each source is read once: a later edit is not what
    ran."""
    sources = (source_of(module) for module in list(sys.modules.values()))
    return {name: hashes for name, hashes in sources if name} | dict(replaced_functions())


def source_of(module: ModuleType) -> tuple[str | None, list[str]]:
    """(name, hashes) of a module's source: its path, relative to the repository if it lies there.
    The name is None if the source is none of the user's, or does not compute."""
    path, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    key = path, id(spec)  # importlib.reload() makes a new spec
    if key not in seen:
        name = name_of_source(path)
        hashes = hashes_of_source((REPO / name).read_bytes()) if name else []
        seen[key] = spec, name, hashes
    return seen[key][1:]


def name_of_source(path: object) -> str | None:
    if not isinstance(path, str) or not path.endswith(".py"):
        return None
    folder, name = os.path.split(path)
    folder = real(folder)  # not of the file, which may be a link into an installer's cache
    path = os.path.join(folder, name)
    own = path.removeprefix(f"{REPO}/")
    if own.startswith(NO_IDENTITY) or is_installed(folder) or not os.path.isfile(path):
        return None
    return own


real = functools.cache(os.path.realpath)


@functools.cache
def is_installed(folder: str) -> bool:
    """Whether `folder` belongs to a Python installation, this one or another."""
    standard_library = real(sysconfig.get_path("stdlib"))
    if folder == standard_library or folder.startswith(f"{standard_library}/"):
        return True
    if {"site-packages", "dist-packages"} & set(Path(folder).parts):
        return True
    return any(os.path.exists(f"{folder}/{name}") for name in ("python3", "python.exe"))  # scripts


@functools.cache
def hashes_of_source(source: bytes) -> list[str]:
    """[SHA-256 of the bytes, of the tree]: a comment or a docstring changes only the first."""
    own = sha256(source).hexdigest()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return [own, own]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring, or another constant that nothing uses
    return [own, sha256(ast.dump(tree).encode()).hexdigest()]


def replaced_functions() -> Iterator[tuple[str, list[str]]]:
    """(name, hashes) of functions of train, model and optim that were replaced from a place without
    a file, such as a cell of a notebook."""
    for module_name in FORKED:
        module = sys.modules.get(module_name)
        for name, function in functions_of(module) if module else ():
            if not is_of_file(function):
                digest = sha256(repr(content_of(function)).encode()).hexdigest()
                yield f"{module_name}.{name}", [digest, digest]


is_file = functools.cache(os.path.isfile)


def is_of_file(value: object) -> bool:
    return isinstance(value, FunctionType) and is_file(value.__code__.co_filename)


def functions_of(module: ModuleType) -> Iterator[tuple[str, FunctionType | functools.partial]]:
    for name, value in list(vars(module).items()):
        if isinstance(value, FunctionType | functools.partial):
            yield name, value
        elif isinstance(value, type):
            for own_name, own in list(vars(value).items()):
                is_generated = own_name.startswith("__")  # such as a dataclass's __init__
                if isinstance(own, FunctionType) and not is_generated:
                    yield f"{name}.{own_name}", own


def content_of(value: object, depth: int = 0) -> object:
    """What decides what `value`, a function without a file or what it holds, computes: code,
    constants, defaults, closure, arguments of a partial. Of another object, its name."""
    if isinstance(value, CodeType):
        value = [value.co_code, value.co_names, value.co_varnames, value.co_consts]
    elif isinstance(value, FunctionType) and not is_of_file(value):
        empty = CellType()
        closure = [c.cell_contents for c in value.__closure__ or () if c != empty]
        value = [value.__code__, value.__defaults__, value.__kwdefaults__, closure]
    elif isinstance(value, functools.partial):
        value = [value.func, value.args, value.keywords]
    elif isinstance(value, frozenset):
        value = sorted(map(repr, value))  # whose order is another one in each process
    if isinstance(value, list | tuple | dict) and depth < MOST_DEPTH:  # a closure may hold itself
        return [(path, content_of(leaf, depth + 1)) for path, leaf in leaves(value)]
    is_plain = isinstance(value, int | float | str | bytes | None)
    return value if is_plain else getattr(value, "__qualname__", type(value).__qualname__)


def note_new_code(run) -> None:
    """Add modules imported since the last save to the run's identity. One that the resumed run had
    loaded, too, and that has changed since then, makes the resume inexact."""
    known = run.facts["run"]["code"]
    new = {name: hashes for name, hashes in code_of_process().items() if name not in known}
    known |= new
    then = run.before["run"]
    late = {name: hashes for name, hashes in new.items() if name in then.get("code", {})}
    changed = changed_code(then | {"main": None}, run.facts["run"] | {"code": late})
    if changed:
        run.folder.event(run.state["step"], "inexact_resume", code=changed)


# ---- what differs between two identities ---------------------------------------------------------


def inexact(then: dict, now: dict, knobs: dict[str, Knob]) -> dict:
    """{key: [then, now]} of the differences that make a resume inexact."""
    return differences(then, now, knobs, "bits")


def differences(then: dict, now: dict, knobs: dict[str, Knob], policy: str) -> dict:
    """{key: [then, now]} of the knobs and facts under `policy` where two identities differ."""
    names = [name for name, knob in knobs.items() if policy in knob.policy and name != "device"]
    portable = "portable" in (then.get("deterministic"), now.get("deterministic"))
    if isinstance(then.get("files"), dict):  # by path, in an older version
        then = then | {"files": sorted([Path(p).name, then["files"][p]] for p in then["files"])}
    found = {}
    for name in dict.fromkeys((*names, *DECISIVE[policy])):
        counts = name in then and name in now and not (portable and name in ANY_MACHINE)
        if counts and name != "code" and then[name] != now[name]:
            found[name] = [then[name], now[name]]
    if policy == "fixed" and portable and then.get("deterministic") != now.get("deterministic"):
        found["deterministic"] = [then.get("deterministic"), now.get("deterministic")]
    changed = changed_code(then, now) if policy == "bits" else None
    return found | ({"code": changed} if changed else {})


def changed_code(then: dict, now: dict) -> list[dict] | None:
    """[{name: its hash then}, {name: its hash now}] of the sources that differ between two
    identities, or None. By their syntax trees, or by their bytes if another Python read them. Only
    a new name may be that of a source which has no longer its old one: a script was renamed, or its
    folder moved."""
    before, after = then.get("code", {}), now["code"]
    decides = 1 if then.get("python", now["python"]) == now["python"] else 0
    gone = [before[name][decides] for name in before if name not in after]
    differ = []
    for name, hashes in after.items():
        same = (
            before[name][decides] == hashes[decides] if name in before else hashes[decides] in gone
        )
        if not same:
            differ.append(name)
    main = then.get("main")
    if main in before and main not in after and main != "train.py":
        loaded = [hashes[decides] for hashes in after.values()]
        if before[main][decides] not in loaded:
            differ.append(main)
    if not differ:
        return None
    return [{name: code.get(name, [""])[0] for name in differ} for code in (before, after)]


def changed_knobs(then: dict, now: dict) -> dict:
    """{knob: [then, now]} where two configs differ as typed, except for folders and `resume`."""
    return {
        key: [then[key], now[key]]
        for key in now
        if key in then and then[key] != now[key] and not key.endswith("_dir") and key != "resume"
    }


def kept_in(identity: dict, knobs: dict[str, Knob]) -> dict:
    """{knob: value} of those that a checkpoint keeps as resolved; an older version mixed them with
    facts."""
    names = [name for name, knob in knobs.items() if "kept" in knob.policy]
    old = {name: identity[name] for name in names if name in identity}
    return identity.get("kept", old)


def changed_course(run) -> dict:
    """{knob: [then, now]} of changes that a resume records: of knobs without a word, and of those
    that decide which weights are the best, and when plateau_factor applies."""
    names = {name for name, knob in run.knobs.items() if not knob.policy - {"kept"}}
    names |= set(JUDGING)
    changed = changed_knobs(run.before["config"], run.facts["config"])
    return {name: pair for name, pair in changed.items() if name in names}


# ---- may this run continue? ----------------------------------------------------------------------


def find_checkpoint(folder: RunFolder, resume: str) -> tuple[Path | None, list[Path]]:
    """(path of the checkpoint to start from or None for a new run, damaged files that are newer).
    Rank 0 only. resume: "auto", "never", "restart" or a path. Raises BadInput if it contradicts the
    folder."""
    path, damaged = None, []
    try:
        if folder.holds_run():
            if resume == "never":
                again = folder.fresh_out_dir()
                fail(f"--resume=never, and {folder.path} holds a run; write {again}")
            if resume == "restart":
                return None, []
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
    has_trained = damaged or any(folder.path.glob("*.corrupt"))
    if folder.rows.is_file():
        with open(folder.rows, errors="replace") as rows:
            has_trained = has_trained or any('"kind": "train"' in row for row in pieces(rows))
    if has_trained:
        found = f"the run in {folder.path} has no checkpoint that can be read"
        fail(f"{found}; to start again write --resume=restart or {folder.fresh_out_dir()}")


def checkpoint_asked_for(folder, newest: Path | None, asked: Path) -> Path:
    """The path for --resume=asked: `asked`, or `newest`, the newest in `folder`, if the run there
    began from `asked`. Raises BadInput if neither applies."""
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
            f"--resume={asked}: {folder.path} holds a run that began from "
            f"{began_from or 'no checkpoint'}; to resume it leave out --resume, "
            f"to start from that file write {folder.fresh_out_dir()}"
        )
    return asked


def resolve_auto_knobs(
    config: Config, saved: dict | None, device: torch.device
) -> tuple[dict, dict]:
    """({knob: value}, {knob: why}) of the knobs that are resolved once and `kept`: on a resume as
    in the checkpoint `saved`, unless the command changes them; else by the hardware and other
    knobs. A new run's `compile` is left to choose_compile()."""
    kept = {name: config[name] for name, knob in config.knobs.items() if "kept" in knob.policy}
    reasons = {}
    if saved:
        then = kept_in(saved["run"], config.knobs)
        for name in kept:
            if name in then and config[name] == saved["config"].get(name):
                kept[name] = then[name]
                reasons[name] = "as in the run so far"
        split_as_before = {"batch_size", "accum_steps"} <= reasons.keys()
        if saved["run"]["world_size"] != world_size() and split_as_before:
            split = split_global_batch(saved["run"], kept["batch_size"])
            kept["batch_size"], kept["accum_steps"] = split
        refuse_ended_schedule(config, then["decay_steps"])
    if "warmup_steps" not in reasons:
        kept["warmup_steps"] = min(kept["warmup_steps"], config["max_steps"])
    kept["decay_steps"] = kept["decay_steps"] or config["max_steps"]
    kept["dtype"], reason = choose_dtype(kept["dtype"], device)
    return kept, {"dtype": reason} | reasons


def refuse_ended_schedule(config: Config, planned: int) -> None:
    """Raises BadInput if max_steps was raised past the end of a schedule as first planned."""
    more, here = config["max_steps"], f"--out_dir={shown(config['out_dir'])}"
    if config["schedule"] in ("constant", "step") or config["decay_steps"] or more <= planned:
        return
    fail(
        f"this run was planned for {planned:,} steps, where its learning rate ends; "
        f"for --max_steps={more} write {here} --decay_steps={more} (plan anew from here), "
        f"{here} --decay_steps={planned} (train on at the last rate), or --resume=restart "
        "(this one is kept as NAME.old_1)"
    )


def split_global_batch(then: dict, batch_size: int) -> tuple[int, int]:
    """(batch_size, accum_steps) that keep a run's global batch with today's number of ranks."""
    rows, rest = divmod(then["global_batch"], world_size())
    if rest:
        found = f"the {then['global_batch']} sequences of this run's batch do not divide by"
        fail(f"{found} {world_size()} ranks; expected a number of ranks that divides them")
    micro = max(size for size in range(1, min(rows, batch_size) + 1) if rows % size == 0)
    return micro, rows // micro


def continue_from(run, saved: dict, config: Config) -> None:
    """Raises BadInput if `saved` is of another run. Keeps its micro-batches if batch_size is
    equal."""
    fresh_out_dir = run.folder.fresh_out_dir()
    then, now = saved["run"], run.facts["run"]
    weights = run.model.state_dict()
    names = checkpoint.groups_of(run)
    refused = differences(then, now, config.knobs, "fixed")
    own = run.folder.owns(run.path)
    lacking = [name for name in weights if name not in saved["model"]]
    if lacking and not own and not refused:
        fail(
            f"{shown(run.path)} lacks {len(lacking)} weights of this model, such as "
            f"{lacking[0]}; to begin with the others, leave out --resume and load them in "
            "build_model (docs/forks.md)"
        )
    here = parts_of(weights, run.groups, names)
    saved_groups = [optimizer["param_groups"] for optimizer in saved["optimizer"]]
    parts = parts_of(saved["model"], saved_groups, saved.get("groups", names))
    for name in here | parts:  # in the program's order
        if parts.get(name) != here.get(name):
            refused[name] = parts.get(name, "absent"), here.get(name, "absent")
    for key, (was, new) in refused.items():
        to_resume = f" or, to resume, --{key}={was}" if key in saved["config"] else ""
        fail(
            f"{key} changed from {was} to {new}: this run cannot be resumed with that; "
            f"write {fresh_out_dir}{to_resume}"
        )
    step = saved["state"]["step"]
    if own and "max_steps" in config.typed and config["max_steps"] < step:
        found = f"--max_steps={config['max_steps']}: the run in {shown(run.folder.path)} is at step"
        fail(f"{found} {step:,}; expected more steps, or {fresh_out_dir} for a run of so many")
    now["began_from"] = then.get("began_from") if own else str(run.path.resolve())
    if now["batch_size"] == then["batch_size"]:
        for key in checkpoint.MICRO_BATCHES:
            run.state[key] = saved["state"].get(key, run.state[key])


def parts_of(weights: dict, optimizers: list, names: list) -> dict:
    """{name: shape} of the weights, the number of weights in each group of the optimizers, and the
    place of each weight there: (optimizer, group, number). names: of the weights in each group."""
    sizes = [[len(group["params"]) for group in groups] for groups in optimizers]
    shapes = {name: [*getattr(w, "shape", [])] for name, w in weights.items()}
    places = {f"the place of {name} in the groups": at for at, name in leaves(names)}
    return shapes | {"the optimizers' groups": sizes} | places


def is_finished(run) -> bool:
    """Whether the run has no step left to take: by max_steps, or by its own patience."""
    config, state = run.facts["config"], run.state
    out_of_patience = 0 < config["patience"] <= state["evals_since_best"]
    return state["step"] >= config["max_steps"] or out_of_patience


def close_finished(run) -> None:
    """Say that a run is finished and what to type to train longer, and record its end if a kill
    came before that. Rank 0 only. Raises BadInput if the command asks for anything else than that
    run."""
    config, state = run.facts["config"], run.state
    step, name = state["step"], shown(run.folder.path)
    again = f"--resume=restart or {run.folder.fresh_out_dir()}"
    more = "raise --patience" if step < config["max_steps"] else "raise --max_steps"
    if not run.folder.owns(run.path):
        fail(f"{shown(run.path)} is at step {step:,} of --max_steps={config['max_steps']}; {more}")
    others = [
        f"{knob} changed from {then} to {now}"
        for knob, (then, now) in changed_knobs(run.before["config"], config).items()
        if "free" not in run.knobs[knob].policy or knob in MEASURES
    ]
    code = changed_code(run.before["run"], run.facts["run"]) or [{}]
    others += [f"{file} has changed" for file in code[0]]
    if others:
        fail(
            f"{name} holds a finished run: {', '.join(others)}; for a run with that write {again}, "
            f"to train this one longer {more} with --out_dir={name}"
        )
    say(
        f"{name} is finished: {step:,} steps, {best_words(config['best_metric'], state)}. To train "
        f"longer, {more} with --out_dir={name}; to start again, write {again}"
    )
    run.folder.complete_end("finished", state, config["report"])


def mention_unfinished(config: Config, out_dir: str) -> None:
    """Where typed flags make another run, but the run in the config's own folder could go on with
    them, such as at a lower rate: print what to type."""
    place = config["out_dir"]
    facts = read_json(f"{place}/run.json")
    if place == out_dir or not facts.get("config") or facts.get("ended") == "finished":
        return
    changed = changed_knobs(facts["config"], config)
    is_same_batch = not changed.keys() & {"batch_size", "accum_steps"}
    is_same_run = not any("fixed" in config.knobs[name].policy for name in changed)
    if is_same_run and is_same_batch:
        place = shown(place)
        say(f"{place} holds an unfinished run; to go on with it add --out_dir={place}")
