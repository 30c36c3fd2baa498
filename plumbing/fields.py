"""The fields of the rows of metrics.jsonl: one table, which says what writes each of them and how it
is shown."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from plumbing.cli import RunFailed


@dataclass
class Field:
    """A field of the rows of metrics.jsonl: what writes it, and how it is shown."""

    name: str
    kind: str  # of its rows: train, eval, both; mark: of all, and no number; none: in no row
    writer: str = "loop"  # or train_step, evaluate, clock (what is measured)
    heading: str = ""  # above its column, or before the number of an evaluation; "" = not printed
    form: str = ""  # how it is printed, a format of Python's
    plot: str = ""  # the title of its panel in the report; "" = none
    leaves: int = 0  # columns with the highest number leave a narrow terminal first; 0 = it stays

    @property
    def plot_factor(self) -> float:
        """The number in a row, times this, is shown in plots."""
        return 100.0 if self.form.endswith("%") else 1.0

    def shown(self, value: float | None) -> str:
        return "n/a" if value is None else format(value, self.form)

    def column(self) -> str:
        """Its heading, as wide as its column."""
        return self.heading.rjust(len(self.shown(0)))


# fmt: off
ALL_FIELDS = (  # in the order of columns and panels
    #     name              kind     writer        heading      form     plot                     leaves
    Field("kind",           "mark"),  # train, eval or event
    Field("finite",         "mark",  "clock"),  # false: a null of the row was not finite
    Field("step",           "both"),  # finished updates, skipped ones too
    Field("loss",           "train", "train_step", "loss",      "7.4f",  "loss (nats)"),
    Field("grad_norm",      "train", "train_step", "norm",      "#8.3g", "gradient norm",         3),
    Field("lr",             "train", "loop",       "lr",        "8.2e",  "learning rate",         4),
    Field("step_ms",        "train", "clock",      "ms",        "7.1f",  "",                      2),
    Field("data_ms",        "train", "clock",      "wait",      "6.1f",  "",                      7),
    Field("tokens_per_sec", "train", "clock",      "tok/s",     "9,.0f", "throughput (tokens/s)"),
    Field("mfu",            "train", "clock",      "mfu",       "6.1%",  "",                      5),
    Field("mem_gb",         "train", "clock",      "GB",        "6.2f",  "memory (GB)",           6),
    Field("gpu_util",       "train", "clock",      "",          "4.0f",  "GPU busy (%)"),
    Field("loss_scale",     "train", "train_step", "scale",     "8.3g",  "loss scale",            5),
    Field("skipped",        "train", "train_step"),  # 1 if the update changed nothing
    Field("tokens",         "train"),  # targets trained on so far
    Field("sequences",      "train"),  # index of the next one
    Field("epoch",          "train"),
    Field("targets",        "none",  "train_step"),  # of one step
    Field("batch_tokens",   "none"),
    Field("val_loss",       "eval",  "evaluate",   "val loss",  ".4f"),
    Field("val_bpb",        "eval",  "loop",       "bits/byte", ".4f",   "bits per byte"),
    Field("val_accuracy",   "eval",  "evaluate",   "accuracy",  ".1%",   "accuracy (%)"),
    Field("val_tokens",     "eval",  "evaluate",   "tokens",    ","),
    Field("best_val_loss",  "eval"),
)
# fmt: on
FIELDS = {field.name: field for field in ALL_FIELDS}
# Fields that are equal in two runs that compute the same; all others are measured
COMPARED = [field.name for field in ALL_FIELDS if field.writer != "clock"]


def shown_fields(row: dict, kind: str) -> list[Field]:
    """What a line says of a row, in order: the fields of the table, then numbers that a model,
    train_step or evaluate of a fork returned."""
    known = [f for f in ALL_FIELDS if f.heading and f.kind == kind and f.name in row]
    unknown = [name for name in row if name not in FIELDS]
    own = [Field(name, kind, heading=name, form="8.4g", leaves=1) for name in unknown]
    return known + own


# ---- what the functions of a fork return ---------------------------------------------------------


def means_of(result: Any, in_training: bool) -> dict:
    """{"loss": scalar, and other scalars by name} from what `model(inputs, targets)` returned. Raises
    RunFailed unless that is the loss, or (loss, {name: scalar})."""
    loss, others = result if type(result) is tuple and len(result) == 2 else (result, {})
    is_loss = getattr(loss, "requires_grad", False) >= in_training and is_scalar(loss)
    are_others = isinstance(others, dict) and not others.keys() & FIELDS.keys()
    fits = is_loss and are_others and all(map(is_scalar, others.values()))
    source = "model(inputs, targets)" + (" in eval mode", "")[in_training]
    expected = "the mean loss, a scalar tensor with a gradient, or (loss, {new name: scalar})"
    expect(fits, source, result, expected)
    return {"loss": loss, **others}


def sets_of(val_data: Any) -> dict:
    """{name: validation data}; if there is only one, it has no name."""
    return val_data if isinstance(val_data, dict) else {"": val_data}


def mean_of_sets(found: dict[str, dict]) -> dict:
    """The numbers of several evaluations, {validation set: numbers}, in one dict: each NAME as the
    mean over the sets, and of each set as NAME_SET. Raises RunFailed for a name that comes twice."""
    tokens = sum(each.pop("val_tokens") for each in found.values())
    numbers = {f"{key}_{name}": n for name, each in found.items() for key, n in each.items()}
    for key in next(iter(found.values())):
        if key in numbers:
            raise RunFailed(f"evaluate() gives {key!r} twice; rename a validation set")
        numbers[key] = sum(each[key] for each in found.values()) / len(found)
    return numbers | {"val_tokens": tokens}


def check_numbers(numbers: Any, writer: str, needed: set) -> None:
    """Raises RunFailed unless `numbers`, which the function `writer` returned, is a dict of scalars
    that has the keys `needed`, and no field of the rows that something else writes."""
    has_needed = isinstance(numbers, dict) and numbers.keys() >= needed
    expect(has_needed, f"{writer}()", numbers, f"a dict with {', '.join(sorted(needed))}")
    for name, value in numbers.items():
        is_own = name not in FIELDS or FIELDS[name].writer == writer
        expected = "a scalar, under a name that rows do not have"
        expect(is_own and is_scalar(value), f"{writer}()[{name!r}]", value, expected)


def is_scalar(value: Any) -> bool:
    is_number = hasattr(value, "shape") or isinstance(value, int | float)
    return is_number and math.prod(np.shape(value)) == 1


def expect(fits: bool, source: str, value: Any, expected: str) -> None:
    """Raises RunFailed unless `fits`. source: what returned `value`."""
    if not fits:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise RunFailed(f"{source} is a {type(value).__name__}{shape}; expected {expected}")
