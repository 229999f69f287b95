# SPDX-License-Identifier: Apache-2.0
"""Trains the diffusion transformer and the text encoder together, on one GPU or, under torch.distributed.run, on several.

train_dit.py VAE_DIR TOKENIZER_DIR OUTDIR [--limit 570] [--rows 16000] [--shift 6 3] [--encode 60] [--rate 1.5e-3]
             [--init DIR] [--clips SHARE] [--steps N] [--adam] [--eager] [--compile] [--smoke]

VAE_DIR    video_vae.safetensors and audio_vae.safetensors (unpack.py makes them from the checkpoint folder)
--limit    wall seconds of this call, everything included; the learning rate ends at zero shortly before that
--init     folder with weights_0, weights_1 and latent_stats.json of an earlier run (or of unpack.py), to go on from
--encode   seconds at most for encoding the clips
--rows     rows of a batch on one GPU (clips x sequence length)
--shift    time shifts (video, audio) that the steps are trained for and the tables are made with
--clips    share of the clips to encode    --smoke    tiny, to try it on a CPU
--adam     AdamW everywhere    --eager    no CUDA graphs    --compile    torch.compile for the transformer block

A step is two CUDA graphs: one picks the clips, noise and times itself on the device and runs forward and backward, the
other takes the optimiser's step; between them the gradients are exchanged.  There is one of the first kind per shape and
task; the host only chooses the graph and sets the learning rate.
"""
import time

t0 = time.time()
import argparse
import json
import math
import os
import random

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import data
import flat
import measure
import net

ap = argparse.ArgumentParser()
ap.add_argument("vae_dir"), ap.add_argument("tok_dir"), ap.add_argument("out")
for name, default in (("limit", 570.0), ("encode", 60.0), ("rate", 1.5e-3), ("clips", 1.0)):
    ap.add_argument("--" + name, type=float, default=default)
ap.add_argument("--init"), ap.add_argument("--rows", type=int, default=16000)
ap.add_argument("--shift", type=float, nargs=2, default=(6.0, 3.0)), ap.add_argument("--steps", type=int, default=10 ** 9)
for name in ("eager", "compile", "smoke", "adam"):
    ap.add_argument("--" + name, action="store_true")
args = ap.parse_args()
smoke, out = args.smoke, args.out
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
dev = "cpu"
cuda = torch.cuda.is_available()
if cuda:
    dev = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(dev)
kind = dev.split(":")[0]
if world > 1:
    dist.init_process_group("nccl" if cuda else "gloo")
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
torch.backends.cuda.enable_cudnn_sdp(False)
os.makedirs(out, exist_ok=True)
say = lambda *a: rank or print(f"[dit {time.time() - t0:6.1f}s]", *a, flush=True)
amp = lambda: torch.autocast(kind, dtype=torch.bfloat16, enabled=cuda, cache_enabled=False)
GRAPH = cuda and not args.eager

# height, width, frames, clips, tasks; the tasks are drawn by TASKS, the shapes by the last number
ALL = ("text", "first", "both", "image")
TASKS = {"text": 0.66, "first": 0.16, "both": 0.06, "image": 0.12}
GROUPS = [(160, 256, 22, 10000, ALL, 0.42), (160, 256, 39, 2500, ("text", "first", "both"), 0.11),
          (160, 256, 56, 1500, ("text", "first", "both"), 0.07), (160, 160, 22, 4000, ("text", "first", "image"), 0.15),
          (256, 160, 22, 2500, ("text", "first"), 0.07), (96, 160, 22, 3000, ("text", "first", "both", "image"), 0.07),
          (96, 160, 39, 2000, ("text", "first"), 0.06), (192, 192, 22, 2000, ("text", "first"), 0.05)]
GROUPS = [(h, w, f, int(n * args.clips) // (32 * world) * 32 * world, t, s) for h, w, f, n, t, s in GROUPS]
PARAPHRASES = 6
if smoke:
    GROUPS = [(64, 64, 22, 24, ALL, 0.7), (32, 64, 39, 8, ("text", "first"), 0.3)]
R = 64 if smoke else data.REFERENCE_SIZE

# ---------------------------------------------------------------------------------------------- 1. the encoded clips
vae = AutoencoderKLMiniMaxH3(**net.VAE)
vae.load_state_dict(load_file(f"{args.vae_dir}/video_vae.safetensors"))
vae = vae.to(dev).requires_grad_(False)
avae = AutoencoderKLMiniMaxH3Audio(**net.AUDIO)
avae.load_state_dict(load_file(f"{args.vae_dir}/audio_vae.safetensors"))
avae = avae.to(dev).requires_grad_(False)
tok = Tokenizer.from_file(f"{args.tok_dir}/tokenizer.json")
START, END, IMAGE, PAD = (tok.token_to_id(t) for t in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|endoftext|>"))
LABEL = [tok.encode(f"<Picture {i}>: ", add_special_tokens=False).ids for i in (1, 2)]


@torch.no_grad()
def encode_mean(x):
    with amp():
        return net.encode_video(vae, net.normalise(x)).half()


def prompt_table(rows, n, kind, seed):
    rng = random.Random(seed)
    make = {"text": data.prompt, "key": lambda s, r: data.prompt(s, r, True), "image": data.reference_prompt}[kind]
    texts = [make({k: v[i] for k, v in rows.items()}, rng) for i in range(n) for _ in range(PARAPHRASES)]
    ids = [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)]
    width = max(map(len, ids))
    flat = torch.tensor([x + [PAD] * (width - len(x)) for x in ids], dtype=torch.int16)
    return flat, torch.tensor([len(x) for x in ids])


def build_cache():
    """Every rank encodes its part of every group, then all parts come together."""
    made = [dict(z=[], last=[], ref=[], done=0) for _ in GROUPS]
    specs = [data.sample_specs(g[3], dev, 100 + i) for i, g in enumerate(GROUPS)]
    refs = [data.reference_spec(s, 200 + i) for i, s in enumerate(specs)]
    begin, size = time.time(), 4 if smoke else 32
    while True:
        todo = [i for i, m in enumerate(made) if m["done"] < GROUPS[i][3] // world]
        stop = torch.tensor([float(not todo or time.time() - begin > args.encode)], device=dev)
        if world > 1:
            dist.broadcast(stop, 0)
        if stop.item():
            break
        i = min(todo, key=lambda i: made[i]["done"] / GROUPS[i][3])
        m, (H, W, Fr, n, tasks, _) = made[i], GROUPS[i]
        idx = (m["done"] + torch.arange(size, device=dev)) * world + rank
        img = data.render(data.take(specs[i], idx), Fr, H, W)
        m["z"].append(encode_mean(img))
        if "both" in tasks:
            m["last"].append(encode_mean(img[:, :, -1:]))
        if "image" in tasks:
            m["ref"].append(encode_mean(data.render(data.take(refs[i], idx), 1, R, R)))
        m["done"] += size
    cache = []
    for i, (m, (H, W, Fr, n, tasks, _)) in enumerate(zip(made, GROUPS)):
        c = dict(H=H, W=W, F=Fr)
        for k in ("z", "last", "ref"):
            if m[k]:
                t = torch.cat(m[k])
                if world > 1:
                    parts = [torch.empty_like(t) for _ in range(world)]
                    dist.all_gather(parts, t)
                    t = torch.stack(parts, 1).flatten(0, 1)
                c[k] = t
        keep = torch.arange(m["done"] * world, device=dev)
        c["spec"], c["ref_spec"] = data.take(specs[i], keep), data.take(refs[i], keep)
        rows = {k: v.tolist() for k, v in c["spec"].items() if k != "jitter"}
        for kind in ("text", "key") + (("image",) if "image" in tasks else ()):
            c["ids_" + kind], c["len_" + kind] = prompt_table(rows, len(keep), kind, 300 + i)
        cache.append(c)
    say("encoded", [m["done"] * world for m in made])
    return cache


to_dev = lambda x: {k: to_dev(v) for k, v in x.items()} if isinstance(x, dict) else x.to(dev) if torch.is_tensor(x) else x
cache = [to_dev(c) for c in build_cache()]

# the statistics of the latents: those of the first leg are kept
stats_file = f"{args.init}/latent_stats.json" if args.init else None
if stats_file and os.path.exists(stats_file):
    stats = json.load(open(stats_file))
else:
    s1 = s2 = cnt = 0
    for c in cache:
        z = c["z"].double().flatten(2)
        s1, s2, cnt = s1 + z.sum((0, 2)), s2 + z.square().sum((0, 2)), cnt + z[:, 0].numel()
    mean = s1 / cnt
    stats = dict(video_mean=mean.tolist(), video_std=(s2 / cnt - mean.square()).sqrt().tolist())


@torch.no_grad()
def audio_table(A):
    """The sound depends only on its name, the panning direction and the length: [24, 2, 32, A]."""
    spec = {"sound": torch.arange(24, device=dev) // 3, "motion": torch.arange(24, device=dev) % 3}
    return avae.encode(data.sound(spec, A).reshape(48, 1, -1)).latent_dist.mean.reshape(24, 2, 32, A)


tables = {Fr: audio_table(net.audio_latents(Fr)) for Fr in {g[2] for g in GROUPS}}
if "audio_mean" not in stats:
    a = torch.cat([t.permute(2, 0, 1, 3).flatten(1) for t in tables.values()], 1)
    stats |= dict(audio_mean=a.mean(1).tolist(), audio_std=a.std(1).clamp(min=0.05).tolist())
json.dump(stats, open(f"{out}/latent_stats.json", "w"))
vmean, vstd, amean, astd = (torch.tensor(stats[k], device=dev) for k in ("video_mean", "video_std", "audio_mean", "audio_std"))
nv = lambda z: (z.float() - vmean.view(1, -1, 1, 1, 1)) / vstd.view(1, -1, 1, 1, 1)
for g, c in zip(GROUPS, cache):
    a = (tables[g[2]] - amean.view(1, 1, -1, 1)) / astd.view(1, 1, -1, 1)
    c["audio"] = a.permute(0, 1, 3, 2).reshape(24, -1, 32)
    c["aidx"] = c["spec"]["sound"] * 3 + c["spec"]["motion"].clamp(max=2)
    for name, spec, fr, H, W in (("path", c["spec"], g[2], g[0], g[1]), ("ref_path", c["ref_spec"], 1, R, R)):
        p = torch.stack(data.trajectory(spec, fr, H, W), 1)  # n, 4, frames
        c[name] = torch.stack([p[..., 0], p[..., -1]], 1)  # n, 2, 4
        c[name + "_colours"] = torch.cat([t.flatten(1) for t in data.palette(spec)], 1)  # n, 9
say("clips", sum(c["z"].shape[0] for c in cache), "vocabulary", tok.get_vocab_size())

# ------------------------------------------------------------------------------------------------------- 2. the model
torch.manual_seed(0)
dit = MiniMaxH3Transformer3DModel(**net.DIT).to(dev)
text = net.TextEncoder(tok.get_vocab_size()).to(dev)
with torch.no_grad():
    for b in dit.transformer_blocks:
        b.adaln_proj.linear.weight.normal_(std=0.02)
        b.adaln_proj.linear.bias.zero_()
        b.adaln_proj.linear.bias.view(3, 6, -1)[:, [2, 5]] = 0.4
    dit.norm_out.linear.weight.normal_(std=0.02)
    dit.norm_out.linear.bias.zero_()
    for m in (dit.proj_out, dit.audio_proj_out):
        m.weight.mul_(0.1)
        m.bias.zero_()
named = [("dit." + n, p) for n, p in dit.named_parameters()] + [("text." + n, p) for n, p in text.named_parameters()]
matrix = lambda n, p: not args.adam and p.dim() == 2 and any(x in n for x in (".attn.to_", ".ff.net", ".self_attn.", ".mlp.")) \
    and "visual" not in n
opt = flat.Flat(named, matrix, dev, wd=0.02)
if args.compile:
    torch._inductor.config.triton.coalesce_tiling_analysis = False
    compiled = torch.compile(net._block)

    def block(x, te, onehot, cos, sin, mask, *rest):
        for t, dims in ((x, (0, 1)), (te, (0,)), (onehot, (1,)), (cos, (0, 1)), (sin, (0, 1)), (mask, (0, 3))):
            for d in dims:
                torch._dynamo.maybe_mark_dynamic(t, d)
        return compiled(x, te, onehot, cos, sin, mask, *rest)

    net.block_fn = block


def save():
    if rank == 0:
        half = {k: v.to(torch.bfloat16).cpu().contiguous() for k, v in opt.average().items()}
        names = list(half)
        for i, part in enumerate((names[::2], names[1::2])):
            save_file({k: half[k] for k in part}, f"{out}/.weights_{i}")
        for i in range(2):
            os.rename(f"{out}/.weights_{i}", f"{out}/weights_{i}.safetensors")


# -------------------------------------------------------------------------------------------------------- 3. the steps
shifted = lambda u, s: s * u / (1 + (s - 1) * u)


class Task:
    """One shape and one task with all its tables; `step` is free of transfers and can be recorded."""

    def __init__(self, gi, task):
        H, W, Fr, *_ = GROUPS[gi]
        self.g, self.c, self.task, self.name = GROUPS[gi], cache[gi], task, f"{H}x{W}x{Fr} {task}"
        kind = {"text": "text", "image": "image"}.get(task, "key")
        self.ids, self.lens = self.c["ids_" + kind], self.c["len_" + kind]
        T, A = net.latent_frames(Fr), net.audio_latents(Fr)
        self.conds = {"text": (), "first": ("first",), "both": ("first", "last"), "image": ((R // 16, R // 16),)}[task]
        pre, self.spans, tags = [], [], []
        for i, c in enumerate(self.conds):
            h, w = (H // 32, W // 32) if c in ("first", "last") else (R // 32, R // 32)
            pre += LABEL[i] + [START]
            self.spans.append((len(pre), h, w))
            tags += [1] * len(LABEL[i]) + [0] * (h * w + 2)
            pre += [IMAGE] * (h * w) + [END]
        others = sum(1 for t in tags) + 2 * A + T * (H // 32) * (W // 32)
        others += sum((H // 32) * (W // 32) if c in ("first", "last") else (R // 32) ** 2 for c in self.conds)
        self.P = self.ids.shape[1] + (-(others + self.ids.shape[1])) % 16  # a sequence of whole 16s
        self.layout = net.Layout(tags + [1] * self.P, self.conds, T, H // 16, W // 16, A, dev)
        self.pre = torch.tensor(pre, device=dev, dtype=torch.long)
        self.rope = text.rope(len(pre) + self.P, self.spans, dev)
        self.B = 4 if smoke else max(8, args.rows // self.layout.N // 4 * 4)
        self.loss = torch.zeros(2, device=dev)
        self.norm = torch.zeros((), device=dev)

    def forward(self, dit, text, ids, lens, cond, img, xa, xv, ta, tv):
        """ids [B, P] padded prompts -> velocities."""
        full = torch.cat([self.pre[None].expand(ids.shape[0], -1), F.pad(ids, (0, self.P - ids.shape[1]), value=PAD)], 1)
        with amp():
            emb = text(full, self.spans, img, self.rope)
            return net.dit_forward(dit, emb, cond, xa, xv, tv, ta, self.layout, lens + len(self.pre))

    def conditions(self, s, z):
        rows, img = [z.new_zeros(s.shape[0], 0, 96)], []
        for c in self.conds:
            end = int(c == "last")
            path, H, W = ("path", *self.g[:2]) if c in ("first", "last") else ("ref_path", R, R)
            x, y, r, a = self.c[path][s, end].unbind(1)
            col = self.c[path + "_colours"][s]
            px = data.draw(self.c["spec"]["shape"][s], col[:, :3], col[:, 3:].view(-1, 2, 3), *(t[:, None] for t in (x, y, r, a)), H, W)
            img.append((px[:, :, 0] * 255).round() / 127.5 - 1)
            lat = net.patchify(z[:, :, :1] if c == "first" else nv(self.c["last" if c == "last" else "ref"][s]))
            rows.append(0.999 * lat + 0.001 * torch.randn_like(lat))
        return torch.cat(rows, 1), img

    def step(self):
        B, n = self.B, self.c["z"].shape[0]
        s = (torch.rand(B, device=dev) * n).long().clamp(max=n - 1)
        which = s * PARAPHRASES + (torch.rand(B, device=dev) * PARAPHRASES).long().clamp(max=PARAPHRASES - 1)
        z = nv(self.c["z"][s])
        cond, img = self.conditions(s, z)
        zv, za = net.patchify(z), self.c["audio"][self.c["aidx"][s]]
        # times: one base point u for both streams, as the sampler has it; a quarter of the batch takes other shifts
        u = (torch.arange(B, device=dev) + torch.rand(B, device=dev)) / B
        free = torch.rand(B, device=dev) < 0.25
        s_v = shifted(u, torch.where(free, torch.exp(torch.rand(B, device=dev) * math.log(12.0)), args.shift[0]))
        s_a = shifted(u, torch.where(free, torch.exp(torch.rand(B, device=dev) * math.log(6.0)), args.shift[1]))
        ev, ea = torch.randn_like(zv), torch.randn_like(za)
        pv, pa = self.forward(dit, text, self.ids[which].long(), self.lens[which], cond, img,
                              ea + (1 - s_a)[:, None, None] * (za - ea), ev + (1 - s_v)[:, None, None] * (zv - ev), 1 - s_a, 1 - s_v)
        lv, la = F.mse_loss(pv, zv - ev), F.mse_loss(pa, za - ea)
        opt.backward(lv + la)
        self.loss.copy_(torch.stack([lv.detach(), la.detach()]))

    def record(self, pool):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.step()
        return self.graph.pool()

    def run(self):
        self.graph.replay() if getattr(self, "graph", None) is not None else self.step()


# ---------------------------------------------------------------------------------------------------- 4. measurement
@torch.no_grad()
def sample(steps, shift, n=32, seed=999):
    """n held-out prompts with the averaged weights -> clips and sounds (on the device)."""
    task = next(t for t in tasks if t.task == "text")
    H, W, Fr, *_ = task.g
    T, A = net.latent_frames(Fr), net.audio_latents(Fr)
    spec, rng = data.sample_specs(n, "cpu", seed), random.Random(5)
    texts = [data.prompt({k: int(v[i]) for k, v in spec.items() if k != "jitter"}, rng) for i in range(n)]
    enc = [tok.encode(t, add_special_tokens=False).ids[:task.P] for t in texts]
    ids = torch.tensor([e + [PAD] * (task.P - len(e)) for e in enc], device=dev)
    lens = torch.tensor([len(e) for e in enc], device=dev)
    gen = torch.Generator().manual_seed(seed)
    xv = net.patchify(torch.randn(n, 24, T, H // 16, W // 16, generator=gen)).to(dev)
    xa = torch.randn(n, 2 * A, 32, generator=gen).to(dev)
    b = torch.linspace(1, 0, steps + 1)
    sv, sa = shifted(b, shift[0]).tolist(), shifted(b, shift[1]).tolist()
    fill = lambda s: torch.full((n,), 1 - s, device=dev)
    for j in range(steps):
        pv, pa = task.forward(dit, text, ids, lens, xv[:, :0], [], xa, xv, fill(sa[j]), fill(sv[j]))
        xv, xa = xv + (sv[j] - sv[j + 1]) * pv.float(), xa + (sa[j] - sa[j + 1]) * pa.float()
    z = net.unpatchify(xv, T, H // 16, W // 16) * vstd.view(1, -1, 1, 1, 1) + vmean.view(1, -1, 1, 1, 1)
    video, wave = [], []
    for i in range(0, n, 8):
        with amp():
            video.append(net.denormalise(vae.decode(z[i:i + 8]).sample.float()))
        y = xa[i:i + 8].view(-1, 2, A, 32).permute(0, 1, 3, 2) * astd.view(1, 1, -1, 1) + amean.view(1, 1, -1, 1)
        wave.append(avae.decode(y.reshape(-1, 32, A)).sample.reshape(y.shape[0], 2, -1))
    return spec, torch.cat(video), torch.cat(wave)


@torch.no_grad()
def table(cases, n=64):
    if rank:
        return
    keep, block = opt.p.clone(), net.block_fn
    opt.p.copy_(opt.ema)
    net.block_fn = net._block
    for steps, shift in cases:
        spec, video, wave = sample(steps, shift, n)
        hit, _ = measure.score(spec, list(video), list(wave))
        say(f"step {step}: {steps} steps, shift {shift[0]:g} / {shift[1]:g}, correct of {n}:",
            "  ".join(f"{k} {hit[k]}" for k in ("bg", "colour", "shape", "motion", "sound", "all")))
    opt.p.copy_(keep)
    net.block_fn = block


# -------------------------------------------------------------------------------------------------------- 5. training
if args.init:
    opt.load({k: v for i in range(2) for k, v in load_file(f"{args.init}/weights_{i}.safetensors").items()})
say("parameters", opt.p.numel(), "orthogonal", opt.tail)
torch.manual_seed(1000 + rank)
rng = random.Random(1000)  # the same on every rank
tasks = [Task(i, t) for i, g in enumerate(GROUPS) for t in g[4]]
share = {t: TASKS[t.task] / sum(TASKS[k] for k in t.g[4]) * t.g[5] for t in tasks}
step = 0
if GRAPH:
    pool = None
    try:
        tasks[0].step()
        say("first step")
    except Exception as e:
        say("no compilation:", repr(e)[:500])
        net.block_fn = net._block
    for t in tasks:
        pool = t.record(pool)
    opt.update()
    opt.count.zero_()
    update = torch.cuda.CUDAGraph()
    opt.load({n: opt.p[a:a + k].view(s) for n, (a, k, s) in zip(opt.names, opt.slots)})
    torch.cuda.synchronize()
    with torch.cuda.graph(update, pool=pool, capture_error_mode="thread_local"):
        opt.update()
    say(f"recorded {len(tasks)} graphs; memory {torch.cuda.memory_reserved() / 2 ** 30:.1f} GiB")
    for t in tasks:
        t.run()
        torch.cuda.synchronize()
        a = time.time()
        for _ in range(3):
            t.run()
        torch.cuda.synchronize()
        say(f"{t.name}: batch {t.B}, rows {t.layout.N}, {(time.time() - a) / 3 * 1000:.1f} ms")
    opt.lr.zero_(), opt.keep.zero_(), opt.m.zero_(), opt.v.zero_()
state = torch.zeros(1, dtype=torch.float64, device=dev)


def elapsed():
    """The time of rank 0, the same on every rank."""
    state.fill_(time.time() - t0)
    if world > 1:
        dist.broadcast(state, 0)
    return state.item()


start = now = elapsed()
end = args.limit - (0 if smoke else 30)  # the last tables need their time
mark = judged = now
sums, count, judging, value = torch.zeros(2, device=dev), 0, 0.0, 0.0
while now < end and step < args.steps:
    if step % 16 == 0:
        now = elapsed()
        u = (now - start) / (end - start)
        value = args.rate * min(1, (step + 16) / 500) * min(1, max(0.01, (1 - u) / 0.5))
        opt.lr.fill_(value), opt.keep.fill_(min(0.999, (step + 1) / (step + 20)))
    t = rng.choices(tasks, [share[t] for t in tasks])[0]
    t.run()
    if world > 1:
        dist.all_reduce(opt.g, dist.ReduceOp.AVG) if cuda else (dist.all_reduce(opt.g), opt.g.div_(world))
    update.replay() if GRAPH else opt.update()
    step += 1
    count += 1
    sums += t.loss
    if step in (16, 112) or (step % 16 == 0 and now - mark > 20):
        a = (sums / count).tolist()
        say(f"step {step} video {a[0]:.4f} audio {a[1]:.4f} grad {opt.norm.item():.2f} rate {value:.1e} "
            f"{(now - start - judging) / step * 1000:.1f} ms a step")
        mark, count = now, 0
        sums.zero_()
        if not all(map(math.isfinite, a)):
            raise SystemExit("the loss is not finite: go on from the last state with a lower --rate")
        save()
    if step % 16 == 0 and now - judged > 150 and not smoke:
        table([(8, args.shift)])
        judged = elapsed()
        judging += judged - now
save()
say("steps", step)
cases = [(8, tuple(args.shift)), (20, tuple(args.shift)), (8, (12.0, 3.0)), (8, (3.0, 2.0))]
for case in cases[:1] if smoke else cases:
    if smoke or time.time() - t0 < args.limit - 6:
        table([case], 2 if smoke else 64)
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
