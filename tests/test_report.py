"""The report: true to the logs, fair between runs, readable in 80 columns."""

import itertools
import json
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import report
from plumbing import BadInput

KNOBS = {"optimizer": "adamw", "n_layer": 1, "peak_lr": 1e-3, "dropout": 0.0, "batch": 32}
KNOBS |= {"eval_tokens": 0, "best_metric": "val_loss"}


def train_rows(steps, **changes):
    """Rows of a healthy run: 5 ms and 512 tokens a step."""
    losses = 1.5 + 2.7 * np.exp(-3 * np.arange(steps) / steps)
    common = {"step_ms": 5.0, "data_ms": 0.5, "tokens_per_sec": 102_400.0, "mfu": 0.25, "lr": 1e-3}
    common |= {"kind": "train", "grad_norm": 0.5, "mem_gb": 0.4, "gpu_util": None, "skipped": 0}
    counts = [{"step": i, "tokens": 512 * i, "epoch": i / 20} for i in range(1, steps + 1)]
    losses = [{"loss": loss} for loss in losses]
    return [common | count | loss | changes for count, loss in zip(counts, losses, strict=True)]


def evaluation(step, loss, **more):
    return {"kind": "eval", "step": step, "val_loss": loss, "best_val_loss": loss} | more


def event(step, name, **fields):
    return {"kind": "event", "step": step, "event": name} | fields


def write_run(folder, loss=1.5, seed=1, steps=40, rows=None, info=(), script="train.py", **knobs):
    """A run in the format of run.json and metrics.jsonl, with an evaluation `loss` at its end."""
    folder.mkdir(parents=True)
    rows = rows or [evaluation(0, 4.2), *train_rows(steps), evaluation(steps, loss)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    resolved = {"decay_steps": steps, "warmup_steps": steps // 10}
    identity = KNOBS | {"seed": seed} | resolved | knobs
    config = identity | {"max_steps": steps, "eval_interval": 20}
    facts = {
        "command": [script, f"--seed={seed}"],
        "ended": "finished",
        "config": config,
        "asked": config | {"decay_steps": 0, "warmup_steps": 100} | knobs,
        "defaults": config | {"seed": 1337},
        "identity": {"knobs": identity, "code": {"model.py": "a"}},
        "data": {"name": "shakespeare", "fingerprint": "f00d"},
        "run": {"script": script, "world_size": 1},
        "state": {"step": steps, "seconds": {"start": 1.0, "train": 9.0}},
    }
    (folder / "run.json").write_text(json.dumps(facts | dict(info)))
    return folder


def compared(*folders):
    """[(name, result, how it ended)] in the order of the table, the lines below it, the picture."""
    settings = report.settings_of(report.read_runs([str(folder) for folder in folders]))
    left_out = report.name_and_sort(settings)
    rows = [row[:3] for row in report.rows_of(settings)[1]]
    with matplotlib.rc_context(report.STYLE):
        figure = report.draw(settings, "title")
    return rows, " ".join(report.conclusions(settings, left_out)), figure


def results(folder):
    return report.results_of(report.read_run(folder))


def test_runs_that_differ_in_their_seed_are_one_row_and_the_best_is_first(tmp_path):
    for rate, seed in itertools.product((1e-3, 1e-2), (1, 2, 3)):
        write_run(tmp_path / f"{rate},{seed}", 2 - 50 * rate + seed / 10, seed, peak_lr=rate)
    rows, words, _ = compared(tmp_path)
    assert rows == [
        ("peak_lr=0.01", "1.7000 ± 0.1000 (n=3)", "finished at step 40"),
        ("peak_lr=0.001", "2.1500 ± 0.1000 (n=3)", "finished at step 40"),
    ]
    assert "ahead of peak_lr=0.001 by 0.4500 ± 0.0816 (standard error" in words


def test_a_knob_that_only_some_runs_have_splits_them_whichever_stands_first(tmp_path):
    runs = [write_run(tmp_path / f"{gain}", gain, script="lab.py", gain=gain) for gain in (2, 40)]
    runs.append(write_run(tmp_path / "stock", 1.0))
    for order in itertools.permutations(runs):
        rows, _, _ = compared(*order)
        assert [row[0] for row in rows] == ["gain=absent script=train.py", "gain=2", "gain=40"]


def test_what_splits_no_row_and_a_seed_that_counts_once(tmp_path):
    """Free knobs, other code, a resume that changed no knob, an end by the run's own rule."""
    write_run(tmp_path / "a", info={"ended": "stopped early: no better for 3 evaluations"})
    resume = event(20, "resume", changed={"threads": [1, 2], "model.py": ["a", "b"]})
    rows = [resume, *train_rows(40), evaluation(40, 1.5)]
    path = write_run(tmp_path / "b", seed=2, rows=rows) / "run.json"
    facts = json.loads(path.read_text())
    facts["config"] |= {"eval_interval": 5, "device": "cuda"}
    facts["identity"]["code"] = {"model.py": "b"}
    path.write_text(json.dumps(facts))
    write_run(tmp_path / "c", seed=2)
    ((_, result, ended), again), _, _ = compared(tmp_path)
    assert result == "1.5000 ± 0.0000 (n=2)" and "code differs" in ended
    assert "n=2" not in again[1] and "same seed again" in again[2]


CHANGED = event(20, "resume", changed={"peak_lr": [1, 2]})
UNRANKED = {
    "other data": {"info": {"data": {"fingerprint": "beef"}}},
    "other max_steps": {"steps": 80},
    "other best_metric": {"best_metric": "-val_loss"},
    "other eval_tokens": {"eval_tokens": 64},
    "running or killed at step 40; not ranked: not finished": {"info": {"ended": None}},
    "stopped by SIGTERM at step 40": {"info": {"ended": "stopped by SIGTERM"}},
    "failed: no memory at step 40": {"info": {"ended": "failed: no memory. Long advice"}},
    "knobs not known": {"info": {"identity": {}}},
    "no evaluation": {"rows": train_rows(40)},
    "peak_lr changed at step 20": {"rows": [CHANGED, evaluation(40, 0.1)]},
}


@pytest.mark.parametrize("why", UNRANKED)
@pytest.mark.parametrize("name", ["0 first", "z last"])
def test_what_cannot_be_compared_is_listed_below_and_not_ranked(tmp_path, why, name):
    write_run(tmp_path / name, **{"loss": 0.1, "peak_lr": 0.1} | UNRANKED[why])
    for i, rate in enumerate((1e-3, 1e-2)):
        write_run(tmp_path / f"m{i}", 1.5, 2, peak_lr=rate)
    (first, _, last), words, _ = compared(tmp_path)
    assert first[1:] == ("1.5000", "finished at step 40")
    assert why in last[2] and "not ranked" in last[2] and "tried" not in words


def test_a_name_leaves_out_the_seed_what_most_settings_have_and_a_cut_warmup(tmp_path):
    for seed in (7, 8):
        write_run(tmp_path / f"base,seed={seed}", 1.0, seed)
    write_run(tmp_path / "a", n_layer=2, dropout=0.1)
    write_run(tmp_path / "b", warmup_steps=9)
    write_run(tmp_path / "c", steps=80)
    rows, words, _ = compared(tmp_path)
    names = {row[0] for row in rows}
    assert names == {"base", "n_layer=2 dropout=0.1", "warmup_steps=9", "max_steps=80"}
    assert "leave out what most settings have: n_layer=1 dropout=0.0 warmup_steps=100" in words
    assert compared(tmp_path / "a")[0][0][0] == "a", "alone it has the name of its folder"


def test_a_table_fits_a_terminal_and_loses_no_word_of_a_name(tmp_path, capsys, monkeypatch):
    knobs = {"n_layer": 2, "dropout": 0.1, "optimizer": "muon", "weight_of_the_teacher": 0.25}
    write_run(tmp_path / "long", 1.0, **knobs)
    for rate in (0.1, 0.2):
        write_run(tmp_path / f"{rate}", 2.0, peak_lr=rate, info={"ended": None})
    monkeypatch.delenv("COLUMNS", raising=False)
    report.main([str(tmp_path)])
    assert str(tmp_path / "long") in capsys.readouterr().out, "a pipe gets all columns"
    monkeypatch.setenv("COLUMNS", "80")
    report.main([str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    assert max(map(len, lines)) <= 80
    for name, value in knobs.items():
        assert any(f"{name}={value}" in line for line in lines)


HIGHEST = "n_layer=3 is the best and the highest of 3 tried"
LOWEST = "n_layer=1 is the best and the lowest of 3 tried"
EDGES = [((1, 2, 3), 3, HIGHEST), ((1, 2, 3), 1, LOWEST)]
EDGES += [((1, 2, 3), 2, ""), ((1, 2), 2, ""), ((0, 1, 2), 0, "")]


@pytest.mark.parametrize("tried, best, words", EDGES)
def test_a_best_at_the_edge_of_what_was_tried_is_said(tmp_path, tried, best, words):
    for value in tried:
        write_run(tmp_path / str(value), 1.0 if value == best else 2.0, n_layer=value)
    _, said, _ = compared(tmp_path)
    assert words in said and ("tried" in said) == bool(words)


def test_higher_is_better_where_the_metric_has_a_minus(tmp_path):
    for layers, accuracies in ((1, (0.2, 0.5, 0.4)), (2, (0.2, 0.6, 0.3))):
        rows = [evaluation(20 * i, 2.0, val_accuracy=x) for i, x in enumerate(accuracies)]
        knobs = {"best_metric": "-val_accuracy", "n_layer": layers}
        write_run(tmp_path / str(layers), rows=[*rows, *train_rows(40)], **knobs)
    assert results(tmp_path / "2")["best val_accuracy"] == "0.6000 at step 20"
    rows, words, _ = compared(tmp_path)
    assert [row[:2] for row in rows] == [("n_layer=2", "0.6000"), ("n_layer=1", "0.5000")]
    assert "ahead of n_layer=1 by 0.1000." in words


def test_results_are_those_of_the_log_with_their_price(tmp_path, monkeypatch):
    info = {"run": {"world_size": 4}, "state": {"seconds": {"start": 800.0, "train": 1000.0}}}
    found = results(write_run(tmp_path / "a", info=info))
    assert found["best val_loss"] == "1.5000 at step 40" and found["tokens"] == "20,480"
    assert found["tokens/s"] == "102,400" and found["MFU"] == "25.0%"
    assert found["wall time, start included"] == "0:30:00" and found["device-hours"] == "2.000"
    assert not {"GPU utilization, %", "cost"} & found.keys(), "what is not known is left out"
    monkeypatch.setenv("DOLLARS_PER_HOUR", "2.5")
    assert results(tmp_path / "a")["cost"] == "$5.00"
    killed = results(write_run(tmp_path / "b", info=info | {"ended": None}))
    assert killed["cost"] == "at least $5.00"


def test_steps_that_a_stopped_run_took_for_their_rows_alone_count_nowhere(tmp_path):
    info = {"ended": "stopped by SIGTERM", "state": {"step": 38}}
    run = report.read_run(write_run(tmp_path / "a", 0.5, info=info))
    assert run.ended == "stopped by SIGTERM at step 38" and run.best == (4.2, 0)


NULLS = [dict.fromkeys(row) | {"kind": "train", "step": row["step"]} for row in train_rows(9)]
DAMAGES = {
    "no run.json": ("run.json", None),
    "nulls in run.json": ("run.json", '{"run": {"world_size": null}, "config": [], "state": null}'),
    "no log": ("metrics.jsonl", None),
    "an empty log": ("metrics.jsonl", ""),
    "a torn line": ("metrics.jsonl", json.dumps(train_rows(1)[0]) + '\n{"kind": "tra'),
    "nulls": ("metrics.jsonl", "\n".join(map(json.dumps, NULLS)) + "\n"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_reported_alone_and_beside_others(tmp_path, damage):
    name, text = DAMAGES[damage]
    (write_run(tmp_path / "bad") / name).unlink()
    if text is not None:
        (tmp_path / "bad" / name).write_text(text)
    write_run(tmp_path / "good", seed=2)
    for words in (tmp_path / "bad", tmp_path):
        report.main([str(words)])
    assert (tmp_path / "bad" / "report.png").is_file() and (tmp_path / "compare.md").is_file()


def test_a_folder_without_a_run_is_left_out_with_a_line(tmp_path, capsys):
    write_run(tmp_path / "a")
    report.main([str(tmp_path / "a"), str(tmp_path / "none")])
    out = capsys.readouterr().out
    assert f"left out: no run in {tmp_path}/none\n" in out and "a/report.png" in out
    with pytest.raises(BadInput, match="no run in .*none"):
        report.main([str(tmp_path / "none")])


def test_one_run_gets_a_picture_and_a_page_in_its_folder(tmp_path, capsys):
    rows = [*train_rows(40), event(20, "saved", text="not told"), evaluation(40, 1.5)]
    rows += [
        event(30, "resume", text="resumed | \x1b[2Jno change"),
        event(20, "sample", text="old"),
    ]
    folder = write_run(tmp_path / "run,a", rows=rows)
    report.main([str(folder)])
    assert capsys.readouterr().out.endswith(f"{folder}/report.png\n{folder}/report.md\n")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = re.sub(r"(?<=\w) +(?= \|)", "", (folder / "report.md").read_text())
    assert "![Curves](report.png)" in page and "| best val_loss | 1.5000 at step 40 |" in page
    assert "| 30 | resume | resumed \\| [2Jno change |" in page
    assert "`python train.py --seed=1`" in page and "| seed | 1337 | 1 |" in page
    assert not re.search("told|old|n_layer", page)


def test_several_runs_get_theirs_in_the_folder_above_or_where_they_are_told(tmp_path, monkeypatch):
    for name in ("a", "b"):
        write_run(tmp_path / "out" / name, n_layer=ord(name))
    monkeypatch.chdir(tmp_path)
    report.main([])
    assert sorted(path.name for path in Path("out").iterdir()) == ["a", "b"], "only a table"
    report.main(["out/b", "out/a"])
    assert "n_layer=97" in Path("out/compare.md").read_text() and Path("out/compare.png").is_file()
    report.main(["out", "--to=figures/all.svg"])
    assert Path("figures/all.svg").is_file() and "all.svg" in Path("figures/all.md").read_text()
    with pytest.raises(BadInput, match="--to=x.md: expected"):
        report.main(["out", "--to=x.md"])


def legend_of(figure):
    """The words of its legend, which must lie within the figure and cover no panel."""
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert all(not box.overlaps(ax.get_tightbbox()) for ax in figure.axes)
    return [" ".join(text.get_text().split()) for text in legend.texts]


def test_every_line_of_a_run_is_labelled_and_a_forks_number_has_a_panel(tmp_path):
    rows = train_rows(40, agreement=0.5)
    rows[19] |= {"loss": None, "skipped": 1}
    rows += [event(20, "resume"), evaluation(20, 1.4), evaluation(40, 1.5, val_accuracy=0.4)]
    _, _, figure = compared(write_run(tmp_path / "a", rows=rows))
    words = ["training, each step", "training, running mean", "validation", "best"]
    assert legend_of(figure) == [*words, "resumed", "step skipped"]
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels[0] == "loss (nats)" and {"agreement", "gradient norm"} <= {*labels}
    assert len(labels) == len({*labels}) and all(ax.get_xlabel() == "step" for ax in figure.axes)
    (star,) = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert star.get_xydata().tolist() == [[20, 1.4]]
    assert legend_of(compared(write_run(tmp_path / "b"))[2]) == words


def test_many_settings_share_colours_with_their_seeds_and_the_rest_is_grey(tmp_path):
    for i, seed in itertools.product(range(10), (1, 2)):
        knobs = {"peak_lr": i / 100 + 0.01, "n_layer": 100_000_000 + i, "dropout": i / 10}
        write_run(tmp_path / f"{i},{seed}", 1 + i, seed, **knobs)
    _, _, figure = compared(tmp_path)
    words = legend_of(figure)
    result = "1.0000 ± 0.0000 (n=2)"
    assert words[0] == f"n_layer=100000000 peak_lr=0.01 dropout=0.0: {result}"
    assert len(words) == 8 and words[-1] == "other settings"
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [c for c in (*report.COLOURS, *3 * [report.GREY]) for _ in range(2)]


def test_the_axis_is_tokens_where_batches_differ(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / str(batch), batch=batch) for batch in (32, 64)]
    for axis, end in {"auto": 512 * 40, "step": 40, "time": 40 * 5 / 60_000}.items():
        monkeypatch.setattr(report, "axis", axis)
        ax = compared(*folders)[2].axes[0]
        assert [line.get_xdata()[[0, -1]].tolist() for line in ax.lines] == [[0, end]] * 2
    assert ax.get_xlabel() == "training time (minutes)"


def test_a_long_line_keeps_its_peaks_and_what_is_high_presses_nothing_flat(tmp_path):
    rows = train_rows(20_000)
    rows[12_345]["loss"] = 9.0
    rows[0]["loss"] = 1e6
    ax = compared(write_run(tmp_path / "a", rows=rows, steps=20_000))[2].axes[0]
    assert len(ax.lines[0].get_xdata()) <= report.MAX_POINTS and 9.0 in ax.lines[0].get_ydata()
    low, high = ax.get_ylim()
    assert 1.3 < low < 1.7 and 3 < high < 4
    for i, loss in enumerate((1.5, 1.6, 1.7, 9.0)):  # nor does a rate that is too high
        write_run(tmp_path / f"rates/{i}", loss, n_layer=i)
    assert compared(tmp_path / "rates")[2].axes[0].get_ylim()[1] < 2
