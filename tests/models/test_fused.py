"""Which modules of a model are replaced while it runs, and that no trace is left afterwards."""

import copy

import pytest
import torch
from test_adapter import Packing, eager_logits, row_errors, sequences_of
from tiny_models import tiny_model
from torch import nn

from pagetile.errors import UnsupportedError
from pagetile.models import ForwardBatch, fused, load_model, paged_model
from pagetile.models.fused import find_impl, find_replacements
from pagetile.models.fusion import Fusion


@pytest.fixture(autouse=True)
def only_modules(monkeypatch):
    """Replace only norms and rotary embeddings: whole layers have their own tests."""
    monkeypatch.setattr(
        paged_model, "fuse", lambda model, attention, limit, found, impl: Fusion([*found])
    )


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request, monkeypatch):
    """Which implementation models loaded from here on run, on the CPU as on a GPU."""
    monkeypatch.setattr(paged_model, "find_impl", lambda device, dtype: request.param)
    return request.param


def attention_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Attention")]


def replaced(model, impl="reference"):
    """Names of the modules that are replaced, without the numbers of their layers."""
    names = {module: name for name, module in model.named_modules()}
    found = find_replacements(model, attention_of(model), impl)
    assert all(attribute == "forward" for _, attribute, _ in found)
    assert len({module for module, _, _ in found}) == len(found)
    return {names[module].rpartition(".")[2] for module, _, _ in found}


BOTH = {"input_layernorm", "post_attention_layernorm"}
AROUND = BOTH | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", BOTH | {"norm", "self_attn"}),
        ("qwen3", BOTH | {"norm", "q_norm", "k_norm", "self_attn"}),
        ("gemma2", AROUND | {"norm", "self_attn"}),
        ("gemma3", AROUND | {"norm", "q_norm", "k_norm", "self_attn"}),
        ("gpt_oss", BOTH | {"norm", "self_attn"}),
        ("phi3", BOTH | {"norm", "self_attn"}),  # turns a part of a head
        ("deepseek_v3", BOTH | {"norm", "q_a_layernorm", "kv_a_layernorm", "self_attn"}),
        ("glm", BOTH | {"norm"}),  # turns neighbours
        ("gpt_neox", {"attention"}),  # subtracts means
        ("gpt2", set()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_rotary_embeddings_are_known_by_what_they_compute(family, names, dtype):
    assert replaced(tiny_model(family, dtype=dtype)) == names


def kinds_of(model, monkeypatch):
    """The kinds of norms that are run."""
    seen = []

    def watch(x, weight, *, kind, **options):
        seen.append(kind)
        return rms_norm(x, weight, kind=kind, **options)

    rms_norm = fused.rms_norm
    norms = [(m, f) for m, _, f in find_replacements(model, [], "reference")]
    monkeypatch.setattr(fused, "rms_norm", watch)
    for module, forward in norms:
        x = torch.randn(1, 3, len(module.weight)).to(module.weight)
        assert torch.equal(forward(x), module(x))
    return set(seen)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "rounded"), ("gemma2", "shifted"), ("gpt_oss", "scaled"), ("olmo2", "scaled")],
)
@torch.no_grad()
def test_in_16_bits_a_norm_rounds_where_its_own_does(family, kind, monkeypatch):
    assert kinds_of(tiny_model(family, dtype=torch.bfloat16), monkeypatch) == {kind}


# --- norms that are left alone --------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size=24, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class WithAnotherEps(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class OfGroups(Norm):
    def forward(self, x):
        return super().forward(x.unflatten(-1, (2, -1)).transpose(-1, -2)).transpose(-1, -2)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Gated(Norm):
    def forward(self, x, gate=None):
        return super().forward(x)


class WithMore(Norm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(24))


class Wide(Norm):
    def forward(self, x):
        return super().forward(x).double()


class Waiting(Norm):
    def forward(self, x):
        raise RuntimeError("not now")


def with_a_forward_of_its_own():
    norm = Norm()
    norm.forward = lambda x: x  # as accelerate's hooks do
    return norm


def test_whatever_its_class_a_norm_is_replaced():
    assert replaced(nn.Sequential(Norm(), nn.RMSNorm(24, eps=1e-6))) == {"0", "1"}


@pytest.mark.parametrize(
    "make",
    [WithAnotherEps, OfGroups, Centred, Gated, WithMore, Wide, Waiting, with_a_forward_of_its_own,
     lambda: nn.LayerNorm(24), lambda: nn.LayerNorm(24, bias=False), lambda: nn.RMSNorm(24),
     lambda: Norm().double(), lambda: nn.Linear(24, 1, bias=False),
     lambda: torch.jit.script(nn.LayerNorm(24))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_what_is_no_such_norm_is_left_alone(make):
    assert replaced(nn.Sequential(make())) == set()


def test_finding_out_leaves_a_module_as_it_was():
    model = tiny_model("gemma2")
    before = copy.deepcopy(model.state_dict())
    attributes = [list(vars(module)) for module in model.modules()]
    weights = [*model.parameters()]
    replaced(model)
    assert [list(vars(module)) for module in model.modules()] == attributes
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@torch.no_grad()
def test_a_weight_is_read_when_it_is_used(impl):
    norm = Norm()
    [(_, _, forward)] = find_replacements(norm, [], impl)
    x = torch.randn(3, 24)
    norm.weight = nn.Parameter(torch.full((24,), 2.0))
    torch.testing.assert_close(forward(x), norm(x))


@torch.no_grad()
def test_the_module_computes_calls_that_the_kernel_refuses(impl):
    norm = Norm().half()
    [(_, _, forward)] = find_replacements(norm, [], impl)
    for x in (torch.randn(3, 24), torch.randn(2, 3, 4, 48).half()[:, :2, :3, ::2]):
        torch.testing.assert_close(forward(x), norm(x), rtol=2e-3, atol=2e-3)


# --- rotary embeddings ----------------------------------------------------------------------


@torch.no_grad()
def test_a_rotary_embedding_called_otherwise_is_the_models_own(impl):
    model = tiny_model("llama")
    found = find_replacements(model, attention_of(model), impl)
    [*_, (module, _, forward)] = found
    turn = forward.__func__.__globals__[fused.ROTARY]
    own = type(module).forward.__globals__[fused.ROTARY]
    q, k, angles = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 2, 16), torch.randn(2, 1, 3, 16)
    for options in ({"unsqueeze_dim": 2}, {}):
        if not options:
            q, k, angles = q.transpose(1, 2), k.transpose(1, 2), angles.double()
        for computed, reference in zip(
            turn(q, k, *angles, **options), own(q, k, *angles, **options), strict=True
        ):
            assert torch.equal(computed, reference)
    with pytest.raises(TypeError):
        turn(q, k, *angles, nonsense=1)


def test_nothing_global_changes():
    model = tiny_model("qwen3")
    module = attention_of(model)[0]
    forward = type(module).forward
    before = dict(forward.__globals__)
    find_replacements(model, attention_of(model), "reference")
    assert forward.__globals__ == before
    assert type(module).forward is forward


# --- driven models --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "phi3", "deepseek_v3", "glm"]
)
def test_logits_stay_the_models_own(family, impl):
    if impl == "triton" and family == "gpt_oss":
        pytest.skip("seconds under the interpreter; test_fusion.py runs its kernels")
    model = tiny_model(family)
    sequences = sequences_of(model.config.vocab_size)
    expected = torch.cat(eager_logits(model, sequences))
    logits = torch.cat(Packing(load_model(model), sequences, 4, seed=0).run())
    assert row_errors(logits, expected).max() < 64 * torch.finfo(torch.float32).eps


def test_a_driven_model_runs_ours_and_nothing_of_it_stays(impl, monkeypatch):
    model = tiny_model("qwen3")
    paged = load_model(model)
    calls = []

    def watch(name, call):
        def counted(*args, **options):
            calls.append(name)
            return call(*args, **options)

        monkeypatch.setattr(fused, name, counted)

    watch("rms_norm", fused.rms_norm)
    watch("rotate", fused.rotate)
    packing = Packing(paged, sequences_of(96), 4, seed=0)
    step = packing.step([1, 2, 3])
    paged.forward(step)
    assert (calls.count("rms_norm"), calls.count("rotate")) == (3 * 4 + 1, 3)
    own = [*calls]
    model(torch.tensor([[1, 2, 3]]))
    assert calls == own
    with pytest.raises(IndexError):
        paged.forward(
            ForwardBatch(
                step.token_ids + 96, step.positions, step.batch, step.slot_mapping, step.logits_rows
            )
        )
    assert not any("forward" in vars(module) for module in model.modules())
    paged.bind(None)
    with pytest.raises(UnsupportedError):
        paged.forward(step)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_failure_within_a_replacement_leaves_nothing_behind(impl, monkeypatch):
    model = tiny_model("llama")
    paged = load_model(model)
    step = Packing(paged, sequences_of(96), 4, seed=0).step([1, 2, 3])

    def fail(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(fused, "rotate", fail)
    with pytest.raises(KeyboardInterrupt):
        paged.forward(step)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation != "pagetile"


def test_a_forward_that_is_set_on_a_module_later_is_used(impl):
    model = tiny_model("llama")
    paged = load_model(model)
    norm, seen = model.model.norm, []

    def forward(x):
        seen.append(x)
        return type(norm).forward(norm, x)

    norm.forward = forward
    norm.register_forward_hook(lambda module, args, out: seen.append(out))
    paged.forward(Packing(paged, sequences_of(96), 4, seed=0).step([1, 2, 3]))
    assert len(seen) == 2
    assert norm.forward is forward


def test_hooks_see_the_models_own_output(impl):
    model = tiny_model("llama")
    seen = []
    model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    paged = load_model(model)
    seen.clear()
    logits = paged.forward(Packing(paged, sequences_of(96), 4, seed=0).step([1, 2, 3]))
    torch.testing.assert_close(model.lm_head(seen[0])[0], logits)


def test_a_replacement_that_is_wrong_does_not_pass_the_proof(monkeypatch):
    monkeypatch.setattr(paged_model, "find_impl", lambda device, dtype: "reference")
    rotate = fused.rotate
    model = tiny_model("llama")
    found = find_replacements(model, attention_of(model), "reference")
    monkeypatch.setattr(paged_model, "find_replacements", lambda *args: found)
    load_model(model)
    monkeypatch.setattr(fused, "rotate", lambda q, k, cos, sin, **o: rotate(q, k, sin, cos, **o))
    with pytest.raises(UnsupportedError, match="its logits differ"):
        load_model(model)


def test_on_a_cpu_norms_are_replaced_where_kernels_take_their_type():
    assert find_impl(torch.device("cpu"), torch.float32) == "cpu"
    assert find_impl(torch.device("cpu"), torch.float64) is None
    model = tiny_model("olmo2")  # its layers are not fused
    paged = load_model(model)
    replaced = {module for module, name, _ in paged._attributes if name == "forward"}
    norms = {module for module in model.modules() if "Norm" in type(module).__name__}
    assert norms
    assert replaced == norms


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_found():
    device = torch.device("cuda")
    assert find_impl(device, torch.bfloat16) == "triton"
    assert find_impl(device, torch.float64) is None
