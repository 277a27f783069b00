"""The plain PyTorch versions of the fused operations against their definitions."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from .. import attention, ops, sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rms_norm_is_the_definition(dtype):
    x, weight = torch.randn(3, 96).to(dtype), torch.randn(96).to(dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    close = dict(rtol=1e-2, atol=1e-3) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.1).double(), expected, **close)


def test_rope_turns_complex_numbers():
    """Channels i and i + D/2 are the two parts of one number, turned by the angle of its position."""
    x, angles = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    out = ops.apply_rope(x, torch.stack((angles.cos(), angles.sin()), dim=1))
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("norm", [True, False])
def test_store_qkv_is_what_the_layer_does(norm):
    qkv, cos_sin = torch.randn(4, (6 + 2 * 2) * 8), torch.randn(50, 2, 4)
    positions, slots = torch.tensor([3, 49, 0, 7]), torch.tensor([40, -1, 0, 17])
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in qkv.split([6 * 8, 2 * 8, 2 * 8], dim=-1))
    weights = torch.randn(2, 8) if norm else (None, None)
    if norm:
        q, k = ops.rms_norm(q, weights[0], 0.1), ops.rms_norm(k, weights[1], 0.1)
    q, k = ops.apply_rope(q, cos_sin[positions]), ops.apply_rope(k, cos_sin[positions])
    kv = torch.full((2, 3, 16, 2, 8), -7.0)
    expected = kv.clone()
    attention.write_kv(k, v, expected, SimpleNamespace(slot_mapping=slots))
    assert ops.store_qkv(qkv, positions, cos_sin, *weights, 0.1, kv, slots).equal(q)
    assert kv.equal(expected) and kv.flatten(1, 2)[:, [0, 17, 40]].ne(-7.0).all() and (kv == -7.0).sum() == 2 * 45 * 16


def test_gemv_is_what_the_layer_does():
    """More rows than the kernel takes are right here."""
    x, weight, bias, norm = torch.randn(6, 32), torch.randn(10, 32), torch.randn(10), torch.randn(32)
    y = ops.rms_norm(x, norm, 0.1) @ weight.T + bias
    torch.testing.assert_close(ops.gemv(x, weight, bias, norm, 0.1), y)
    torch.testing.assert_close(ops.gemv(x, weight, bias, norm, 0.1, y), 2 * y)
    gated = F.silu(y[:, :5]) * y[:, 5:]
    torch.testing.assert_close(ops.gemv(x, weight, bias, norm, 0.1, gated=True), gated)
    torch.testing.assert_close(ops.gemv(x, weight, bias, norm, 0.1, gated, gated=True), 2 * gated)
    torch.testing.assert_close(ops.gemv(x, weight), x @ weight.T)


def test_sample_is_the_sampler():
    """Row by row what sampling.sample chooses, for seeds of all 64 bits."""
    seeds, temperatures = [0, 7, 2**63, 2**64 - 1, 5, 6], [0.0, 1.0, 0.7, 1.0, 2.0, 0.0]
    logits = torch.randn(6, 3000) * 2
    rows = [
        SimpleNamespace(params=sampling.SamplingParams(temperature=t), seed=s, token_ids=[1], num_output_tokens=9 * i)
        for i, (s, t) in enumerate(zip(seeds, temperatures, strict=True))
    ]
    wrapped = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    inverse = torch.tensor([1 / t if t else 0.0 for t in temperatures])
    out = torch.full((6,), -77)
    ops.sample(logits, wrapped, torch.arange(6) * 9, inverse, out)
    assert out.equal(sampling.sample(logits, rows))
