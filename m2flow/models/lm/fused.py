"""Forward and backward passes of norms, gated layers and attention, each as one function of autograd.

The modules of transformers stay as they are, with their weights and names; only what their `forward` computes is done
with fewer and smaller temporaries. That is for the known classes in float32 and float64, under autocast too: linear
layers are in bfloat16 then, and attention between them in float32 (on a CPU no slower, where the backward pass of
torch's own in bfloat16 takes four times as long). All else goes through the module's own code. First derivatives only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from m2flow.models.lm.attention import PACK
from m2flow.models.lm.pack import Pack

KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
TILE = 2**17  # numbers that are worked on at once, so that they stay in a core's own cache
SHORT = 256  # keys of a block of attention up to which its weights are kept; beyond, torch's own attention is better


def install(network: nn.Module) -> None:
    """Let the modules of known classes compute in this way; doing so again changes nothing."""
    for module in network.modules():
        forward = _forward_of(type(module).__name__)
        if forward is not None and type(module).__module__.startswith("transformers.models."):
            module.forward = partial(forward, module)


def _forward_of(name: str) -> Callable[..., Any] | None:
    kind = next((kind for kind in KINDS if name.startswith(kind)), "")
    known: dict[str, Callable[..., Any]] = {"RMSNorm": _norm, "MLP": _gated, "Attention": _attention}
    return known.get(name.removeprefix(kind)) if kind else None


def _suits(x: Tensor, *weights: Tensor) -> bool:
    """Whether what is computed in one dtype between the linear layers is what the module computes, or better."""
    return x.dtype in (torch.float32, torch.float64) and all(w.dtype == x.dtype for w in weights)


# ---- in place of the modules' forward


def _norm(module: Any, x: Tensor) -> Tensor:
    if not _suits(x, module.weight):
        own: Tensor = type(module).forward(module, x)
        return own
    out: Tensor = _RMSNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _gated(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj, module.up_proj
    if module.config.hidden_act not in ("silu", "swish"):
        own: Tensor = type(module).forward(module, x)
        return own
    inner = _SwiGLU.apply(gate(x), up(x))  # type: ignore[no-untyped-call]
    out: Tensor = module.down_proj(inner)
    return out


def _attention(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **given: Any
) -> tuple[Tensor, Any]:
    layout: Pack | None = given.get(PACK)
    x, (cos, sin), window = hidden_states, position_embeddings, getattr(module, "sliding_window", None)
    if (
        layout is None
        or not (x.is_cpu and _suits(x, module.o_proj.weight, cos))
        or max(block.key.shape[1] for block in layout.blocks) > SHORT
        or (window is not None and window < layout.longest)
        or (module.training and module.attention_dropout)
        or cos.shape[-1] != module.head_dim
    ):
        own: tuple[Tensor, Any] = type(module).forward(module, hidden_states, position_embeddings, *args, **given)
        return own
    q, k, v = (f(x).view(x.shape[1], -1, module.head_dim) for f in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (f.to(cos.dtype) for f in (q, k, v))
    with torch.autocast(x.device.type, enabled=False):
        mixed = _Attend.apply(q, k, v, cos[0], sin[0], layout, module.scaling)  # type: ignore[no-untyped-call]
    return module.o_proj(mixed[None]), None


# ---- functions


class _RMSNorm(torch.autograd.Function):
    """y = w n, n = x r, r = 1 / sqrt(mean x^2 + eps): dw = sum dy n, dx = r (w dy - n mean(w dy n))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., E]."""
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        r = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        n = x * r
        ctx.save_for_backward(n, r, weight)
        out: Tensor = n * weight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """The formulas above."""
        n, r, weight = ctx.saved_tensors
        each = (dy * n).contiguous()
        flat = each.view(-1, each.shape[-1])
        mean = torch.mv(flat, weight).div_(-flat.shape[1]).view(r.shape)
        by_weight = flat.sum(0) if ctx.needs_input_grad[1] else None
        dx = torch.mul(dy, weight, out=each)
        return dx.addcmul_(n, mean).mul_(r), by_weight, None


class _SwiGLU(torch.autograd.Function):
    """h = a u, a = silu(g): du = dh a, dg = dh u silu'(g)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """[..., I]."""
        gate, up = gate.contiguous(), up.contiguous()
        active, out = torch.empty_like(gate), torch.empty_like(gate)
        for g, u, a, h in _tiles(gate, up, active, out):
            torch.ops.aten.silu.out(g, out=a)
            torch.mul(a, u, out=h)
        ctx.save_for_backward(gate, up, active)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor, Tensor]:
        """The formulas above."""
        gate, up, active = ctx.saved_tensors
        by_out = by_out.contiguous()
        by_gate, by_up = torch.empty_like(up), torch.empty_like(up)
        for dh, g, u, a, dg, du in _tiles(by_out, gate, up, active, by_gate, by_up):
            torch.mul(dh, a, out=du)
            torch.mul(dh, u, out=dg)
            torch.ops.aten.silu_backward.grad_input(dg, g, grad_input=dg)
        return by_gate, by_up


class _Attend(torch.autograd.Function):
    """Rotary positions and attention over packed rows, [N, H D] of q [N, H, D], k and v [N, KV, D], cos and sin [N, D].

    Heads stand first inside, [H / KV, KV, N, D]: queries that share a key head are looked at one after the other, so
    keys and values need no copy for each.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layout: Pack, scale: float
    ) -> Tensor:
        """P = softmax(scale Q K^T), O = P V in each block."""
        count, heads, size = k.shape
        queries = _turned(_split(q, heads), cos, sin)
        keys, values = _turned(k.transpose(0, 1), cos, sin), v.transpose(0, 1)
        mixed, kept = [], []
        for block in layout.blocks:
            q_, k_, v_ = _gather(queries, block.query), _gather(keys, block.key), _gather(values, block.key)
            rows, (length, width) = len(block.query), (block.query.shape[1], block.key.shape[1])
            hidden = torch.ones(length, width, dtype=torch.bool, device=q.device).triu_(1)
            if block.mask is not None:
                hidden = ~block.mask[:, 0]
            p_ = q_.new_empty(*q_.shape[:-1], width)
            out = torch.empty_like(q_)
            for some, p, o in zip(q_, p_, out, strict=True):
                score = torch.bmm(some, k_.transpose(1, 2)).mul_(scale)
                score.view(heads, rows, length, width).masked_fill_(hidden, -torch.inf)
                torch.softmax(score, -1, out=p)
                torch.bmm(p, v_, out=o)
            mixed.append(out.view(-1, heads, rows * length, size))
            kept += [q_, k_, v_, p_]
        ctx.save_for_backward(cos, sin, *kept)
        ctx.layout, ctx.scale = layout, scale
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, 2)
        return whole.index_select(2, layout.back).permute(2, 1, 0, 3).reshape(count, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        """dV = P^T dO, dS = softmax'(dO V^T), dQ = scale dS K, dK = scale dS^T Q; then the rotation turned back."""
        cos, sin, *kept = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        repeats, heads, size = len(kept[0]), len(kept[1]) // len(layout.blocks[0].query), kept[0].shape[-1]
        total = sum(block.query.numel() for block in layout.blocks)
        # 0 where a block is padded
        spread = by_out.new_zeros(repeats, heads, total, size)
        spread.index_copy_(2, layout.back, _split(by_out.view(len(by_out), -1, size), heads).contiguous())
        by_keys, by_values = (by_out.new_zeros(heads, len(by_out), size) for _ in range(2))
        by_queries, start = [], 0
        for i, block in enumerate(layout.blocks):
            q_, k_, v_, p_ = kept[4 * i : 4 * i + 4]
            stop = start + block.query.numel()
            dq, dk, dv = torch.empty_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
            for j in range(repeats):
                do = spread[j, :, start:stop].reshape(q_.shape[1:])
                ds = torch._softmax_backward_data(torch.bmm(do, v_.transpose(1, 2)), p_[j], -1, do.dtype)
                ds.mul_(scale)
                dv.baddbmm_(p_[j].transpose(1, 2), do)
                dk.baddbmm_(ds.transpose(1, 2), q_[j])
                torch.bmm(ds, k_, out=dq[j])
            by_queries.append(dq.view(repeats, heads, -1, size))
            at = block.key.reshape(-1)
            by_keys.index_add_(1, at, dk.view(heads, -1, size))
            by_values.index_add_(1, at, dv.view(heads, -1, size))
            start = stop
        by_q = by_queries[0] if len(by_queries) == 1 else torch.cat(by_queries, 2)
        by_q = _turned_back(by_q.index_select(2, layout.back), cos, sin).permute(2, 1, 0, 3)
        by_k = _turned_back(by_keys, cos, sin).transpose(0, 1)
        return by_q.reshape(len(by_out), -1, size), by_k, by_values.transpose(0, 1), None, None, None, None


# ---- pieces


def _tiles(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of contiguous arrays of one shape that lie at the same place."""
    flat = [x.view(-1) for x in arrays]
    if not flat[0].is_cpu or flat[0].numel() <= TILE:
        return iter([tuple(flat)])
    return zip(*(torch.split(x, TILE) for x in flat), strict=True)


def _split(x: Tensor, heads: int) -> Tensor:
    """[H / KV, KV, N, D] of [N, H, D]; query head i reads key head i // (H / KV)."""
    return x.view(len(x), heads, -1, x.shape[-1]).permute(2, 1, 0, 3)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[..., heads * r, L, D] of [..., heads, N, D] at positions [r, L]."""
    out = x.index_select(-2, index.reshape(-1))
    return out.view(*x.shape[:-3], -1, index.shape[1], x.shape[-1])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate(x) sin over [..., N, D], rotate(x1, x2) = (-x2, x1)."""
    half = x.shape[-1] // 2
    out = torch.mul(x, cos, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    out[..., :half].addcmul_(x[..., half:], sin[:, :half], value=-1.0)
    out[..., half:].addcmul_(x[..., :half], sin[:, half:])
    return out


def _turned_back(d: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The derivative of `_turned` by x."""
    half = d.shape[-1] // 2
    out = d * cos
    out[..., :half].addcmul_(d[..., half:], sin[:, half:])
    out[..., half:].addcmul_(d[..., :half], sin[:, :half], value=-1.0)
    return out
