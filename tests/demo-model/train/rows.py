# SPDX-License-Identifier: Apache-2.0
"""Group norm, SiLU and the three frames that a causal convolution sees, in one pass over rows [frames, h, w, c].

`taps(x, ...)` gives [frames out, h + pad, w + pad, 3 c]: channels of the frames t-2, t-1, t, each normalised and
activated, zero where there is none.  Triton kernels on a GPU, plain torch elsewhere."""
import os

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
_index = {}


def index(n, lens, stride, dev):
    """Tables of n clips with segments of `lens` frames: input frames of an output frame, output frames of an input frame
    (both [frames, 3], -1: none) and the new lengths."""
    key = (n, tuple(lens), stride, str(dev))
    if key not in _index:
        t, new = sum(lens), [(x - 1) // stride + 1 for x in lens]
        fwd, bwd, at, to = [], [[-1] * 3 for _ in range(t)], 0, 0
        for x, y in zip(lens, new):
            for j in range(y):
                taps = [stride * j - 2 + k for k in range(3)]
                fwd.append([at + f if 0 <= f < x else -1 for f in taps])
                for k, f in enumerate(taps):
                    if 0 <= f < x:
                        bwd[at + f][k] = to + j
            at, to = at + x, to + y
        spread = lambda table, own, other: torch.cat([torch.where(torch.tensor(table) < 0, -1, torch.tensor(table) + i * other)
                                                      for i in range(n)]).to(torch.int32).to(dev)
        _index[key] = spread(fwd, to, t), spread(bwd, t, to), new
    return _index[key]


if triton is not None:
    @triton.jit
    def _stats(x, out, P, C, NB, CB: tl.constexpr, BP: tl.constexpr, IT: tl.constexpr):
        f, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
        c = tl.arange(0, CB)
        s1, s2 = tl.zeros((CB,), tl.float32), tl.zeros((CB,), tl.float32)
        for i in range(IT):
            p = (b * IT + i) * BP + tl.arange(0, BP)
            v = tl.load(x + (f * P + p[:, None]) * C + c[None, :], (p[:, None] < P) & (c[None, :] < C), other=0.0).to(tl.float32)
            s1 += tl.sum(v, 0)
            s2 += tl.sum(v * v, 0)
        tl.store(out + (f * NB + b) * 2 * C + c, s1, c < C)
        tl.store(out + (f * NB + b) * 2 * C + C + c, s2, c < C)

    @triton.jit
    def _taps(x, idx, a, s, out, H, W, HO, WO, C, CB: tl.constexpr, BP: tl.constexpr, NORM: tl.constexpr):
        fo = tl.program_id(0).to(tl.int64)
        q = tl.program_id(1) * BP + tl.arange(0, BP)
        c = tl.arange(0, CB)
        y, xx = q // WO, q % WO
        ok = (q < HO * WO) & (y < H) & (xx < W)
        p = y * W + xx
        for k in tl.static_range(3):
            f = tl.load(idx + fo * 3 + k).to(tl.int64)
            use = ok[:, None] & (c[None, :] < C) & (f >= 0)
            u = tl.load(x + (f * H * W + p[:, None]) * C + c[None, :], use, other=0.0).to(tl.float32)
            if NORM:
                m = (c < C) & (f >= 0)
                u = u * tl.load(a + f * C + c, m, other=0.0)[None, :] + tl.load(s + f * C + c, m, other=0.0)[None, :]
                u = u / (1.0 + tl.exp(-u))
                u = tl.where(use, u, 0.0)
            tl.store(out + (fo * HO * WO + q[:, None]) * (3 * C) + k * C + c[None, :], u.to(out.dtype.element_ty),
                     (q[:, None] < HO * WO) & (c[None, :] < C))

    @triton.jit
    def _taps_back(g, idx, x, a, s, ds, part, H, W, HO, WO, C, NB, CB: tl.constexpr, BP: tl.constexpr, IT: tl.constexpr,
                   NORM: tl.constexpr):
        f, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
        c = tl.arange(0, CB)
        s1, s2 = tl.zeros((CB,), tl.float32), tl.zeros((CB,), tl.float32)
        for i in range(IT):
            p = (b * IT + i) * BP + tl.arange(0, BP)
            q = (p // W) * WO + p % W
            ok = (p[:, None] < H * W) & (c[None, :] < C)
            d = tl.zeros((BP, CB), tl.float32)
            for k in tl.static_range(3):
                fo = tl.load(idx + f * 3 + k).to(tl.int64)
                d += tl.load(g + (fo * HO * WO + q[:, None]) * (3 * C) + k * C + c[None, :], ok & (fo >= 0), other=0.0).to(tl.float32)
            if NORM:
                v = tl.load(x + (f * H * W + p[:, None]) * C + c[None, :], ok, other=0.0).to(tl.float32)
                u = v * tl.load(a + f * C + c, c < C, other=0.0)[None, :] + tl.load(s + f * C + c, c < C, other=0.0)[None, :]
                z = 1.0 / (1.0 + tl.exp(-u))
                d = d * z * (1.0 + u * (1.0 - z))
                s1 += tl.sum(d, 0)
                s2 += tl.sum(d * v, 0)
            tl.store(ds + (f * H * W + p[:, None]) * C + c[None, :], d.to(ds.dtype.element_ty), ok)
        if NORM:
            tl.store(part + (f * NB + b) * 2 * C + c, s1, c < C)
            tl.store(part + (f * NB + b) * 2 * C + C + c, s2, c < C)

    @triton.jit
    def _mix(d, x, c1, c2, c3, P, C, CB: tl.constexpr, BP: tl.constexpr):
        f = tl.program_id(0).to(tl.int64)
        p = tl.program_id(1) * BP + tl.arange(0, BP)
        c = tl.arange(0, CB)
        ok = (p[:, None] < P) & (c[None, :] < C)
        at = (f * P + p[:, None]) * C + c[None, :]
        one = _per_channel(c1, f, c, C)
        two = _per_channel(c2, f, c, C)
        three = _per_channel(c3, f, c, C)
        v = tl.load(d + at, ok, other=0.0).to(tl.float32) * one[None, :] + tl.load(x + at, ok, other=0.0).to(tl.float32) * two[None, :]
        tl.store(d + at, (v + three[None, :]).to(d.dtype.element_ty), ok)

    @triton.jit
    def _per_channel(t, f, c, C):
        return tl.load(t + f * C + c, c < C, other=0.0)


def _sizes(P, C):
    cb = max(4, triton.next_power_of_2(C))
    bp = max(16, 4096 // cb)
    it = 8 if P >= 16 * bp else 1
    return cb, bp, it, triton.cdiv(P, bp * it)


class _Taps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, fwd, bwd, pad, groups, eps):
        f, h, w, c = x.shape
        P, norm = h * w, weight is not None
        cb, bp, it, nb = _sizes(P, c)
        a = s = mean = rstd = x
        if norm:
            part = torch.empty(f, nb, 2, c, device=x.device)
            _stats[(f, nb)](x, part, P, c, nb, CB=cb, BP=bp, IT=it)
            t = part.sum(1).view(f, 2, groups, c // groups).sum(3) / (P * (c // groups))
            mean = t[:, 0]
            rstd = torch.rsqrt((t[:, 1] - mean * mean).clamp(min=0) + eps)
            each = lambda v: v.repeat_interleave(c // groups, 1)
            a = (each(rstd) * weight.float()).contiguous()
            s = (bias.float() - each(mean) * a).contiguous()
        ho, wo = h + pad, w + pad
        out = torch.empty(fwd.shape[0], ho, wo, 3 * c, device=x.device, dtype=x.dtype)
        _taps[(fwd.shape[0], triton.cdiv(ho * wo, bp))](x, fwd, a, s, out, h, w, ho, wo, c, CB=cb, BP=bp, NORM=norm)
        ctx.save_for_backward(x, weight, a, s, mean, rstd, bwd)
        ctx.norm, ctx.pad, ctx.groups = norm, pad, groups
        return out

    @staticmethod
    def backward(ctx, g):
        x, weight, a, s, mean, rstd, bwd = ctx.saved_tensors
        g = g.contiguous()
        f, h, w, c = x.shape
        P, groups = h * w, ctx.groups
        cb, bp, it, nb = _sizes(P, c)
        d = torch.empty_like(x)
        part = torch.empty(f, nb, 2, c, device=x.device) if ctx.norm else d
        _taps_back[(f, nb)](g, bwd, x, a, s, d, part, h, w, h + ctx.pad, w + ctx.pad, c, nb, CB=cb, BP=bp, IT=it, NORM=ctx.norm)
        if not ctx.norm:
            return d, None, None, None, None, None, None, None
        t = part.sum(1)
        each = lambda v: v.repeat_interleave(c // groups, 1)
        s1, m, r, wt = t[:, 0], each(mean), each(rstd), weight.float()
        s2 = r * (t[:, 1] - m * s1)  # against the normalised values
        group = lambda v: each((v * wt).view(f, groups, -1).sum(2)) / (P * (c // groups))
        big_a, big_b = group(s1), group(s2)
        c2 = -(r * r * big_b)
        c3 = -(r * big_a) - m * c2
        _mix[(f, triton.cdiv(P, bp))](d, x, a, c2.contiguous(), c3.contiguous(), P, c, CB=cb, BP=bp)
        return d, s2.sum(0), s1.sum(0), None, None, None, None, None


def taps(x, norm, fwd, bwd, pad):
    """norm: a GroupNorm, or None for the rows as they are."""
    if triton is not None and (x.is_cuda or INTERPRET):
        return _Taps.apply(x.contiguous(), *((norm.weight, norm.bias) if norm is not None else (None, None)), fwd, bwd, pad,
                           norm.num_groups if norm is not None else 1, norm.eps if norm is not None else 0.0)
    f, h, w, c = x.shape
    if norm is not None:
        y = x.float().view(f, h * w, norm.num_groups, -1)
        var, mean = torch.var_mean(y, dim=(1, 3), keepdim=True, unbiased=False)
        x = F.silu(((y - mean) * torch.rsqrt(var + norm.eps)).view(f, h, w, c) * norm.weight + norm.bias).to(x.dtype)
    x = torch.cat([x, torch.zeros_like(x[:1])])
    x = torch.cat([x[fwd[:, k].long()] for k in range(3)], -1)
    return F.pad(x, (0, 0, 0, pad, 0, pad)) if pad else x
