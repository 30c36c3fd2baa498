"""The fields of the rows of metrics.jsonl: one table, which says what writes each of them and how it
is shown."""

from dataclasses import dataclass

import numpy as np

from plumbing.cli import RunFailed


@dataclass
class Field:
    """A field of the rows of metrics.jsonl: what writes it, and how it is shown."""

    name: str
    kind: str  # of its rows: train, eval, both; mark: of all, and no number; none: in no row
    writer: str = "loop"  # or step (train_step), model, eval (evaluate), clock (what is measured)
    heading: str = ""  # of its column, or before it in the line of an evaluation; "" = not printed
    form: str = ""  # how it is printed, a format of Python's
    unit: str = ""  # of what is shown
    plot: str = ""  # the panel of the report in which it is drawn; "" = none

    @property
    def plot_factor(self) -> float:
        """The number in a row, times this, is shown in plots."""
        return 100.0 if self.form.endswith("%") else 1.0

    def shown(self, value: float | None) -> str:
        return "n/a" if value is None else format(value, self.form)


# fmt: off
ALL_FIELDS = (  # in the order of columns and panels
    #     name              kind     writer   heading      form     unit        plot
    Field("kind",           "mark"),  # train, eval or event
    Field("finite",         "mark",  "clock"),  # false: a null of the row was not finite
    Field("step",           "both"),  # finished updates, skipped ones too
    Field("loss",           "train", "model", "loss",      "7.4f",  "nats",     "loss"),
    Field("grad_norm",      "train", "step",  "norm",      "#8.3g", "",         "gradient norm"),
    Field("lr",             "train", "loop",  "lr",        "8.2e",  "",         "learning rate"),
    Field("step_ms",        "train", "clock", "ms",        "7.1f",  "ms"),
    Field("data_ms",        "train", "clock", "wait",      "6.1f",  "ms"),
    Field("tokens_per_sec", "train", "clock", "tok/s",     "9,.0f", "tokens/s", "throughput"),
    Field("mfu",            "train", "clock", "mfu",       "6.1%",  "%",        "MFU"),
    Field("mem_gb",         "train", "clock", "GB",        "6.2f",  "GB",       "peak memory"),
    Field("gpu_util",       "train", "clock", "",          "4.0f",  "%",        "GPU busy"),
    Field("loss_scale",     "train", "step",  "scale",     "8.3g",  "",         "loss scale"),
    Field("skipped",        "train", "step"),  # 1 if the update changed nothing
    Field("tokens",         "train"),  # targets trained on so far
    Field("sequences",      "train"),  # index of the next one
    Field("epoch",          "train"),
    Field("targets",        "none",  "step"),  # of one step
    Field("batch_tokens",   "none"),
    Field("val_loss",       "eval",  "eval",  "val loss",  ".4f",   "nats",     "loss"),
    Field("val_bpb",        "eval",  "loop",  "bits/byte", ".4f",   "bits"),
    Field("val_accuracy",   "eval",  "eval",  "accuracy",  ".1%",   "%"),
    Field("val_tokens",     "eval",  "eval",  "tokens",    ","),
    Field("best_val_loss",  "eval"),
)
# fmt: on
FIELDS = {field.name: field for field in ALL_FIELDS}
# What differs between two runs that compute the same
MEASURED = [field.name for field in ALL_FIELDS if field.writer == "clock"]


def shown_fields(row: dict, kind: str) -> list[Field]:
    """What a line says of a row, in order: the fields of the table, then numbers that a model,
    train_step or evaluate of a fork returned."""
    known = [f for f in ALL_FIELDS if f.heading and f.kind == kind and f.name in row]
    own = [Field(name, kind, heading=name, form="8.4g") for name in row if name not in FIELDS]
    return known + own


def check_names(numbers: dict, whose: str, writers: tuple) -> None:
    """Raises RunFailed if a number is no scalar, or has the name of a field of the rows which
    others than `writers` write: see Field. whose: what returns the
    numbers."""
    for name, value in numbers.items():
        if name in FIELDS and FIELDS[name].writer not in writers:
            raise RunFailed(f"{whose} returns a number named {name}, which rows have, too")
        count = value.numel() if hasattr(value, "numel") else np.size(value)
        if count != 1:
            found = f"a {type(value).__name__} of {count} numbers"
            raise RunFailed(f"{whose} returns {name}, {found}; expected a scalar")
