"""What a layer is made of, against its definition in plain float64: the four steps of ops.py, packed matrices, and the
input ids that are still on the device."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, ops
from ..model import Linear, RMSNorm, pack
from .helpers import make_checkpoint
from .script import new_engine

DTYPE = torch.float64


def make_linear(in_features: int, out_features: int, bias: bool) -> Linear:
    linear = Linear(in_features, out_features, bias, DTYPE)
    for parameter in linear.parameters():
        parameter.data.normal_()
    return linear


def make_norm(size: int, eps: float = 0.1) -> RMSNorm:
    norm = RMSNorm(size, SimpleNamespace(dtype=DTYPE, rms_norm_eps=eps))
    norm.weight.data.normal_()
    return norm


def normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


@pytest.mark.parametrize("bias", [True, False])
def test_four_steps_of_a_layer(bias):
    """Each is what its line in the head of ops.py says, with a bias and without."""
    x, norm = torch.randn(5, 12, dtype=DTYPE), make_norm(12)
    linear, gate_up, down = make_linear(12, 7, bias), make_linear(12, 20, bias), make_linear(10, 12, bias)

    def times(y: torch.Tensor, one: Linear) -> torch.Tensor:
        return y @ one.weight.T + (one.bias if bias else 0)

    torch.testing.assert_close(ops.norm_linear(x, norm, linear), times(normed(x, norm), linear))
    both = times(normed(x, norm), gate_up)
    gate, up = both[:, :10], both[:, 10:]
    wanted = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(ops.norm_gate_up(x, norm, gate_up), wanted)
    before = x.clone()
    torch.testing.assert_close(ops.linear_add(wanted, down, x), before + times(wanted, down))


def test_linear_writes_where_it_is_told():
    x, linear, out = torch.randn(3, 4, dtype=DTYPE), make_linear(4, 6, False), torch.zeros(3, 6, dtype=DTYPE)
    assert ops.linear(x, linear, out) is out and out.equal(ops.linear(x, linear))


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_split_norm_and_rotation(heads, kv_heads, has_norms):
    """q, k and v lie side by side; channels i and i + half of q and k are turned by the angle of their position. A
    split at the wrong place, or a rotation of v, gives fluent nonsense."""
    size, positions = 8, torch.tensor([3, 19, 0])
    qkv, angles = torch.randn(3, (heads + 2 * kv_heads) * size, dtype=DTYPE), torch.randn(20, size // 2, dtype=DTYPE)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    norms = (make_norm(size), make_norm(size)) if has_norms else (None, None)
    kv = torch.zeros(2, 3, 4, kv_heads, size, dtype=DTYPE)
    q, k, v = ops.rotate_qkv(qkv, positions, cos_sin, *norms, kv, torch.tensor([0, 1, 2]))
    assert [x.shape for x in (q, k, v)] == [(3, heads, size), (3, kv_heads, size), (3, kv_heads, size)]
    for token, position in enumerate(positions.tolist()):
        for i in range(heads + 2 * kv_heads):
            one = qkv[token, i * size : (i + 1) * size]
            if i >= heads + kv_heads:
                assert v[token, i - heads - kv_heads].equal(one)
                continue
            norm = norms[0] if i < heads else norms[1]
            one = one if norm is None else normed(one, norm)
            turned = torch.complex(*one.chunk(2)) * torch.polar(torch.ones_like(angles[0]), angles[position])
            got = q[token, i] if i < heads else k[token, i - heads]
            torch.testing.assert_close(got, torch.cat((turned.real, turned.imag)))
    assert not kv.any(), "k and v are still to be stored"


@given(ids=st.lists(st.integers(-9, 300), min_size=1, max_size=12), size=st.integers(9, 20))
def test_negative_ids_are_rows_of_the_last_step(ids, size):
    """-1 is the last row of `sampled`, whatever is sampled there: an offset by one gives each sequence its neighbour's
    token. Ids that are known stay, 0 among them."""
    sampled = torch.arange(1000, 1000 + size)
    got = ops.known_ids(torch.tensor(ids), sampled)
    assert got.tolist() == [1000 + size + i if i < 0 else i for i in ids]
    assert sampled.tolist() == list(range(1000, 1000 + size))


def test_placeholders_name_the_rows_they_were_sampled_in():
    """What the pipeline counts from the end, known_ids counts from the end too: as many rows as max_num_seqs, of which
    the first are used."""
    with new_engine(max_model_len=64, max_num_seqs=5, async_scheduling=True) as llm:
        for i in range(3):
            llm.add_request([i, 7], request_id=str(i))
        llm.step()
        runner = llm.model_runner
        seqs = llm._pipeline.in_flight.launched.seqs
        pending = torch.tensor([seq.token_ids[-1] for seq in seqs])
        assert (pending < 0).all() and len(runner.sampled) == 5
        assert ops.known_ids(pending, runner.sampled).equal(llm._pipeline.in_flight.launched.token_ids)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(6, 2, 2), (7, 7), (3,)])
def test_packed_is_the_same_product(sizes, bias):
    """One product for several matrices: outputs end to end, biases too."""
    linears = [make_linear(12, size, bias) for size in sizes]
    x = torch.randn(4, 12, dtype=DTYPE)
    packed = pack(linears)
    torch.testing.assert_close(packed(x), torch.cat([linear(x) for linear in linears], dim=-1))
    assert (packed.bias is not None) == bias and packed.weight.dtype == DTYPE
    count = sum(parameter.numel() for linear in linears for parameter in linear.parameters())
    assert sum(parameter.numel() for parameter in packed.parameters()) == count


@pytest.mark.parametrize(
    ("family", "options"), [("llama", dict(attention_bias=True, mlp_bias=True)), ("qwen2", {}), ("qwen3", {})]
)
def test_a_packed_model_has_its_parameters_once(family, options, tmp_path):
    """As many as the checkpoint: the separate matrices must not stay in memory beside the packed ones, which for a real
    model is a third of the GPU's memory for nothing."""
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path / "model", family, **options)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    with LLM(str(folder), device="cpu", max_model_len=64) as llm:
        model = llm.model_runner.model
        assert sum(parameter.numel() for parameter in model.parameters()) == stored
        names = [name for name, _ in model.named_parameters()]
        assert not [
            name
            for name in names
            if any(f"{old}_proj" in name for old in ("q", "k", "v", "gate", "up"))
            and "qkv_proj" not in name
            and "gate_up_proj" not in name
        ]


def test_silu_mul_is_gate_times_up():
    """The first half is the gate. Exchanged, both halves have the right shape."""
    both = torch.randn(3, 10, dtype=DTYPE)
    torch.testing.assert_close(ops.silu_mul(both), F.silu(both[:, :5]) * both[:, 5:])
