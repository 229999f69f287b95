# SPDX-License-Identifier: Apache-2.0
"""Steps of a golden case on the tiny model over the bus, for tests that ask for many of them."""

import mmap
import os
import struct

import harness
import minibus
from minibus import NAME, Variant

DATA = harness.TESTS / "data/dit"
ARENA = 8 << 20


def make_gated(path):
    """The tiny model with gates, which are of int8 beside other weights: it takes sparse attention of the kind vsa alone."""
    tensors, _ = harness.read_safetensors(DATA / "comfy.safetensors")
    numbers = bytes((i * 37 + i // 64 * 11) % 256 for i in range(1024 * 64))
    marker = b'{"format": "int8_tensorwise"}'
    for i in range(3):
        gate = f"blocks.{i}.attn.to_gate_compress."
        tensors[gate + "weight"] = ("I8", [1024, 64], numbers)
        tensors[gate + "weight_scale"] = ("F32", [1024, 1], struct.pack("<f", 0.002) * 1024)
        tensors[gate + "comfy_quant"] = ("U8", [len(marker)], marker)
    harness.write_safetensors(path, tensors)


class Client:
    """A connection with a model and a golden case's inputs (tensors: what a session has)."""

    def __init__(self, service, model=DATA / "comfy.safetensors", case="case_t2va_odd"):
        self.bus = minibus.Connection(service.bus.address)
        self.tensors, self.meta = harness.read_safetensors(DATA / f"{case}.safetensors")
        state, error, result = self.bus.wait_job(self.bus.manager("LoadModel", "sa{sv}", model.name, {})[0])
        assert state == "done", error
        self.model = result["model"]

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.bus.close()

    def open(self, **options):
        types = {"ranks": "u", "chunks": "u", "shares": "au", "gpus": "as"}
        d = {k: Variant(types.get(k, "s"), v) for k, v in options.items()}
        size = Variant("t", ARENA)
        session, i, o = self.bus.manager("OpenSession", "a{sv}", {"model": Variant("o", self.model), "input-bytes": size,
                                                                 "output-bytes": size, **d})
        return Session(self, session, i, o)


class Session:
    def __init__(self, client, path, i, o):
        self.client, self.path = client, path
        self.request, self.used, self.input = {}, 0, mmap.mmap(i, ARENA)
        for name in ("text", "text_tags", "video", "audio"):
            self.put(name.replace("_", "-"), *client.tensors[name])
        self.output = mmap.mmap(o, ARENA, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(i)
        os.close(o)

    def put(self, key, dtype, shape, data):
        self.input[self.used:self.used + len(data)] = data
        self.request[key] = Variant("(tsat)", (self.used, dtype, shape))
        self.used = (self.used + len(data) + 63) // 64 * 64

    def announce(self, video, audio):
        """The schedule that the next steps are of."""
        for key, sigmas in (("sigmas-video", video), ("sigmas-audio", audio)):
            self.put(key, "F32", [len(sigmas)], struct.pack(f"={len(sigmas)}f", *sigmas))

    def call(self, member, **more):
        return self.client.bus.call(self.path, NAME + ".Session", member, "a{sv}", {**self.request, **more})[0]

    def start_step(self, compute):
        return self.call("Step", **{"sigma-video": Variant("d", 0.75), "sigma-audio": Variant("d", 0.5), "compute": Variant("s", compute)})

    def start_sample(self, steps):
        return self.call("Sample", steps=Variant("u", steps), compute=Variant("s", harness.COMPUTE))

    def finish(self, job):
        """({tensor: bytes}, result) of a job that must succeed."""
        state, error, result = self.client.bus.wait_job(job)
        assert state == "done", f"{state}: {error}"
        out = {}
        for name, offset, dtype, shape in result["tensors"]:
            n = 4
            for x in shape:
                n *= x
            out[name] = self.output[offset:offset + n]
        return out, result

    def step(self, compute="bf16"):
        return self.finish(self.start_step(compute))

    def fail(self, job, name, *texts):
        state, error, _ = self.client.bus.wait_job(job)
        assert state == "failed" and error[0] == name, f"{state}: {error}"
        for t in texts:
            assert t in error[1], f"{t!r} is not in {error[1]!r}"
