# SPDX-License-Identifier: Apache-2.0
"""Test results as TAP, for the Python test programs."""

import subprocess

import harness


class Tap:
    def __init__(self):
        self.n = self.failed = self.skipped = 0

    def check(self, name, f, skip=()):
        """Runs f; a string it returns is printed as a note. An exception of type `skip` says why it cannot be run here."""
        self.n += 1
        try:
            note = f()
            print(f"ok {self.n} - {name}" + (f"\n# {note}" if isinstance(note, str) else ""), flush=True)
        except skip as e:
            print(f"ok {self.n} - {name} # SKIP {e}", flush=True)
        except (AssertionError, harness.HarnessError, subprocess.SubprocessError, OSError, ValueError, KeyError) as e:
            self.failed += 1
            text = " / ".join(str(e).splitlines())
            print(f"not ok {self.n} - {name}\n# {type(e).__name__}: {text}", flush=True)

    def skip(self, name, why):
        self.n += 1
        self.skipped += 1
        print(f"ok {self.n} - {name} # SKIP {why}", flush=True)

    @staticmethod
    def equal(a, b):
        assert a == b, f"{a!r} is not {b!r}"

    def end(self):
        print(f"1..{self.n}")
        return 1 if self.failed else 0
