"""docs/scaling.md prints what docs/scaling.py computes, and that is what its sources say."""

import importlib.util
import re
import subprocess
import sys

import pytest
from conftest import REPO


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", REPO / "docs/scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_those_of_the_script():
    command = [sys.executable, REPO / "docs/scaling.py"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=100
    ).stdout
    page = (REPO / "docs/scaling.md").read_text()
    tables = [re.findall(r"(?:^\|.*\n)+", text, re.M) for text in (printed, page)]
    assert len(tables[0]) == 4 and tables[0] == tables[1]
    (sentence,) = re.findall(r"^Checkpoint: .*", printed, re.M)
    assert sentence in page


def test_the_arithmetic_is_that_of_its_sources(scaling):
    # a ring of 2 sends and receives each byte once
    rate = scaling.DATASHEET["nvlink"] * scaling.ASSUMED["link"]
    assert scaling.all_reduce_seconds(1e9, 2) == pytest.approx(1e9 / rate)
    # Young's interval loses less than its neighbours, when failures are rare
    stall, between = 3.0, 178_000.0
    best = scaling.best_interval(stall, between)
    at_best = scaling.lost(best, stall, between)
    assert all(scaling.lost(best * near, stall, between) > at_best for near in (0.9, 1.1))
    # Llama 3: 16,384 GPUs stopped every three hours or so (419 times in 54 days)
    assert scaling.GPU_HOURS_PER_FAILURE / 16_384 == pytest.approx(3.09, abs=0.01)


def test_the_bytes_summed_are_those_of_the_gradients(scaling):
    config = scaling.GPTConfig(65, 16, 2, 32)
    params, flops = scaling.sizes(config)
    model = scaling.GPT(config)
    assert params == sum(weight.numel() for weight in model.parameters())
    assert flops == model.flops_per_token()
