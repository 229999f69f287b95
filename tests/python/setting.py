# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: its path, the library of this build, the interpreter that has numpy, the golden cases.

`packaging/build-deps --python` makes .venv with numpy and the tools; without it the tests run on the plain interpreter and skip what needs
more. Import this first."""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent
PACKAGE = SOURCE / "client/python"
VENV = SOURCE / ".venv"

if (VENV / "bin/python3").exists() and pathlib.Path(sys.prefix).resolve() != VENV.resolve() and "LATENT_TEST_PLAIN" not in os.environ:
    os.execv(VENV / "bin/python3", [str(VENV / "bin/python3"), *sys.argv])

sys.path[:0] = [str(PACKAGE), str(TESTS), str(TESTS / "bus")]
import harness  # noqa: E402
from service_manager import Manager  # noqa: E402, F401
from tap import Tap  # noqa: E402

os.environ.setdefault("LATENT_LIBRARY", str(harness.BUILD / "client/liblatent.so.1"))
import latent  # noqa: E402

DATA = TESTS / "data/dit"
MODEL = DATA / "comfy.safetensors"
F32, TRAJECTORY = (5e-6, 3e-5), (2e-5, float("inf"))  # as run-golden's


class Skip(Exception):
    pass


def have(package):
    return importlib.util.find_spec(package) is not None


def need(package):
    if not have(package):
        raise Skip(f"this interpreter has no {package}")


class Checks(Tap):
    """An error of the service is a failure with its name and text."""

    def check(self, name, f):
        def run():
            try:
                return f()
            except latent.Error as e:
                raise AssertionError(f"{type(e).__name__}: {e}") from e
        super().check(name, run, skip=Skip)


def expect(kind, f, *texts):
    """f() raises just this class, and its text says these."""
    try:
        r = f()
    except latent.Error as e:
        assert type(e) is kind, f"{type(e).__name__}: {e} instead of {kind.__name__}"
        for t in texts:
            assert t in e.text, f"{t!r} is not in {e.text!r}"
        return e
    raise AssertionError(f"{kind.__name__} expected, got {r!r}")


class Case:
    """A golden case or trajectory: its tensors in a session, the rest of the request."""

    def __init__(self, name):
        self.tensors, self.meta = harness.read_safetensors(DATA / f"{name}.safetensors")
        self.sigmas = {f"sigma_{s}": float(self.meta[f"sigma_{s}"]) for s in ("video", "audio")}

    def put(self, s):
        """The arguments that step() and sample() have in common."""
        def put(name):
            return s.put(self.tensors[name][2], self.tensors[name][0], self.tensors[name][1]) if name in self.tensors else None
        kinds = json.loads(self.meta["conds"])
        conditions = [latent.Condition(c["kind"], c.get("frame", 0), put(f"cond.{i}.video"), put(f"cond.{i}.audio"))
                      for i, c in enumerate(kinds)]
        return {"conditions": conditions, **{n: put(n) for n in ("text", "text_tags", "video", "audio")}}


def bits(job):
    return {n: (t.dtype, list(t.shape), bytes(t.memory)) for n, t in job.tensors.items()}


def near(got, want, limits):
    d = harness.distance(got, want)
    assert d[0] <= limits[0] and d[1] <= limits[1], f"{d} is beyond {limits}"
    return d[0]


@contextlib.contextmanager
def stopped(service):
    """Its workers stand still, so that no job ends meanwhile."""
    workers = service.workers()
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):  # it has died with its service
                os.kill(pid, signal.SIGCONT)


def load(client, path=MODEL):
    with client.load(path) as job:
        job.wait(300)
        return job.model
