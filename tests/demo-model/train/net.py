# SPDX-License-Identifier: Apache-2.0
"""Model sizes and batched forward passes for training.

The parameters live in the public classes (diffusers) or, for the text encoder, in a module with the same parameter
names as transformers' Qwen3-VL.  The forward passes here only add what the public ones do not offer: a different noise
level per batch item, and the video encoder on channels-last rows.  `check.py` compares them with the public implementations.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import rows

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

DIT = dict(num_attention_heads=4, attention_head_dim=128, hidden_size=256, num_layers=6, num_refiner_layers=1,
           ffn_dim=512, in_channels=24, audio_in_channels=32, patch_size=(1, 2, 2), text_dim=128, freq_dim=256,
           time_embed_hidden_dim=128, time_embed_dim=32)
VAE = dict(latent_channels=24, block_out_channels=(8, 24, 48, 48, 64, 64), layers_per_block=1, norm_num_groups=4,
           spatial_padding_mode="constant",
           decoder_num_layers=3, decoder_num_attention_heads=4, decoder_attention_head_dim=64, decoder_ffn_mult=2)
AUDIO = dict(encoder_dim=4, latent_dim=128, latent_channels=32, num_attention_heads=4, decoder_dim=128)
TEXT = dict(hidden=128, inter=256, layers=5, used=4, heads=2, kv_heads=1, head_dim=128, theta=5e6, eps=1e-6)
VISION = dict(hidden=72, inter=144, depth=4, heads=1, deepstack=(0, 1, 2), table=16)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
           "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>", "<d>", "</d>", "<|cutoff|>", "<|lyrics_start|>", "<|lyrics_end|>",
           "<|caption_start|>", "<|caption_end|>"]


def latent_frames(frames):
    return (frames - 5) // 17 * 5 + 2


def audio_latents(frames):
    return int(round(frames / 24 * 40))


# ---------------------------------------------------------------------------------------------------- text encoder
def rms(x, w, eps=1e-6):
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * w.to(x.dtype)


class _Lin(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.5 / math.sqrt(self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Weight(nn.Module):
    def __init__(self, *shape, std=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape) if std is None else torch.randn(*shape) * std)


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, d = c["hidden"], c["head_dim"]
        self.input_layernorm, self.post_attention_layernorm = Weight(h), Weight(h)
        a = self.self_attn = nn.Module()
        a.q_proj, a.k_proj = _Lin(h, c["heads"] * d, bias=False), _Lin(h, c["kv_heads"] * d, bias=False)
        a.v_proj, a.o_proj = _Lin(h, c["kv_heads"] * d, bias=False), _Lin(c["heads"] * d, h, bias=False)
        a.q_norm, a.k_norm = Weight(d), Weight(d)
        m = self.mlp = nn.Module()
        m.gate_proj, m.up_proj = _Lin(h, c["inter"], bias=False), _Lin(h, c["inter"], bias=False)
        m.down_proj = _Lin(c["inter"], h, bias=False)
        self.c = c

    def forward(self, x, cos, sin):
        c, a = self.c, self.self_attn
        b, n, _ = x.shape
        h = rms(x, self.input_layernorm.weight)
        q = rms(a.q_proj(h).view(b, n, c["heads"], -1), a.q_norm.weight)
        k = rms(a.k_proj(h).view(b, n, c["kv_heads"], -1), a.k_norm.weight)
        v = a.v_proj(h).view(b, n, c["kv_heads"], -1)
        rot = lambda t: t * cos.to(t.dtype) + torch.cat((-t[..., 64:], t[..., :64]), -1) * sin.to(t.dtype)
        rep = c["heads"] // c["kv_heads"]
        q, k, v = (t.transpose(1, 2) for t in (rot(q), rot(k).repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)))
        o = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True).transpose(1, 2).reshape(b, n, -1)
        x = x + a.o_proj(o)
        h = rms(x, self.post_attention_layernorm.weight)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))


class Merger(nn.Module):
    def __init__(self, h, out, post):
        super().__init__()
        self.norm = nn.LayerNorm(4 * h if post else h, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = _Lin(4 * h, 4 * h), _Lin(4 * h, out)
        self.post = post

    def forward(self, x):
        b, n, h = x.shape
        x = self.norm(x.view(b, n // 4, 4 * h)) if self.post else self.norm(x).view(b, n // 4, 4 * h)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Vision(nn.Module):
    def __init__(self, v, out):
        super().__init__()
        h = v["hidden"]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv3d(3, h, (2, 16, 16), (2, 16, 16))
        self.pos_embed = Weight(v["table"] ** 2, h, std=0.02)
        self.blocks = nn.ModuleList()
        for _ in range(v["depth"]):
            b = nn.Module()
            b.norm1, b.norm2 = nn.LayerNorm(h, eps=1e-6), nn.LayerNorm(h, eps=1e-6)
            b.attn, b.mlp = nn.Module(), nn.Module()
            b.attn.qkv, b.attn.proj = _Lin(h, 3 * h), _Lin(h, h)
            b.mlp.linear_fc1, b.mlp.linear_fc2 = _Lin(h, v["inter"]), _Lin(v["inter"], h)
            self.blocks.append(b)
        self.merger = Merger(h, out, False)
        self.deepstack_merger_list = nn.ModuleList(Merger(h, out, True) for _ in v["deepstack"])
        self.v = v

    def forward(self, img):
        """img [B, 3, H, W] in [-1, 1] -> merged tokens [B, n, out] and one more per deepstack level."""
        v, (b, _, hh, ww) = self.v, img.shape
        gh, gw = hh // 16, ww // 16
        p = img.view(b, 3, gh // 2, 2, 16, gw // 2, 2, 16).permute(0, 2, 5, 3, 6, 1, 4, 7)  # b i j di dj c y x
        p = p.reshape(b, gh * gw, 3, 1, 256).expand(-1, -1, -1, 2, -1).reshape(b, gh * gw, 1536)
        x = F.linear(p, self.patch_embed.proj.weight.view(v["hidden"], 1536), self.patch_embed.proj.bias)
        order = lambda t: t.view(gh // 2, 2, gw // 2, 2, *t.shape[2:]).transpose(1, 2).reshape(gh * gw, *t.shape[2:])
        s = v["table"]
        dev = img.device
        near = lambda n: (1 - (torch.linspace(0, s - 1, n, device=dev)[:, None] - torch.arange(s, device=dev)).abs()).clamp(min=0)
        with torch.autocast(dev.type, enabled=False):  # bilinear interpolation of the table
            pos = torch.einsum("is,jt,stc->ijc", near(gh), near(gw), self.pos_embed.weight.view(s, s, -1))
        x = x + order(pos).to(x.dtype)
        d = v["hidden"] // v["heads"]
        inv = 10000.0 ** (-torch.arange(0, d // 2, 2, device=dev) / (d // 2))
        ry = torch.arange(gh, device=dev)[:, None].expand(gh, gw)
        rx = torch.arange(gw, device=dev)[None].expand(gh, gw)
        ang = torch.cat([order(ry)[:, None] * inv, order(rx)[:, None] * inv], -1)
        ang = torch.cat([ang, ang], -1)[:, None]
        cos, sin = ang.cos(), ang.sin()
        rot = lambda t: (t.float() * cos + torch.cat((-t[..., d // 2:], t[..., :d // 2]), -1).float() * sin).to(t.dtype)
        deep = []
        for i, blk in enumerate(self.blocks):
            q, k, w = blk.attn.qkv(blk.norm1(x)).view(b, gh * gw, 3, v["heads"], d).unbind(2)
            q, k, w = (t.transpose(1, 2) for t in (rot(q), rot(k), w))
            o = F.scaled_dot_product_attention(q, k, w).transpose(1, 2).reshape(b, gh * gw, -1)
            x = x + blk.attn.proj(o)
            x = x + blk.mlp.linear_fc2(F.gelu(blk.mlp.linear_fc1(blk.norm2(x)), approximate="tanh"))
            if i in v["deepstack"]:
                deep.append(self.deepstack_merger_list[v["deepstack"].index(i)](x))
        return self.merger(x), deep


class TextEncoder(nn.Module):
    def __init__(self, vocab, c=TEXT, v=VISION):
        super().__init__()
        self.model = nn.Module()
        lm = self.model.language_model = nn.Module()
        lm.embed_tokens = Weight(vocab, c["hidden"], std=0.5)
        lm.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c["layers"]))
        lm.norm = Weight(c["hidden"])
        self.model.visual = Vision(v, c["hidden"])
        self.c = c

    def rope(self, n, spans, device):
        """cos and sin for n rows; spans: (first placeholder row, grid h, grid w) per image."""
        pos, cur, row = [], 0, 0
        for start, mh, mw in spans:
            pos += [(cur + i,) * 3 for i in range(start - row)]
            cur += start - row
            pos += [(cur, cur + i, cur + j) for i in range(mh) for j in range(mw)]
            cur, row = cur + max(mh, mw), start + mh * mw
        pos = torch.tensor(pos + [(cur + i,) * 3 for i in range(n - row)], dtype=torch.float32)
        inv = self.c["theta"] ** (-torch.arange(0, 128, 2) / 128)
        k = torch.arange(64)
        axis = torch.where((k % 3 == 1) & (k < 60), 1, torch.where((k % 3 == 2) & (k < 60), 2, 0))
        ang = pos[:, axis] * inv
        ang = torch.cat([ang, ang], -1)[None, :, None]
        return ang.cos().to(device), ang.sin().to(device)

    def forward(self, ids, spans=(), images=(), rope=None):
        """ids [B, L] -> residual stream, no final norm.  Causal, so padding at the end needs no mask."""
        c, lm = self.c, self.model.language_model
        w, n = lm.embed_tokens.weight, ids.shape[1]
        x = torch.matmul((ids[..., None] == torch.arange(w.shape[0], device=ids.device)).to(w.dtype), w)
        cos, sin = self.rope(n, spans, ids.device) if rope is None else rope
        deep = []
        for (start, mh, mw), img in zip(spans, images):
            tok, ds = self.model.visual(img)
            x = torch.cat([x[:, :start], tok.to(x.dtype), x[:, start + mh * mw:]], 1)
            deep.append(ds)
        for i, layer in enumerate(lm.layers[:c["used"]]):
            x = layer(x, cos, sin)
            for (start, mh, mw), ds in zip(spans, deep):
                if i < len(ds):
                    x = x + F.pad(ds[i].to(x.dtype), (0, 0, start, n - start - mh * mw))
        return x


# ------------------------------------------------------------------------------------------------------------- DiT
def positions(L, conditions, T, H, W, A):
    """[N, 3] float64 rows: text | conditions | audio | video.

    conditions: "first" / "last" keyframes, or (h, w), the latent size of a reference image."""
    def grid_of(H, W):
        s = math.sqrt(H * W)
        axis = lambda D: torch.tensor([((1 - D / s) / 2 + i * ((D / s) / (D // 2))) * 32 for i in range(D // 2)], dtype=torch.float64)
        gh, gw = axis(H), axis(W)
        return torch.stack([gh[:, None].expand(-1, len(gw)).reshape(-1), gw[None].expand(len(gh), -1).reshape(-1)], -1), gw

    grid, gw = grid_of(H, W)
    span = [5 / 3 * (1, 4, 4, 4, 4)[i % 5] for i in range(T)]
    rows = [torch.tensor([[i, 0, 0] for i in range(L)], dtype=torch.float64)]
    frame = lambda t, g=grid: torch.cat([torch.full((len(g), 1), t, dtype=torch.float64), g], -1)
    t = float(L)
    for c in conditions:
        if c in ("first", "last"):
            rows.append(frame(L if c == "first" else L + sum(span) - 5 / 3))
        else:
            rows.append(frame(t, grid_of(*c)[0]))
            t += 1
    a = torch.arange(A, dtype=torch.float64) + t
    for w in (gw[0], gw[-1]):
        rows.append(torch.stack([a, torch.zeros_like(a), torch.full_like(a, w)], -1))
    for i in range(T):
        rows.append(frame(t))
        t += span[i]
    return torch.cat(rows)


def patchify(z):
    b, c, t, h, w = z.shape
    return z.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(b, t * (h // 2) * (w // 2), c * 4)


def unpatchify(r, t, h, w):
    b = r.shape[0]
    return r.view(b, t, h // 2, w // 2, 24, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(b, 24, t, h, w)


class Layout:
    """Everything about a packed sequence that does not depend on the clip, as tables on the device.

    tags: tags of the text rows, those of the padding included.  The text of an item may be shorter (`lengths` of
    dit_forward): its surplus rows are hidden from attention and the rest moves forward on the time axis.
    """

    def __init__(self, tags, conditions, T, H, W, A, device):
        L = len(tags)
        self.L, self.T, self.H, self.W, self.A, self.device = L, T, H, W, A, device
        self.K = sum((H // 2) * (W // 2) if c in ("first", "last") else (c[0] // 2) * (c[1] // 2) for c in conditions)
        pos = positions(L, conditions, T, H, W, A)
        N = self.N = len(pos)
        pos[L:, 0] -= L
        kind, tag = torch.zeros(N, dtype=torch.long), torch.zeros(N, dtype=torch.long)
        tag[:L] = torch.tensor(tags)
        kind[L:L + self.K] = 2  # kinds: video (and text), audio, condition
        kind[L + self.K:L + self.K + 2 * A], tag[L + self.K:L + self.K + 2 * A] = 1, 2
        self.modulation = F.one_hot(kind * 3 + tag, 9).float()[None].to(device)
        self.kind = F.one_hot(kind, 3).float()[None].to(device)
        self.pos, self.moving = pos.to(device), (torch.arange(N) >= L).double().to(device)
        self.row = torch.arange(N, device=device)
        self.rope_freq = (1.0 / (10000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32))).to(device)
        self.time_freq = torch.exp(-math.log(10000) * torch.arange(128) / 128).to(device)

    def rope(self, lengths):
        t = self.pos[None, :, 0] + self.moving * lengths.double()[:, None]
        p = torch.cat([t[..., None], self.pos[None, :, 1:].expand(t.shape[0], -1, -1)], -1).float()
        ang = (p[..., None] * self.rope_freq).flatten(2)[:, :, None]
        return ang.cos(), ang.sin()

    def visible(self, lengths):
        return ((self.row < lengths[:, None]) | (self.row >= self.L))[:, None, None]


def _attend(x, rope, mask, heads, wq, wk, wv, wo, nq, nk):
    b, n, _ = x.shape
    q, k, v = (F.linear(x, w).view(b, n, heads, -1) for w in (wq, wk, wv))
    q, k = rms(q, nq, 1e-5), rms(k, nk, 1e-5)
    if rope is not None:
        cos, sin = (t.to(q.dtype) for t in rope)
        rot = lambda t: torch.cat([t[..., :48] * cos - t[..., 48:96] * sin, t[..., 48:96] * cos + t[..., :48] * sin,
                                   t[..., 96:]], -1)
        q, k = rot(q), rot(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    m = None if mask is None else mask.expand(b, heads, n, n)
    o = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=m).transpose(1, 2).reshape(b, n, -1)
    return F.linear(o, wo)


def _swiglu(x, w1, w2):
    u, g = F.linear(x, w1).chunk(2, -1)
    return F.linear(u * F.silu(g), w2)


_attn_w = lambda a: (a.to_q.weight, a.to_k.weight, a.to_v.weight, a.to_out[0].weight, a.norm_q.weight, a.norm_k.weight)
_ff_w = lambda ff: (ff.net[0].proj.weight, ff.net[2].weight)


def _block(x, temb, onehot, cos, sin, mask, heads, aw, ab, n1, n2, attn, ff):
    b = x.shape[0]
    m = F.linear(temb, aw, ab).view(b, 9, -1)
    s1, c1, g1, s2, c2, g2 = torch.matmul(onehot.to(m.dtype), m).chunk(6, -1)
    x = x + g1 * _attend(rms(x, n1, 1e-5) * (1 + c1) + s1, (cos, sin), mask, heads, *attn)
    return x + g2 * _swiglu(rms(x, n2, 1e-5) * (1 + c2) + s2, *ff)


def _refine(x, mask, heads, n1, n2, attn, ff):
    x = x + _attend(rms(x, n1, 1e-5), None, mask, heads, *attn)
    return x + _swiglu(rms(x, n2, 1e-5), *ff)


block_fn = _block


def dit_forward(dit, text, condition_rows, audio_rows, video_rows, t_v, t_a, layout, lengths=None):
    """Per-item times t_v, t_a [B] and text lengths [B] (all of the layout's when None); no transfer from the host."""
    b, L, K, A2, dev = text.shape[0], layout.L, layout.K, 2 * layout.A, text.device
    mask = tmask = None
    if lengths is None:
        cos, sin = layout.rope(torch.full((1,), float(L), device=dev))
    else:
        cos, sin = layout.rope(lengths)
        add = lambda m: torch.zeros_like(m, dtype=torch.float32).masked_fill_(~m, -1e4).to(
            torch.bfloat16 if torch.is_autocast_enabled(dev.type) else torch.float32)
        mask = layout.visible(lengths)
        mask, tmask = add(mask), add(mask[..., :L].contiguous())
    if torch.is_autocast_enabled(dev.type):
        cos, sin = cos.bfloat16(), sin.bfloat16()
    e = dit.context_embedder(text)
    for blk in dit.token_refiner.refiner_blocks:
        e = _refine(e, tmask, blk.attn.heads, blk.norm1.weight, blk.norm2.weight, _attn_w(blk.attn), _ff_w(blk.ff))
    e = rms(e, dit.token_refiner.final_norm.weight, 1e-5)
    vid = dit.proj_in(torch.cat([condition_rows, video_rows], 1))
    x = torch.cat([e, vid[:, :K].to(e.dtype), dit.audio_proj_in(audio_rows).to(e.dtype), vid[:, K:].to(e.dtype)], 1)
    ang = torch.stack([t_v, t_a, t_v.clamp(min=0.999)], 1)[..., None].float() * layout.time_freq
    with torch.autocast(dev.type, enabled=False):
        te = dit.time_embedder.linear_2(F.silu(dit.time_embedder.linear_1(torch.cat([ang.cos(), ang.sin()], -1))))
        te = F.silu(te)
    for blk in dit.transformer_blocks:
        lin = blk.adaln_proj.linear
        x = block_fn(x, te, layout.modulation, cos, sin, mask, blk.attn.heads, lin.weight, lin.bias, blk.norm1.weight,
                     blk.norm2.weight, _attn_w(blk.attn), _ff_w(blk.ff))
    m = torch.matmul(layout.kind.to(x.dtype), dit.norm_out.linear(te).to(x.dtype))
    shift, scale = m.chunk(2, -1)
    x = (rms(x, dit.norm_out.norm.weight, 1e-5) * (1 + scale) + shift)
    with torch.autocast(dev.type, enabled=False):
        x = x.float()
        return dit.proj_out(x[:, L + K + A2:]), dit.audio_proj_out(x[:, L + K:L + K + A2])


# ------------------------------------------------------------------------------------------------------- video VAE
def _conv_rows(conv, norm, x, n, lens):
    """Group norm and SiLU (where norm is given), then the causal 3D convolution as a 2D one over three frames' channels.
    x [n * frames, h, w, c], every clip in segments of `lens` frames -> the same layout, and the new lengths."""
    w, c = conv.weight, x.shape[-1]
    fwd, bwd, new = rows.index(n, lens, conv.stride[0], x.device)
    x = rows.taps(x, norm, fwd, bwd, 1 if conv.stride[1] == 2 else 0)
    w = w.permute(0, 3, 4, 2, 1)
    if w.shape[-1] != c:  # the picture's three channels are filled up
        w = F.pad(w, (0, c - w.shape[-1]))
    w = w.reshape(w.shape[0], 3, 3, 3 * c).permute(0, 3, 1, 2)
    y = F.conv2d(x.permute(0, 3, 1, 2), w, conv.bias, stride=conv.stride[1:], padding=conv.spatial_padding)
    return y.permute(0, 2, 3, 1), new


def encode_rows(vae, x, lens):
    """Moments for x [n, t, h, w, 3 or more (zeros)]: [n, t', h', w', 48]; `lens` is the list of segment lengths."""
    enc, n = vae.encoder, x.shape[0]
    x, lens = _conv_rows(enc.conv_in, None, x.flatten(0, 1), n, lens)
    for blk in enc.down_blocks:
        for r in blk.resnets:
            h, _ = _conv_rows(r.conv1, r.norm1, x, n, lens)
            h, _ = _conv_rows(r.conv2, r.norm2, h, n, lens)
            x = (x if r.conv_shortcut is None else F.linear(x, r.conv_shortcut.weight[:, :, 0, 0, 0], r.conv_shortcut.bias)) + h
        if blk.downsamplers is not None:
            x, lens = _conv_rows(blk.downsamplers[0].conv, None, x, n, lens)
    x, lens = _conv_rows(enc.conv_out, enc.norm_out, x, n, lens)
    x = F.linear(x, vae.quant_conv.weight[:, :, 0, 0, 0], vae.quant_conv.bias)
    return x.view(n, sum(lens), *x.shape[1:])


def decoder_rope(vae, t, h, w, dev):
    d = vae.decoder
    grids = [2.0 * (torch.arange(0.5, s, dtype=torch.float32, device=dev) / s) - 1.0 for s in (t, h, w)]
    pos = torch.stack(torch.meshgrid(*grids, indexing="ij"), -1).flatten(0, 2)[None]
    pos = torch.cat([pos, pos.new_zeros(1, d.num_register_tokens + 1, 3)], 1)
    return d.rope(pos)


def decode_rows(vae, z, rope):
    """Decoder for one chunk, z [n, t, h, w, 24] -> [n, 3, 4 t, 16 h, 16 w]."""
    d = vae.decoder
    n, t, h, w, _ = z.shape
    x = d.proj_in(F.linear(z, vae.post_quant_conv.weight[:, :, 0, 0, 0], vae.post_quant_conv.bias)).view(n, t * h * w, -1)
    x = torch.cat([x, d.register_tokens.to(x.dtype).expand(n, -1, -1), torch.zeros_like(x[:, :1])], 1).float()
    cos, sin = (r.to(z.dtype) for r in rope)
    k = cos.shape[-1]
    rot = lambda y: torch.cat([y[..., :k] * cos + torch.cat([-y[..., k // 2:k], y[..., :k // 2]], -1) * sin, y[..., k:]], -1)
    for blk in d.transformer_blocks:
        a = blk.attn
        y = F.rms_norm(x, x.shape[-1:], blk.norm1.weight, 1e-5).to(z.dtype)
        q, kk, v = (p(y).view(n, y.shape[1], a.heads, -1) for p in (a.to_q, a.to_k, a.to_v))
        unit = lambda s: rot(F.rms_norm(s.float(), s.shape[-1:], None, 1e-5).to(z.dtype)).transpose(1, 2)
        o = F.scaled_dot_product_attention(unit(q), unit(kk), v.to(z.dtype).transpose(1, 2))
        x = x + a.to_out[0](o.transpose(1, 2).reshape(n, y.shape[1], -1)) * blk.scale1
        y = F.rms_norm(x, x.shape[-1:], blk.norm2.weight, 1e-5).to(z.dtype)
        u, g = blk.ff.net[0].proj(y).chunk(2, -1)
        x = x + blk.ff.net[2](u * F.silu(g)) * blk.scale2
    x = F.layer_norm(x[:, :t * h * w], x.shape[-1:], d.norm_out.weight, d.norm_out.bias, 1e-5).to(z.dtype)
    x = d.proj_out(x).view(n, t, h, w, 3, 4, 16, 16)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(n, 3, 4 * t, 16 * h, 16 * w)


def clips(frames):
    return [min(17, frames - i) for i in range(0, frames, 17)]


def normalise(img):
    m = torch.tensor(PIXEL_MEAN, device=img.device).view(1, 3, 1, 1, 1)
    s = torch.tensor(PIXEL_STD, device=img.device).view(1, 3, 1, 1, 1)
    return (img - m) / s


def denormalise(x):
    m = torch.tensor(PIXEL_MEAN, device=x.device).view(1, 3, 1, 1, 1)
    s = torch.tensor(PIXEL_STD, device=x.device).view(1, 3, 1, 1, 1)
    return (x * s + m).clamp(0, 1)


def encode_video(vae, x):
    """Means of the latents [n, 24, t', h', w'] of a video of 17 k + 5 frames or of one frame, pixels already normalised."""
    x = F.pad(x.permute(0, 2, 3, 4, 1), (0, 5)).contiguous()
    if x.is_cuda:
        x = x.bfloat16()
    return encode_rows(vae, x, clips(x.shape[1]))[..., :24].permute(0, 4, 1, 2, 3).contiguous()
