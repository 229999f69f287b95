# SPDX-License-Identifier: Apache-2.0
"""Compares the training forward passes in net.py with diffusers / transformers on random weights (float32, CPU)."""
import torch
from diffusers import AutoencoderKLMiniMaxH3, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep as Layout
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3Ref2VAPrepareLayoutStep as RefLayout

import build
import net

torch.manual_seed(0)
rel = lambda a, b: ((a - b).abs().max() / b.abs().max()).item()
with torch.no_grad():
    text = net.TextEncoder(700).eval()
    for p in text.parameters():
        p.add_(torch.randn_like(p) * 0.05)
    hf = build.hf_text_encoder(700, text.state_dict(), ids=dict(image=600, video=601, start=602, end=603))
    H, W = 96, 160
    n = (H // 32) * (W // 32)
    img = torch.rand(1, 3, H, W) * 2 - 1
    ids = torch.randint(0, 500, (1, 30 + n))
    ids[:, 6:6 + n] = 600
    ids[:, 5], ids[:, 6 + n] = 602, 603
    spans = [(6, H // 32, W // 32)]
    ours = text(ids, spans, [img])
    px = img.view(1, 3, H // 32, 2, 16, W // 32, 2, 16).permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3, 1, 256)
    px = px.expand(-1, -1, 2, -1).reshape(-1, 1536)
    out = hf.model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == 600).int(),
                   pixel_values=px, image_grid_thw=torch.tensor([[1, H // 16, W // 16]]), use_cache=False,
                   output_hidden_states=True)
    print("text+vision", rel(ours, out.hidden_states[net.TEXT["used"]]))

    dit = MiniMaxH3Transformer3DModel(**net.DIT).eval()
    for p in dit.parameters():
        p.add_(torch.randn_like(p) * 0.05)
    L, T, A, h, w = ids.shape[1], 7, 37, H // 16, W // 16
    tags = [1] * 5 + [0] * (n + 2) + [1] * (L - n - 7)
    class Image:
        kind = "image"

    for conds in ((), ("first",), ("first", "last"), ((8, 8),)):
        K = sum(n if c in ("first", "last") else 16 for c in conds)
        if conds and conds[0] not in ("first", "last"):
            pos, token_tags, vi, ai, ti, nc, _ = RefLayout.build_ref2va_packed_sequence(
                torch.tensor(tags), [Image()], [torch.zeros(1, 24, 1, *conds[0])], [], T, h, w, A, (1, 2, 2), 2, 2, 0)
        else:
            pos, token_tags, vi, ai, ti, nc, _ = Layout.build_packed_sequence(
                torch.tensor(tags), T, h, w, A, (1, 2, 2), 2, 2, 0, conds)
        mine = net.positions(L, conds, T, h, w, A)
        kf, au, vid = torch.randn(1, K, 96), torch.randn(1, 2 * A, 32), torch.randn(1, n * T, 96)
        tv, ta = 0.3, 0.6
        ts, idx = torch.tensor([tv, ta, 0.999]), torch.zeros(len(pos), dtype=torch.long)
        idx[ai] = 1
        idx[vi[:nc]] = 2
        b = dit(torch.cat([kf, vid], 1), au, ours, ts, idx, token_tags, pos, vi, ai, ti)
        t_v, t_a = torch.tensor([tv]), torch.tensor([ta])
        a = net.dit_forward(dit, ours, kf, au, vid, t_v, t_a, net.Layout(tags, conds, T, h, w, A, "cpu"))
        pad = net.Layout(tags + [1] * 9, conds, T, h, w, A, "cpu")  # the same with nine rows of padding
        c = net.dit_forward(dit, torch.cat([ours, torch.randn(1, 9, 128)], 1), kf, au, vid, t_v, t_a, pad, torch.tensor([L]))
        print("dit", conds, "positions", (mine - pos).abs().max().item(), "video, audio", rel(a[0], b.sample[:, nc:]),
              rel(a[1], b.audio_sample), "padded", rel(c[0], b.sample[:, nc:]), rel(c[1], b.audio_sample))

    vae = AutoencoderKLMiniMaxH3(**net.VAE).eval()
    for p in vae.parameters():
        p.add_(torch.randn_like(p) * 0.03)
    x = torch.randn(1, 3, 22, 64, 96)
    cl = lambda y: y.permute(0, 2, 3, 4, 1)
    for t in (22, 39, 1):
        y = torch.randn(2, 3, t, 64, 96)
        print("encoder in rows", t, rel(net.encode_rows(vae, cl(y), net.clips(t)), cl(vae.encode(y).latent_dist.parameters)))
    one = vae.encode(x[:, :, :1]).latent_dist.mean
    print("first frame", rel(net.encode_video(vae, x)[:, :, :1], one))
    z = torch.randn(2, 24, 7, 4, 6)
    d = vae.decoder(vae.post_quant_conv(z))
    print("decoder in rows", rel(net.decode_rows(vae, z.permute(0, 2, 3, 4, 1), net.decoder_rope(vae, 7, 4, 6, "cpu")), d))
    print("chunk", rel(torch.cat([d[:, :, 3:20], d[:, :, 23:28]], 2), vae.decode(z).sample))
    zz = torch.randn(2, 24, 5, 4, 6)
    print("patchify", (net.unpatchify(net.patchify(zz), 5, 4, 6) - zz).abs().max().item())
