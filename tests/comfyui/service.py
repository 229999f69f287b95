# SPDX-License-Identifier: Apache-2.0
"""A private service for the pack's tests, in this process's environment, and what the service holds."""

import contextlib
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import harness

DATA = pathlib.Path(os.environ.get("LATENT_TEST_DATA", harness.TESTS / "data"))
MODEL = DATA / "dit/comfy.safetensors"


@contextlib.contextmanager
def private(**options):
    with harness.Service(**options) as s:
        os.environ["LATENT_LIBRARY"] = str(harness.BUILD / "client/liblatent.so.1")
        os.environ["LATENTD_ADDRESS"] = str(s.socket)
        os.environ.update({k: s.env[k] for k in ("DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS")})
        yield s


def pause(pid):
    """Stops a process, and waits until it stands still."""
    os.kill(pid, 19)
    harness.wait_until("the process stands still", 5, lambda: pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


def go_on(pid):
    os.kill(pid, 18)


class Clock:
    def __enter__(self):
        self.start = time.monotonic()
        return self

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self.start
