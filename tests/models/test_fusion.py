"""Which decoder layers are fused, that they compute the same, and that the model is unchanged."""

import copy
import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_adapter import Packing, eager_logits, row_errors, sequences_of
from tiny_models import tiny_model
from torch import nn
from torch.nn import functional

from pagetile import BlockPool, KVCache
from pagetile.device import DeviceInfo
from pagetile.errors import UnsupportedError
from pagetile.models import linears, load_model, paged_model
from pagetile.models.forward_batch import ForwardBatch
from pagetile.models.fusion import layer as fused_layer
from pagetile.models.fusion import trace
from pagetile.ops.paged_attention import PagedBatch

EPS = torch.finfo(torch.float32).eps
FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "gpt_oss")
LIKE_LLAMA = ("llama", "qwen2", "qwen3", "mistral", "gemma2")  # others have all that these have


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request, monkeypatch):
    """Which implementation models loaded from here on run, on the CPU as on a GPU."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the models are on the CPU: tests/engine runs fused layers on a GPU")
    monkeypatch.setattr(paged_model, "find_impl", lambda device, dtype: request.param)
    return request.param


@pytest.fixture(params=["cpu", "reference"])
def native(request, monkeypatch):
    """Either implementation that needs no interpreter here."""
    monkeypatch.setattr(paged_model, "find_impl", lambda device, dtype: request.param)


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setattr(paged_model, "find_impl", lambda device, dtype: "reference")


def layers_of(model):
    return model.model.layers


def logits_error(model, paged=None, seed=0):
    sequences = sequences_of(model.config.vocab_size)
    expected = torch.cat(eager_logits(model, sequences))
    paged = load_model(model) if paged is None else paged
    logits = torch.cat(Packing(paged, sequences, 4, seed=seed).run())
    return row_errors(logits, expected).max()


# --- what is recognised ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_layers_of_the_common_structure_are_fused(family, dtype, reference):
    model = tiny_model(family, dtype=dtype)
    paged = load_model(model)
    assert list(paged.fused_layers) == [f"model.layers.{n}" for n in range(3)]
    assert set(paged.fused_layers.values()) == {None}


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "attention is not the first"),
        ("opt", "attention is not the first"),
        ("gpt_neox", "attention is not the first"),
        ("olmo2", "not of heads"),
        ("stablelm", "attention is not the first"),
        ("glm", "another formula"),
        ("deepseek_v3", "the products of its attention give"),
    ],
)
def test_layers_of_another_structure_are_not_fused(family, reason, reference):
    model = tiny_model(family)
    paged = load_model(model)
    assert len(paged.fused_layers) == 3
    assert all(reason in found for found in paged.fused_layers.values())
    assert logits_error(model, paged) < 64 * EPS


def test_a_layer_that_shares_keys_is_not_fused(reference):
    paged = load_model(tiny_model("gemma3n"))
    assert sum("keys of another" in str(why) for why in paged.fused_layers.values()) == 2


def test_a_layer_that_is_called_by_names_is_not_fused(reference):
    """The model was refused with the text of an IndexError."""
    paged = load_model(tiny_model("longcat_flash"))
    assert len(paged.fused_layers) == 4
    assert all("hidden states first" in str(why) for why in paged.fused_layers.values())


@pytest.mark.parametrize("family", FUSED)
def test_logits_stay_the_models_own(family, impl):
    if impl == "triton" and family in LIKE_LLAMA:
        pytest.skip("seconds under the interpreter, for kernels that another family runs")
    model = tiny_model(family)
    paged = load_model(model)
    assert set(paged.fused_layers.values()) == {None}
    assert logits_error(model, paged) < 64 * EPS


def test_bfloat16_is_as_near_to_the_truth_as_its_own_eager_forward(native):
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    sequences = sequences_of(model.config.vocab_size)
    truth = torch.cat(eager_logits(exact, sequences))
    eager = row_errors(torch.cat(eager_logits(model, sequences)), truth)
    paged = load_model(model)
    computed = row_errors(torch.cat(Packing(paged, sequences, 4, seed=0).run()), truth)
    assert computed.median() <= 2 * eager.median()
    assert computed.max() <= 2 * eager.max()


@pytest.fixture(scope="module")
def wide():
    """A model whose products are of the sizes that Hopper's kernels are chosen for."""
    model = tiny_model(
        "qwen3", dtype=torch.bfloat16, hidden_size=256, head_dim=64, intermediate_size=2048,
        max_position_embeddings=512,
    )  # fmt: skip
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    model.to("cuda")
    return model, exact, load_model(model)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 16, 17, 32, 33, 64, 65, 256, 257])
def test_any_number_of_tokens_is_as_near_to_the_truth_on_a_gpu(num_tokens, wide, monkeypatch):
    model, exact, paged = wide
    assert set(paged.fused_layers.values()) == {None}
    ids = torch.randint(96, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    [truth] = eager_logits(exact, [ids])
    [eager] = eager_logits(model, [ids.cuda()])
    used = set()
    for name in ("small_linear", "partial_products"):
        run = getattr(fused_layer, name)

        def watched(*args, run=run, impl, **options):
            used.add(impl)
            return run(*args, impl=impl, **options)

        monkeypatch.setattr(fused_layer, name, watched)
    paged.bind(KVCache(paged.layers, BlockPool(17, 16), dtype=torch.bfloat16, device="cuda"))
    numbers = torch.arange(512, device="cuda")
    lengths, starts = numbers[num_tokens : num_tokens + 1].int(), numbers[:2].int() * num_tokens
    batch = PagedBatch(numbers[None, :17].int(), lengths, starts, num_tokens, num_tokens)
    at = numbers[:num_tokens]
    logits = paged.forward(ForwardBatch(ids.cuda(), at, batch, at, at)).cpu()
    computed, own = row_errors(logits, truth), row_errors(eager.cpu(), truth)
    assert computed.median() <= 2 * own.median()
    assert computed.max() <= 2 * own.max()
    if DeviceInfo.of(torch.device("cuda")).capability[0] == 9:
        assert ("hopper" in used) == (num_tokens <= 16)
        assert ("hopper_ring" in used) == (16 < num_tokens <= 256)


# --- what is nearly the structure ------------------------------------------------------------


class ClampedLinear(nn.Linear):
    """As OLMo's ``clip_qkv``: a limit that no number reaches with these weights."""

    def forward(self, x):
        return super().forward(x).clamp(-30, 30)


def clamp_a_product(layer):
    layer.self_attn.k_proj.__class__ = ClampedLinear


def scale_queries_of_late_positions(layer):
    own = type(layer.self_attn)

    class Scaled(own):
        def forward(self, hidden_states, position_embeddings, *args, position_ids=None, **options):
            scale = 1 + (position_ids[0, :, None] >= 200) * 0.1
            cos, sin = (x * scale for x in position_embeddings)
            return super().forward(
                hidden_states, (cos, sin), *args, position_ids=position_ids, **options
            )

    layer.self_attn.__class__ = Scaled


def scale_the_residual(layer):
    own = type(layer)

    class Scaled(own):
        def forward(self, hidden_states, **options):
            return super().forward(hidden_states, **options) * 1.001

    layer.__class__ = Scaled


def gate_the_heads(layer):
    class Gated(nn.Linear):
        def forward(self, x):
            return super().forward(x * torch.sigmoid(x))

    layer.self_attn.o_proj.__class__ = Gated


def add_a_norm(layer):
    layer.register_module("extra", nn.LayerNorm(48))
    own = type(layer)

    class Normed(own):
        def forward(self, hidden_states, **options):
            return self.extra(super().forward(hidden_states, **options))

    layer.__class__ = Normed


@pytest.mark.parametrize(
    "change",
    [clamp_a_product, scale_queries_of_late_positions, scale_the_residual, gate_the_heads,
     add_a_norm],
)  # fmt: skip
def test_a_layer_that_differs_a_little_is_left_alone(change, native):
    model = tiny_model("llama")
    change(layers_of(model)[1])
    paged = load_model(model)
    fused = [why is None for why in paged.fused_layers.values()]
    assert fused == [True, False, True], paged.fused_layers
    assert logits_error(model, paged) < 64 * EPS


def test_a_feed_forward_module_of_another_kind_is_called(native):
    model = tiny_model("llama")

    class Squared(type(layers_of(model)[1].mlp)):
        def forward(self, x):
            return self.down_proj(functional.relu(self.gate_proj(x)).square() * self.up_proj(x))

    layers_of(model)[1].mlp.__class__ = Squared
    paged = load_model(model)
    assert set(paged.fused_layers.values()) == {None}
    seen = []
    layers_of(model)[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out))
    assert logits_error(model, paged) < 64 * EPS
    assert seen


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_every_activation_is_told_from_the_others(activation, reference):
    model = tiny_model("llama", hidden_act=activation)
    paged = load_model(model)
    fused = [value.__self__ for _, name, value in paged._attributes
             if name == "forward" and isinstance(getattr(value, "__self__", None),
                                                 fused_layer.FusedLayer)]  # fmt: skip
    known = {"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, activation)
    assert [layer.structure.mlp.activation for layer in fused] == [known] * 3


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
def test_a_models_state_is_what_it_was(family, reference, tmp_path):
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    parameters = [*model.parameters()]
    load_model(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[name], x) for name, x in after.items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(before[name], x) for name, x in again.items())


def test_nothing_is_held_twice(reference):
    model = tiny_model("qwen2")
    load_model(model)
    memories = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(memory.nbytes() for memory in memories.values())
    assert held == sum(p.numel() * p.element_size() for p in model.parameters())
    attention, mlp = layers_of(model)[0].self_attn, layers_of(model)[0].mlp
    for modules in (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (mlp.gate_proj, mlp.up_proj),
    ):
        for name in ("weight", "bias"):
            parts = [getattr(module, name) for module in modules]
            if parts[0] is not None:
                assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


PARTLY_FUSED = ("gemma3n", "qwen3_moe")  # layers that share keys are not, in the first


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("family", [*FUSED, *PARTLY_FUSED])
def test_merged_weights_are_the_models_own_parameters(family, reference, monkeypatch):
    """Merged weights: queries, keys and values at once, and the gate with the up projection."""
    model = tiny_model(family)
    paged = load_model(model)
    parameters = [*model.parameters()]
    memories = {storage_of(p): p.untyped_storage().nbytes() for p in parameters}
    held = {storage_of(p): 0 for p in parameters}
    for parameter in parameters:
        held[storage_of(parameter)] += parameter.nbytes
    assert memories == held, "a parameter leaves memory behind"

    read = []
    linear = functional.linear
    monkeypatch.setattr(
        fused_layer, "functional",
        SimpleNamespace(linear=lambda x, *rest: read.append(rest) or linear(x, *rest)),
    )  # fmt: skip
    monkeypatch.setattr(fused_layer.FusedLayer, "_choose", lambda *args, **options: "")
    monkeypatch.setattr(fused_layer.FusedLayer, "_choose_for_parts", lambda *args: "")
    paged.forward(Packing(paged, sequences_of(model.config.vocab_size), 4, seed=0).step([1, 2, 3]))
    merged = 0
    for weight, bias in read:
        for tensor in (weight,) if bias is None else (weight, bias):
            assert storage_of(tensor) in held, "a second copy"
            inside = [p for p in parameters if storage_of(p) == storage_of(tensor)]
            assert sum(p.numel() for p in inside) == tensor.numel()
            merged += tensor is weight and len(inside) > 1
    num_fused = sum(why is None for why in paged.fused_layers.values())
    # The checkpoints of phi3 have both merged, and where experts follow there is no gate to merge.
    number = {"phi3": 0, "mixtral": 3, "gpt_oss": 3, "qwen3_moe": 3 + 1}.get(family, 2 * num_fused)
    assert merged == number


def test_weights_that_are_loaded_later_count(native):
    model, other = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    paged = load_model(model)
    model.load_state_dict(other.state_dict())
    assert logits_error(other, paged) < 64 * EPS
    assert logits_error(model, paged) < 64 * EPS


def test_a_weight_or_its_memory_that_is_replaced_later_counts(impl):
    model = tiny_model("qwen2")
    paged = load_model(model)
    assert logits_error(model, paged) < 256 * EPS  # what is kept of a run is kept now
    layer = layers_of(model)[1]
    for module in (layer.self_attn.k_proj, layer.mlp.up_proj, layer.input_layernorm):
        module.weight = nn.Parameter(-1.5 * module.weight.detach())
    for module in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.post_attention_layernorm):
        module.weight.data = -1.5 * module.weight.data
    assert logits_error(model, paged) < 256 * EPS


def test_two_paged_models_of_one_model_share_its_weights(reference):
    model = tiny_model("llama")
    first = load_model(model)
    address = layers_of(model)[0].self_attn.q_proj.weight.data_ptr()
    second = load_model(model)
    assert layers_of(model)[0].self_attn.q_proj.weight.data_ptr() == address
    for paged in (first, second, first):
        assert logits_error(model, paged) < 64 * EPS


def test_a_model_still_trains(reference):
    model, twin = tiny_model("llama"), tiny_model("llama")
    load_model(model)
    for each in (model, twin):
        optimiser = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            each(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
            optimiser.step()
    for computed, own in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(computed, own)
    assert logits_error(model) < 64 * EPS


# --- what runs -------------------------------------------------------------------------------


def count_calls(paged, model, num_tokens, monkeypatch):
    """The fused operations of one step, by their names."""
    calls = []

    def watch(name):
        own = getattr(fused_layer, name)

        def counted(*args, **options):
            calls.append(name)
            return own(*args, **options)

        monkeypatch.setattr(fused_layer, name, counted)

    names = "small_linear", "rotate_and_write", "paged_attention", "add_norm", "rms_norm"
    for name in (*names, "gated_activation"):
        watch(name)
    linear = functional.linear

    def product(*args, **options):
        calls.append("linear")
        return linear(*args, **options)

    monkeypatch.setattr(fused_layer, "functional", SimpleNamespace(linear=product))
    packing = Packing(paged, sequences_of(model.config.vocab_size), 4, seed=0)
    calls.clear()
    paged.forward(packing.step([0, num_tokens, 0]))
    return calls


@pytest.mark.parametrize(("family", "most"), [("qwen3", 6), ("gemma2", 8), ("phi3", 6)])
def test_a_step_of_one_token_is_few_launches(family, most, reference, monkeypatch):
    model = tiny_model(family, dtype=torch.bfloat16)
    calls = count_calls(load_model(model), model, 1, monkeypatch)
    assert len(calls) <= 3 * most


def test_products_that_hold_their_weights_take_norms_and_residuals(reference, monkeypatch):
    impls = []
    own = fused_layer.small_linear

    def counted(*args, impl, **options):
        impls.append(impl)
        return own(*args, impl="reference", **options)

    monkeypatch.setattr(fused_layer, "small_linear", counted)
    monkeypatch.setattr(fused_layer, "is_resident", lambda problem, device: problem.num_rows > 5)
    model = tiny_model("qwen3")
    paged = load_model(model)
    impls.clear()
    calls = count_calls(paged, model, 7, monkeypatch)
    assert "add_norm" not in calls
    assert "rms_norm" not in calls
    assert len(calls) == 6 * 3
    assert impls[-4 * 3 :] == ["hopper"] * 4 * 3
    assert logits_error(model, paged) < 64 * EPS


def test_norms_between_layers_are_computed_with_the_addition(reference, monkeypatch):
    model = tiny_model("qwen3")
    calls = count_calls(load_model(model), model, 7, monkeypatch)
    # Only the first layer has a norm of its own; the last one computes the model's last norm.
    assert calls.count("rms_norm") == 1
    assert calls.count("add_norm") == 2 * 3


def test_a_hook_that_is_put_on_a_module_later_sees_its_calls(impl):
    model = tiny_model("qwen3")
    paged = load_model(model)
    layer, seen = layers_of(model)[1], []
    for module in (layer.self_attn.q_proj, layer.self_attn.q_norm, layer.mlp.act_fn, layer.mlp):
        module.register_forward_hook(lambda module, args, out: seen.append(module))
    assert logits_error(model, paged) < 64 * EPS
    assert {layer.self_attn.q_proj, layer.self_attn.q_norm, layer.mlp, layer.mlp.act_fn} <= {*seen}


def test_a_hook_that_is_there_before_keeps_a_layer_as_it_is(reference):
    model = tiny_model("llama")
    layers_of(model)[2].mlp.register_forward_hook(lambda module, args, out: None)
    paged = load_model(model)
    *fused, why = paged.fused_layers.values()
    assert fused == [None, None]
    assert "hook" in why


def test_the_last_norm_is_seen_by_its_hooks(impl):
    model = tiny_model("llama")
    paged, seen = load_model(model), []
    model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    logits = paged.forward(Packing(paged, sequences_of(96), 4, seed=0).step([1, 2, 3]))
    torch.testing.assert_close(model.lm_head(seen[0])[0], logits)


def test_nothing_of_it_stays_on_the_model(impl, monkeypatch):
    model = tiny_model("qwen3")
    attributes = [list(vars(module)) for module in model.modules()]
    paged = load_model(model)
    step = Packing(paged, sequences_of(96), 4, seed=0).step([1, 2, 3])
    paged.forward(step)
    assert [list(vars(module)) for module in model.modules()] == attributes

    def fail(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(fused_layer, "rotate_and_write", fail)
    with pytest.raises(KeyboardInterrupt):
        paged.forward(step)
    assert [list(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("streams", "num_rows", "expected"),
    [(True, 8, "hopper_ring"), (False, 8, "triton"), (False, 64, "")],
)
def test_a_head_runs_what_is_fastest(streams, num_rows, expected, monkeypatch):
    head = torch.nn.Linear(8, 65536, bias=False, dtype=torch.bfloat16)
    seen = []

    def watched(x, weight, *, bias, impl):
        seen.append(impl)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(linears, "is_faster_in_ring", lambda *args: streams)
    monkeypatch.setattr(linears, "small_linear", watched)
    forward = linears.forward_of_few(head, "triton")
    x = torch.ones(1, num_rows, 8, dtype=torch.bfloat16)
    assert torch.equal(forward(x), head(x))
    assert seen == [expected] * bool(expected)
    seen.clear()
    head.weight = torch.nn.Parameter(torch.zeros(65536 * 8 + 4).bfloat16()[4:].view(65536, 8))
    assert torch.equal(forward(x), head(x))
    assert "hopper_ring" not in seen  # the weight begins at 8 bytes
    linears.forward_of_few(head, "reference")(x)
    assert "hopper_ring" not in seen


def test_angles_are_looked_up(reference, monkeypatch):
    model = tiny_model("gemma3")  # one table a kind of layer
    paged = load_model(model)
    own = type(model.model.rotary_emb).forward
    seen = []
    monkeypatch.setattr(
        type(model.model.rotary_emb), "forward", lambda *args: seen.append(args) or own(*args)
    )
    packing = Packing(paged, sequences_of(96), 4, seed=0)
    paged.forward(packing.step([1, 2, 3]))
    assert not seen
    model(torch.tensor([[1, 2, 3]]))
    assert seen


def test_a_fused_layer_that_is_wrong_does_not_pass_the_proof(reference, monkeypatch):
    own = fused_layer.rotate_and_write
    load_model(tiny_model("llama"))

    def wrong(qkv, cos, sin, *args, **options):
        return own(qkv, sin, cos, *args, **options)

    monkeypatch.setattr(fused_layer, "rotate_and_write", wrong)
    with pytest.raises(UnsupportedError, match="its logits differ"):
        load_model(tiny_model("llama"))


def test_a_model_that_cannot_be_traced_runs_without(reference, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("not now")

    monkeypatch.setattr(trace, "_random", fail)
    model = tiny_model("llama")
    paged = load_model(model)
    assert all("cannot be traced" in why for why in paged.fused_layers.values())
    assert logits_error(model, paged) < 64 * EPS


# --- on a CPU --------------------------------------------------------------------------------


def test_on_a_cpu_layers_are_fused_whose_kernels_the_processor_runs(monkeypatch):
    model = tiny_model("llama")
    paged = load_model(model)
    assert set(paged.fused_layers.values()) == {None}
    for name in ("add_norm", "gated_activation", "rms_norm", "rotate_and_write"):
        run = getattr(fused_layer, name)
        monkeypatch.setattr(fused_layer, name, partial(_run_on_cpu, run))
    assert logits_error(model, paged) < 64 * EPS
    assert load_model(tiny_model("llama", dtype=torch.float64)).fused_layers == {}


def _run_on_cpu(run, *args, impl, **options):
    assert impl == "cpu"
    return run(*args, impl=impl, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_tokens_is_as_near_to_the_truth_on_a_cpu(dtype):
    """With weights that are large enough for products here, and more tokens than these take."""
    model = tiny_model(
        "qwen3", dtype=dtype, hidden_size=256, head_dim=64, intermediate_size=2048,
        max_position_embeddings=512,
    )  # fmt: skip
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    paged = load_model(model)
    for num_tokens in (1, 5, 64, 65):
        ids = torch.randint(96, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
        [truth], [eager] = eager_logits(exact, [ids]), eager_logits(model, [ids])
        logits = paged.forward(Packing(paged, [ids], 16, seed=0).step([num_tokens]))
        errors = row_errors(logits, truth)
        assert errors.median() <= 2 * row_errors(eager, truth).median() + EPS, num_tokens


def test_on_a_cpu_one_layer_of_a_kind_runs_with_scaled_weights(monkeypatch):
    module = importlib.import_module("pagetile.models.fusion.fuse")
    seen, own = [], module.run_layer
    monkeypatch.setattr(
        module, "run_layer", lambda model, call, gain: seen.append(gain) or own(model, call, gain)
    )
    model = tiny_model("llama")
    load_model(model)
    assert seen == [*trace.GAINS, None, None]
    seen.clear()
    clamp_a_product(layers_of(model)[1])  # another kind
    load_model(model)
    assert seen == [*trace.GAINS, *trace.GAINS, None]
