# SPDX-License-Identifier: Apache-2.0
"""A private instance of the service for tests: its own dbus-daemon, notify socket, configuration and latentd.

Standard library only. Used by with-latentd, run-golden, demo and the bus tests."""

import array
import contextlib
import json
import math
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent
SOURCE = TESTS.parent
BUILD = pathlib.Path(os.environ.get("LATENT_BUILD_DIR", SOURCE / "build")).resolve()

BUS_CONF = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>{type}</type>
  <listen>unix:path={path}</listen>
  <servicedir>{path.parent}</servicedir>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*" eavesdrop="false"/>
    <allow receive_type="method_call"/>
    <allow receive_type="signal"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
  </policy>
</busconfig>
"""


# Of all services that a test starts and says nothing else of: the worker, settings (KEY=VALUE and spaces). A CUDA worker's denoisers compute in bf16 alone.
WORKER = os.environ.get("LATENT_TEST_WORKER")
CONF = os.environ.get("LATENT_TEST_CONF", "").split()
COMPUTE = "bf16" if WORKER == "cuda" else "f32"


# How much longer than on a quiet machine and without sanitizers something may take.
PATIENCE = float(os.environ.get("LATENT_TEST_PATIENCE", "1"))
# A limit only ends a test that hangs. What is to be measured is measured in tests/bench.
LEAST_SECONDS = 60


class HarnessError(Exception):
    pass


def wait_until(what, seconds, condition, step=0.02):
    """Polls condition until it is true; raises HarnessError after so many seconds of a quiet machine, and not within LEAST_SECONDS."""
    seconds = max(seconds * PATIENCE, LEAST_SECONDS)
    end = time.monotonic() + seconds
    while True:
        r = condition()
        if r:
            return r
        if time.monotonic() > end:
            raise HarnessError(f"{what}: not within {seconds:g} s")
        time.sleep(step)


def children_of(pid, name=None):
    """Live (not zombie) processes whose parent is pid, optionally of one program name (comm, cut to 15)."""
    found = []
    for p in os.listdir("/proc"):
        if not p.isdigit():
            continue
        try:
            stat = pathlib.Path(f"/proc/{p}/stat").read_text()
        except OSError:
            continue
        comm = stat[stat.index("(") + 1:stat.rindex(")")]
        state, ppid = stat[stat.rindex(")") + 2:].split()[:2]
        if int(ppid) == pid and state not in "ZX" and (name is None or comm == name[:15]):
            found.append(int(p))
    return found


def alive(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def as_user(uid, f):
    """f() in a child process of that user (root only); its result, through JSON. What it raises is raised here as a HarnessError."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(r)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            out = [True, f()]
        except BaseException as e:  # the child must never return into the caller's program
            out = [False, f"{type(e).__name__}: {e}"]
        try:
            with open(w, "w") as pipe:
                json.dump(out, pipe)
        finally:
            os._exit(0)
    os.close(w)
    with open(r) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise HarnessError(f"the process of user {uid} died")
    ok, value = json.loads(text)
    if not ok:
        raise HarnessError(f"as user {uid}: {value}")
    return value


class Bus:
    """A private dbus-daemon. `open_to_all`: other uids may connect (tests with several users)."""

    def __init__(self, folder, kind="session", open_to_all=False):
        self.folder = pathlib.Path(folder)
        self.path = self.folder / "bus"
        if open_to_all:
            self.folder.chmod(0o755)
        conf = self.folder / "bus.conf"
        conf.write_text(BUS_CONF.format(type=kind, path=self.path))
        log = self.folder / "bus.log"  # of no use while it works: that it may not raise its limit of descriptors, and the like
        with open(log, "wb") as f:
            self.process = subprocess.Popen(["dbus-daemon", f"--config-file={conf}", "--nofork", "--nopidfile", "--nosyslog"],
                                            stdin=subprocess.DEVNULL, stderr=f)
        try:
            wait_until("dbus-daemon", 10, self._listens)  # the socket is there a moment before it listens
        except HarnessError as e:
            raise HarnessError(f"{e}\n{log.read_text()}") from e
        if open_to_all:
            self.path.chmod(0o666)
        self.address = f"unix:path={self.path}"

    def _listens(self):
        with socket.socket(socket.AF_UNIX) as s:
            return s.connect_ex(str(self.path)) == 0

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(LEAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Service:
    """latentd on a private bus. Use as a context manager; `env` holds what a client needs."""

    def __init__(self, conf=(), mode="user", ranks=None, worker=None, open_to_all=False, log=None, bus=None, args=(), socket=True, prefix=(), popen=None, env=None):
        """socket: a private socket of its own (self.socket), else PrivateSocket= is not set. prefix: words before the command line; popen: more
        arguments of Popen; env: more variables."""
        self.temp = tempfile.TemporaryDirectory(prefix="latentd-test-")
        self.folder = pathlib.Path(self.temp.name)
        self.mode, self.args, self.log = mode, list(args), log
        self.process = None
        self.own_bus = bus is None
        self.bus = bus or Bus(self.folder, open_to_all=open_to_all)
        values = {"WorkerDirectory": str(BUILD / "service/worker"), "WorkerStart": "spawn", "MediaDirectory": str(BUILD / "service/media")}
        self.socket = self.folder / "private"
        self.prefix, self.popen = list(prefix), popen or {}
        if socket:
            values["PrivateSocket"] = self.socket
        lines = [f"{k}={v}" for k, v in values.items()]
        if ranks is not None:
            lines.append(f"WorkerRanks={ranks}")
        worker = worker or WORKER
        if worker is not None:
            lines.append(f"Worker={worker}")
        lines += [*CONF, *conf]
        self.config = self.folder / "latentd.conf"
        self.config.write_text("[latentd]\n" + "".join(line + "\n" for line in lines))
        self.env = dict(os.environ,
                        DBUS_SESSION_BUS_ADDRESS=self.bus.address,
                        DBUS_SYSTEM_BUS_ADDRESS=self.bus.address,
                        PATH=f"{BUILD / 'client'}:{os.environ.get('PATH', '/usr/bin:/bin')}", **(env or {}))

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind, value, trace):
        self.close()

    def start(self):
        """Starts latentd and waits for READY=1."""
        notify = self.folder / "notify"
        if notify.exists():
            notify.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.bind(str(notify))
            s.settimeout(0.1)
            stderr = open(self.log, "ab") if self.log else None
            self.process = subprocess.Popen(
                [*self.prefix, str(BUILD / "service/latentd/latentd"), f"--{self.mode}", f"--bus-address={self.bus.address}",
                 f"--config={self.config}", *self.args],
                env=dict(self.env, NOTIFY_SOCKET=str(notify)), stdin=subprocess.DEVNULL, stderr=stderr, **self.popen)
            if stderr:
                stderr.close()
            end = time.monotonic() + LEAST_SECONDS * PATIENCE
            while True:
                if self.process.poll() is not None:
                    raise HarnessError(f"latentd ended with {self.process.returncode} before it was ready")
                if time.monotonic() > end:
                    raise HarnessError(f"latentd: no READY=1 within {LEAST_SECONDS * PATIENCE:g} s")
                try:
                    if b"READY=1" in s.recv(4096).split(b"\n"):
                        return
                except socket.timeout:
                    pass

    def workers(self):
        return children_of(self.process.pid, "latent-worker-cpu")

    def kill_workers(self):
        """kill -9 of each worker; returns their pids once the service has seen the deaths. One that dies after its job's last step must not be what the
        next job finds: the next death would then be the second one of a step, which ends the job."""
        pids = self.workers()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until("the deaths are seen", 20, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), step=0.001)
        return pids

    def kill(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)
        return self.process.wait()

    def stop(self):
        """SIGTERM; returns the exit status. No worker may be left."""
        workers = self.workers() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LEAST_SECONDS * PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGABRT)
                self.process.wait()
                raise HarnessError(f"latentd did not end within {LEAST_SECONDS * PATIENCE:g} s of SIGTERM")
        wait_until("workers end with the service", 20, lambda: not any(alive(p) for p in workers))
        return self.process.returncode

    def close(self):
        try:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        finally:
            if self.own_bus:
                self.bus.stop()
            self.temp.cleanup()

    def ctl(self, *args, timeout=120, check=False, **kw):
        """Runs latentctl; returns CompletedProcess with text output."""
        r = subprocess.run([str(BUILD / "client/latentctl"), *map(str, args)], env=kw.pop("env", self.env), text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=timeout * PATIENCE, **kw)
        if check and r.returncode != 0:
            raise HarnessError(f"latentctl {' '.join(map(str, args))}: exit {r.returncode}\n{r.stderr}")
        return r

    def ctl_json(self, *args, **kw):
        r = self.ctl(*args, "--json", check=True, **kw)
        return json.loads(r.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def quiet_service(**kw):
    """A Service for people who want to see something else: what it says is shown if something fails."""
    with tempfile.TemporaryDirectory(prefix="latentd-log-") as folder:
        log = pathlib.Path(folder) / "log"
        try:
            with Service(log=log, **kw) as service:
                yield service
        except BaseException as e:
            if log.exists() and not isinstance(e, KeyboardInterrupt):
                print(f"The service said:\n{log.read_text(errors='replace')}", file=sys.stderr)
            raise


# --------------------------------------------------------------------------------------------- tensors

def read_safetensors(path):
    """{name: (dtype, shape, bytes)}, metadata. Raises ValueError on a malformed file."""
    data = pathlib.Path(path).read_bytes()
    if len(data) < 8:
        raise ValueError(f"{path}: {len(data)} bytes, shorter than a header length")
    n = struct.unpack_from("<Q", data)[0]
    if n > len(data) - 8:
        raise ValueError(f"{path}: header of {n} bytes in a file of {len(data)}")
    header = json.loads(data[8:8 + n])
    meta = header.pop("__metadata__", {})
    out = {}
    for name, t in header.items():
        b, e = t["data_offsets"]
        if not 0 <= b <= e <= len(data) - 8 - n:
            raise ValueError(f"{path}: {name} lies outside the file")
        out[name] = (t["dtype"], t["shape"], data[8 + n + b:8 + n + e])
    return out, meta


def write_safetensors(path, tensors, meta=None):
    """tensors: {name: (dtype, shape, bytes)}."""
    header, at = {}, 0
    if meta:
        header["__metadata__"] = {str(k): str(v) for k, v in meta.items()}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def values(tensor):
    """The numbers of a tensor as a sequence of Python floats or ints."""
    dtype, _, data = tensor
    if dtype == "BF16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return array.array("f", bytes(wide))
    codes = {"F32": "f", "F64": "d", "I32": "i", "U8": "B", "I8": "b", "I64": "q"}
    if dtype not in codes:
        raise ValueError(f"no decoder for {dtype}")
    return array.array(codes[dtype], data)


def distance(a, b):
    """(relative L2 |a - b| / |b| in f64, largest |a - b|) of two equally shaped tensors. NaN anywhere gives inf."""
    if a[1] != b[1]:
        raise ValueError(f"shapes differ: {a[1]} and {b[1]}")
    x, y = values(a), values(b)
    if len(x) != len(y):
        raise ValueError(f"sizes differ: {len(x)} and {len(y)}")
    diff = [p - q for p, q in zip(x, y)]
    num, den = math.fsum(d * d for d in diff), math.fsum(q * q for q in y)
    if not math.isfinite(num) or not math.isfinite(den):
        return math.inf, math.inf
    return math.sqrt(num) / math.sqrt(den) if den else (0.0 if num == 0 else math.inf), max(map(abs, diff), default=0.0)
