# SPDX-License-Identifier: Apache-2.0
"""All parameters in one buffer: gradients, moments and averages are buffers of the same form, so that a step, the exchange
between GPUs and a saved state are a few operations each.  Matrices named by `hidden` take orthogonalised momentum steps
(Newton-Schulz, update scaled to Adam's usual size); everything else takes AdamW steps."""
import math

import torch


class Flat:
    def __init__(self, named, hidden, dev, wd=0.01, betas=(0.9, 0.98), clip=1.0):
        named = [(n, p) for n, p in named if p.requires_grad]
        flat2 = lambda p: tuple(p.flatten(1).shape)
        shapes = sorted({flat2(p) for n, p in named if hidden(n, p)})
        order, self.groups, at = [], [], 0
        for s in shapes:
            g = [(n, p) for n, p in named if hidden(n, p) and flat2(p) == s]
            size = sum(p.numel() for _, p in g)
            self.groups.append((at, at + size, len(g), *s))
            order += g
            at += size
        self.tail = at
        order += [(n, p) for n, p in named if not hidden(n, p)]
        total = sum(p.numel() for _, p in order)
        z = lambda: torch.zeros(total, device=dev)
        self.p, self.g, self.m, self.v = z(), z(), z(), torch.zeros(total - self.tail, device=dev)
        decay = torch.zeros(total - self.tail, device=dev)
        self.names, self.slots, self.params, at = [], [], [], 0
        with torch.no_grad():
            for n, p in order:
                k = p.numel()
                self.p[at:at + k] = p.detach().flatten()
                p.data = self.p[at:at + k].view(p.shape)
                if at >= self.tail and p.dim() >= 2:
                    decay[at - self.tail:at - self.tail + k] = wd
                self.names.append(n), self.slots.append((at, k, p.shape)), self.params.append(p)
                at += k
        self.ema = self.p.clone()
        self.decay, self.wd, self.betas, self.clip = decay, wd, betas, clip
        self.lr, self.count = torch.zeros((), device=dev), torch.zeros((), device=dev)
        self.keep = torch.zeros((), device=dev)  # of the average
        self.norm = torch.zeros((), device=dev)
        self.views = [self.g[a:a + k].view(s) for a, k, s in self.slots]

    def backward(self, loss):
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        self.g.zero_()
        torch._foreach_copy_([v for v, g in zip(self.views, grads) if g is not None], [g for g in grads if g is not None])

    @torch.no_grad()
    def update(self):
        """One step from self.g; nothing is read by the host."""
        b1, b2 = self.betas
        self.count += 1
        torch.linalg.vector_norm(self.g, out=self.norm)
        self.g *= (self.clip / (self.norm + 1e-6)).clamp(max=1)
        for lo, hi, k, a, b in self.groups:
            g, m = self.g[lo:hi].view(k, a, b), self.m[lo:hi].view(k, a, b)
            m.lerp_(g, 0.05)
            o = orthogonal(g.lerp(m, 0.95))
            p = self.p[lo:hi].view(k, a, b)
            p.mul_(1 - self.lr * self.wd)
            p.sub_(o.float() * (self.lr * (0.2 * math.sqrt(max(a, b)))))
        g, m, v, p = self.g[self.tail:], self.m[self.tail:], self.v, self.p[self.tail:]
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        c1, c2 = 1 - b1 ** self.count, 1 - b2 ** self.count
        p.mul_(1 - self.lr * self.decay)
        p.sub_(m / ((v / c2).sqrt() + 1e-8) * (self.lr / c1))
        self.ema.lerp_(self.p, 1 - self.keep)

    def average(self):
        """name -> averaged tensor."""
        return {n: self.ema[a:a + k].view(s) for n, (a, k, s) in zip(self.names, self.slots)}

    @torch.no_grad()
    def load(self, tensors):
        """Weights by name into the values and the average."""
        for n, (a, k, s) in zip(self.names, self.slots):
            self.p[a:a + k] = tensors[n].to(self.p).flatten()
        self.ema.copy_(self.p)


def orthogonal(x, steps=5):
    """[k, m, n] -> nearest matrices with all singular values about 1, in bfloat16."""
    x = x.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.transpose(1, 2)
    x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() + 1e-12).bfloat16()
    for _ in range(steps):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(1, 2) if flip else x
