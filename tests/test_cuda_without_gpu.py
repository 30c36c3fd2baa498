"""What can be shown of CUDA without a GPU. torch's fake tensors have a shape, a dtype and a device,
and no numbers: on cuda:0 they show, without a driver, that no operation mixes devices, where the
host waits, and which operators run. They compute and time nothing: `bash tests/gpu.sh` does."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import model
import train
from plumbing import compiler, data
from plumbing.snapshot import by_path

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs torch's CUDA build; see CONTRIBUTING.md"
)
CUDA = torch.device("cuda:0")
CASES = {
    "float32": {"dtype": "float32"},
    "bfloat16, dropout, EMA": {"dropout": 0.1, "ema_decay": 0.9},
    "float16 with its scaler": {"dtype": "float16"},
    "accumulation, smoothed labels": {"accum_steps": 4, "batch_size": 2, "label_smoothing": 0.1},
    "checkpointing": {"grad_checkpoint": True, "dropout": 0.1, "n_layer": 2},
    "n-grams and convolution": {"ngram_rows": 512, "conv_width": 4},
    **{name: {"optimizer": name} for name in ("adam", "sgd", "momentum", "muon")},
}
FAULTS = [  # (what it is found by, what is replaced, by what)
    ("two devices, cuda:0 and cpu", "model.norm", lambda x: x + torch.ones(x.size(-1))),
    ("host waits: _local_scalar_dense", "model.norm", lambda x: x * x.detach().max().item()),
    ("host waits: copy from cuda:0 to cpu", "model.norm", lambda x: x * x.detach().max().cpu()),
    ("host waits: copy from cpu", "model.norm", lambda x: x * torch.tensor(2.0, device=CUDA)),
    ("host waits: copy from cpu", "torch.Tensor.pin_memory", lambda tensor: tensor),
    ("aten.nonzero", "model.norm", lambda x: x + x[x > 0].sum()),
    ("not deterministic: cumsum", "model.norm", lambda x: x.float().cumsum(-1).to(x.dtype)),
    ("deterministic: nll_loss2d", "model.cross_entropy", lambda x, y, s: F.cross_entropy(x.mT, y)),
    ("deterministic: upsample", "model.F.silu", lambda x: F.interpolate(x, 96, mode="linear")),
]


# ---- in place of the driver ----------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    """Collects the operators that run, and those for which the host waits."""

    def __init__(self):
        super().__init__()
        self.operators, self.waits = set(), []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.partition("::")[2]
        self.operators.add(name)
        if name == "_local_scalar_dense":  # reads a number
            self.waits.append(name)
            return 1.0 if args[0].is_floating_point() else 1
        if name == "_fused_sgd_":  # which has no implementation for fake tensors
            assert {tensor.device for tensors in args for tensor in tensors} == {CUDA}
            return None
        result = operator(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source = args[name == "copy_"]
            in_background = (kwargs or {}).get("non_blocking") and hasattr(source, "page_locked")
            if source.device != result.device and not in_background:
                self.waits.append(f"copy from {source.device} to {result.device}")
        return result


@torch.no_grad()
def backward(loss):
    """Calls the nodes that Tensor.backward() calls, in its order; that asks the driver for streams."""
    gradients = {loss.grad_fn: [torch.ones_like(loss)]}
    while gradients:
        node = max(gradients, key=lambda node: node._sequence_nr())  # the newest; those of weights
        results = node(*gradients.pop(node))
        results = results if isinstance(results, tuple) else (results,)
        for result, (following, n) in zip(results, node.next_functions, strict=False):
            if following is not None and result is not None:
                expected = following._input_metadata
                result = result.sum_to_size(expected[n].shape).to(expected[n].dtype)
                others = gradients.setdefault(following, [None] * len(expected))
                others[n] = result if others[n] is None else others[n] + result


def to_device(module, device):
    """Module.to() cannot replace a fake tensor by one on another device."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            setattr(part, name, torch.nn.Parameter(weight.detach().to(device)))
        part._buffers.update({name: each.to(device) for name, each in part._buffers.items()})
    return module


def fused_attention(q, k, v, attn_mask, is_causal, dropout_p):
    """What F.scaled_dot_product_attention calls on a GPU from compute capability 8 on."""
    if train.dtype == "float32":
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, attn_mask, True, dropout_p, is_causal)[0]
    q, k, v = (x.to(getattr(torch, train.dtype)) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def tensors_of(run, numbers):
    """{name: (device, dtype, shape)} of all that a step moves, but for the random state."""
    moved = by_path({"numbers": numbers, **run.checkpoint(), "rng": None})
    tensors = {name: leaf for name, leaf in moved.items() if torch.is_tensor(leaf)}
    return {name: (leaf.device, leaf.dtype, leaf.shape) for name, leaf in tensors.items()}


REPLACED = {
    "torch.Tensor.backward": backward,
    "torch.Tensor.pin_memory": lambda tensor: setattr(tensor, "page_locked", True) or tensor,
    "torch.nn.Module.to": to_device,
    "torch.nn.functional.scaled_dot_product_attention": fused_attention,
    "torch.cuda.is_bf16_supported": lambda: True,
    "torch.amp.autocast_mode.is_autocast_available": lambda kind: True,
    "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    "torch.cuda.get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.get_device_name": lambda device: "a GPU",
    "torch.cuda.synchronize": lambda: None,
    "torch.cuda.reset_peak_memory_stats": lambda device: None,
    "torch.cuda.max_memory_allocated": lambda device: 10**9,
    "torch.cuda.mem_get_info": lambda device: (10**10, 10**10),
    "plumbing.snapshot.set_rng_state": lambda rng, device: None,
    "plumbing.checkpoint.set_rng_state": lambda rng, device: None,
    "plumbing.audit.hashes_of": tensors_of,  # there are no bits to compare
    "plumbing.compiler.checksum": lambda tensor: 0,
    "plumbing.machine.choose_device": lambda name: CUDA,
}


@pytest.fixture
def on_cuda(data_dir, tmp_path, monkeypatch):
    """A context on_cuda(name=value, ...): (a run of these knobs on cuda:0, its Dispatched)."""

    @contextlib.contextmanager
    def on_cuda(**values):
        flags = TINY | {"data_dir": data_dir, "out_dir": tmp_path, "dtype": "bfloat16"} | values
        argv = [f"--{name}={value}" for name, value in flags.items()]
        with monkeypatch.context() as patch:
            for name, replacement in REPLACED.items():
                patch.setattr(name, replacement)
            with FakeTensorMode(allow_non_fake_inputs=True), Dispatched() as dispatched:
                with train.build(argv) as run:
                    yield run, dispatched

    yield on_cuda
    torch.use_deterministic_algorithms(False)


# ---- what is shown -------------------------------------------------------------------------------


def raising_in_deterministic_mode(operators):
    """Those of which torch documents that they raise on CUDA; of NLLLoss, only the one of images."""
    documented = torch.use_deterministic_algorithms.__doc__.partition("operations will throw")[2]
    names = re.findall(r"\* :\w+:`torch\.(?:\w+\.)*(\w+)`", documented)
    names += [f"upsample_{mode}" for mode in re.findall(r"- ``(\w+)``", documented)]
    assert len(names) > 25 and "NLLLoss" in names
    stems = [name.replace("_", "").lower().replace("nllloss", "nllloss2d") for name in names]
    return [name for name in operators if name.replace("_", "").startswith(tuple(stems))]


def live_a_day(run, dispatched):
    """Batches, the warm-up pass, three steps (the second is audited), rows, evaluation, sampling.
    Raises RuntimeError, or AssertionError for a wait or an operator that is not deterministic."""

    class NoWaits(train.Hook):
        def step(self, run, take, *batch_and_rate):
            dispatched.waits.clear()
            numbers = take()
            assert not dispatched.waits, f"host waits: {dispatched.waits[0]}"
            return numbers

    dispatched.waits.clear()
    batches = [data.to_device(run.train_data[8 * n, 8], CUDA) for n in range(3)]
    assert not dispatched.waits, f"host waits: {dispatched.waits[0]}"
    run.hooks.insert(0, NoWaits())  # around the step alone: the audit may wait
    run.batches = ((*batch, 0.0) for batch in batches)
    trained = compiler.warm_up(run, False, train.forward_backward, lambda: batches[0])
    steps = [train.take_step(run, trained) for _ in batches]
    assert {device for device, *_ in tensors_of(run, steps[-1][1]).values()} == {CUDA}
    assert len(train.finish_rows(run, steps)) == 3 and train.evaluate(run)
    with train.autocast(CUDA):
        logits = run.model(batches[0][0])
    assert (logits.device, logits.dtype) == (CUDA, getattr(torch, train.dtype))
    start = torch.zeros(1, 1, dtype=torch.long, device=CUDA)
    ids = [*model.generate(run.model.eval(), start, 8, train.block_size, 50, 0.8, top_k=5)]
    assert {each.device for each in ids} == {CUDA}
    raising = raising_in_deterministic_mode(dispatched.operators)
    assert not raising, f"not deterministic: {', '.join(sorted(raising))}"


@pytest.mark.parametrize("case", CASES)
def test_no_operation_mixes_devices_or_waits_or_raises_in_deterministic_mode(case, on_cuda):
    with on_cuda(**CASES[case]) as (run, dispatched):
        live_a_day(run, dispatched)


@pytest.mark.parametrize("found_by, name, fault", FAULTS)
def test_each_fault_is_found(found_by, name, fault, on_cuda, monkeypatch):
    with on_cuda() as (run, dispatched), monkeypatch.context() as patch:
        patch.setattr(name, fault)
        with pytest.raises((RuntimeError, AssertionError), match=found_by):
            live_a_day(run, dispatched)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "momentum"])
def test_a_checkpoint_written_on_a_cpu_goes_on_on_the_gpu(optimizer, on_cuda, run_train):
    knobs = {"optimizer": optimizer, "ema_decay": 0.9, "dtype": "float32", "schedule": "constant"}
    written = run_train("cpu", *(f"--{name}={value}" for name, value in knobs.items()))
    with on_cuda(**knobs, out_dir=written.out_dir, max_steps=20) as (run, dispatched):
        assert run.state["step"] == 12
        moments = tensors_of(run, {})
        assert {device for device, *_ in moments.values()} == {CUDA}
        assert any(name.startswith("optimizer/0/state/") for name in moments)
        live_a_day(run, dispatched)


def test_backward_here_is_torchs():
    def gradients(backward):
        torch.manual_seed(0)
        weights = [torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)]
        backward((F.layer_norm(weights[0] * weights[1], (4,)).tanh() @ weights[0].T).exp().sum())
        return [weight.grad for weight in weights]

    torch.testing.assert_close(gradients(backward), gradients(torch.Tensor.backward))
