# SPDX-License-Identifier: Apache-2.0
"""A small service manager for tests: a notify socket, a store of descriptors (FDSTORE, FDSTOREREMOVE, BARRIER), and restarts
that hand them in (LISTEN_FDS, LISTEN_PID, LISTEN_FDNAMES) as systemd does. Its own process may be killed: so may the service.

Standard library only."""

import array
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import harness

FIRST = 3  # SD_LISTEN_FDS_START


class Manager(harness.Service):
    """harness.Service whose latentd runs under this manager. `restart`: it comes back by itself, whatever ended it but stop()."""

    def __init__(self, *args, restart=True, store_max=512, delay=0.05, **kw):
        super().__init__(*args, **kw)
        self.restart, self.store_max, self.delay = restart, store_max, delay
        self.store = []  # (name, fd), as systemd: several of one name are possible
        self.refused = 0
        self.starts = 0
        self.removed = []  # names
        self.taken = 0  # of sync()'s messages
        self.lock, self.syncing = threading.Lock(), threading.Lock()
        self.ready = threading.Event()
        self.stopping = False
        path = self.folder / "manager"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.notify_path = path
        self.threads = []

    # ------------------------------------------------------------------------------------- the notify socket

    def _listen(self):
        while True:
            data, control, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(64 * 4))
            fds = array.array("i")
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(payload[:len(payload) - len(payload) % 4])
            if data == b"QUIT=1":
                return
            if data == b"SYNC=1":
                self.taken += 1
                continue
            self._take(dict(line.split("=", 1) for line in data.decode().split("\n") if "=" in line), list(fds))

    def _take(self, message, fds):
        with self.lock:
            name = message.get("FDNAME", "stored")
            if "FDSTORE" in message:
                while fds and len(self.store) < self.store_max:
                    self.store.append((name, fds.pop(0)))
                self.refused += len(fds)
            if "FDSTOREREMOVE" in message:
                self.removed.append(name)
                for n, fd in [x for x in self.store if x[0] == name]:
                    os.close(fd)
                    self.store.remove((n, fd))
        for fd in fds:
            os.close(fd)  # a BARRIER's too: that is its answer
        if "READY" in message:
            self.ready.set()

    def sync(self):
        """Returns when everything that the service has said by now is taken: its messages come through the same socket, in order."""
        with self.syncing:
            before = self.taken
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
                s.sendto(b"SYNC=1", str(self.notify_path))
            harness.wait_until("the manager takes what was said", 20, lambda: self.taken > before, step=0.001)

    # ------------------------------------------------------------------------------------- the service

    def _spawn(self):
        self.sync()  # also a READY of the one before
        self.ready.clear()
        with self.lock:
            names = [n for n, _ in self.store]
            fds = [fd for _, fd in self.store]

            def place():
                # First out of the way, then to their places; what is there is not close-on-exec after dup2().
                high = [os.dup(fd) if fd < FIRST + len(fds) else fd for fd in fds]
                while any(fd < FIRST + len(fds) for fd in high):
                    high = [os.dup(fd) if fd < FIRST + len(fds) else fd for fd in high]
                for i, fd in enumerate(high):
                    os.dup2(fd, FIRST + i)
                os.environb[b"LISTEN_PID"] = str(os.getpid()).encode()

            env = dict(self.env, NOTIFY_SOCKET=str(self.notify_path))
            if fds:
                env.update(LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=":".join(names))
            command = [str(harness.BUILD / "service/latentd/latentd"), f"--{self.mode}", f"--bus-address={self.bus.address}",
                       f"--config={self.config}", *self.args]
            stderr = open(self.log, "ab") if self.log else None
            # The shell knows its own pid, which is latentd's after exec.
            self.process = subprocess.Popen(["/bin/sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *command] if fds else command,
                                            env=env, stdin=subprocess.DEVNULL, stderr=stderr, preexec_fn=place if fds else None,
                                            pass_fds=tuple(range(FIRST, FIRST + len(fds))))
            if stderr:
                stderr.close()
            self.starts += 1

    def _watch(self):
        while True:
            self.process.wait()
            if self.stopping or not self.restart:
                return
            time.sleep(self.delay)
            if self.stopping:
                return
            self._spawn()

    def start(self):
        self.stopping = False
        if not any(t.is_alive() for t in self.threads[:1]):
            self.threads[:1] = [threading.Thread(target=self._listen, daemon=True)]
            self.threads[0].start()
        self._spawn()
        self.wait_ready()
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        self.threads[1:] = [watch]

    def wait_ready(self):
        if not self.ready.wait(harness.LEAST_SECONDS * harness.PATIENCE):
            raise harness.HarnessError("latentd: no READY=1")

    def kill(self, sig=signal.SIGKILL):
        """Kills the service; if it restarts, waits until it is back."""
        starts = self.starts
        self.ready.clear()
        self.process.send_signal(sig)
        if self.restart:
            harness.wait_until("the service starts again", 30, lambda: self.starts > starts)
            self.wait_ready()

    def kill_for_good(self):
        """Kills the service, and nobody starts it again but start()."""
        self.stopping = True
        self.process.kill()
        self.threads[1].join()

    def stop(self, keep=False):
        """keep: as before a restart; else the store is dropped, as `systemctl stop` does."""
        self.stopping = True
        status = super().stop()
        if keep:
            self.sync()
        else:
            self.drop_store()
        return status

    def drop_store(self):
        self.sync()
        self._drop_store()

    def _drop_store(self):
        with self.lock:
            for _, fd in self.store:
                os.close(fd)
            self.store.clear()

    def put(self, name, fd):
        """Into the store, as if an earlier service had left it there. Takes fd over."""
        with self.lock:
            self.store.append((name, fd))

    def names(self):
        self.sync()
        with self.lock:
            return sorted(n for n, _ in self.store)

    def close(self):
        self.stopping = True
        super().close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            if self.threads:
                s.sendto(b"QUIT=1", str(self.notify_path)) if self.notify_path.exists() else None
        self._drop_store()
