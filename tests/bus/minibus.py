# SPDX-License-Identifier: Apache-2.0
"""A small D-Bus client for tests: one connection that stays (so what it owns stays), any signature, descriptors, raw wrong types.

Standard library only. Types map to Python as: numbers int/float, b bool, s/o/g str, a list (a{..}: dict), struct tuple, v Variant,
h: a descriptor to send (int), or one received (owned by the caller)."""

import os
import select
import socket
import struct
import time

BASIC = {"y": ("B", 1), "n": ("h", 2), "q": ("H", 2), "i": ("i", 4), "u": ("I", 4), "x": ("q", 8), "t": ("Q", 8), "d": ("d", 8), "b": ("I", 4),
         "h": ("I", 4)}
ALIGN = {**{k: v[1] for k, v in BASIC.items()}, "s": 4, "o": 4, "g": 1, "v": 1, "a": 4, "(": 8, "{": 8}
CALL, RETURN, ERROR, SIGNAL = 1, 2, 3, 4
NAME, ROOT = "org.latentd.Latent1", "/org/latentd/Latent1"
LIMIT = 120  # seconds; an answer that takes longer will not come


class DBusError(ValueError):
    def __init__(self, name, text):
        super().__init__(f"{name}: {text}")
        self.name, self.text = name, text


class Variant(tuple):
    """(signature, value)"""

    def __new__(cls, signature, value):
        return super().__new__(cls, (signature, value))


def split(signature):
    """Complete types of a signature."""
    out, i = [], 0
    while i < len(signature):
        start = i
        while signature[i] == "a":
            i += 1
        if signature[i] in "({":
            depth = 0
            while True:
                depth += (signature[i] in "({") - (signature[i] in ")}")
                i += 1
                if depth == 0:
                    break
        else:
            i += 1
        out.append(signature[start:i])
    return out


class Writer:
    def __init__(self):
        self.data, self.fds = bytearray(), []

    def pad(self, n):
        self.data += b"\0" * (-len(self.data) % n)

    def put(self, t, v):
        self.pad(ALIGN[t[0]])
        if t == "h":
            self.fds.append(v)
            v = len(self.fds) - 1
        if t in BASIC:
            self.data += struct.pack("<" + BASIC[t][0], v)
        elif t in "so":
            b = v.encode()
            self.data += struct.pack("<I", len(b)) + b + b"\0"
        elif t == "g":
            self.data += bytes([len(v)]) + v.encode() + b"\0"
        elif t == "v":
            self.put("g", v[0])
            self.put(v[0], v[1])
        elif t[0] == "a":
            at = len(self.data)
            self.data += b"\0\0\0\0"
            self.pad(ALIGN[t[1]])
            start = len(self.data)
            for x in (v.items() if isinstance(v, dict) else v):
                self.put(t[1:], x)
            struct.pack_into("<I", self.data, at, len(self.data) - start)
        else:
            for k, x in zip(split(t[1:-1]), v):
                self.put(k, x)


class Reader:
    def __init__(self, data, fds, at=0):
        self.data, self.fds, self.at = data, fds, at

    def pad(self, n):
        self.at += -self.at % n

    def get(self, t):
        self.pad(ALIGN[t[0]])
        if t in BASIC:
            v = struct.unpack_from("<" + BASIC[t][0], self.data, self.at)[0]
            self.at += BASIC[t][1]
            return self.fds[v] if t == "h" else bool(v) if t == "b" else v
        if t in "sog":
            n = self.data[self.at] if t == "g" else struct.unpack_from("<I", self.data, self.at)[0]
            self.at += 1 if t == "g" else 4
            v = bytes(self.data[self.at:self.at + n]).decode()
            self.at += n + 1
            return v
        if t == "v":
            k = self.get("g")
            return Variant(k, self.get(k))
        if t[0] == "a":
            n = struct.unpack_from("<I", self.data, self.at)[0]
            self.at += 4
            self.pad(ALIGN[t[1]])
            end, out = self.at + n, []
            while self.at < end:
                out.append(self.get(t[1:]))
            return dict(out) if t[1] == "{" else out
        return tuple(self.get(k) for k in split(t[1:-1]))


def plain(v):
    """Without Variant, all the way down."""
    if isinstance(v, Variant):
        return plain(v[1])
    if isinstance(v, dict):
        return {k: plain(x) for k, x in v.items()}
    return type(v)(map(plain, v)) if isinstance(v, (list, tuple)) else v


class Message:
    def __init__(self, kind, fields, body):
        self.kind, self.body = kind, body
        self.path, self.interface, self.member, self.error = (fields.get(i) for i in (1, 2, 3, 4))
        self.reply_serial, self.sender = fields.get(5), fields.get(7)
        self.serial = 0


class Connection:
    """address: of a message bus, or with peer the path of the service's own socket, where there is no Hello and nobody has a name."""

    def __init__(self, address, name=NAME, peer=False):
        self.peer = peer
        self.name, self.serial, self.buffer, self.fds = name, 0, bytearray(), []
        self.signals = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(address) if peer else dict(x.split("=", 1) for x in address.split(",")[0].partition(":")[2].split(","))["path"])
        self.socket.sendall(b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\n")
        self._line(b"OK ")
        self.socket.sendall(b"NEGOTIATE_UNIX_FD\r\n")
        self._line(b"AGREE_UNIX_FD")
        self.socket.sendall(b"BEGIN\r\n")
        self.unique = None if peer else self.call("/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello", destination="org.freedesktop.DBus")[0]

    def __enter__(self):
        return self

    def __exit__(self, *a):
        self.close()

    def close(self):
        self.socket.close()

    def _line(self, start):
        line = b""
        while not line.endswith(b"\r\n"):
            c = self.socket.recv(1)
            if not c:
                raise ConnectionError("the bus closed the connection")
            line += c
        if not line.startswith(start):
            raise ConnectionError(f"authentication: {line!r}")

    def send(self, path, interface, member, signature="", *args, destination=None, extra=(), flags=0):
        """Sends a call, returns its serial. flags: of the header (4: a person may be asked). extra: more header fields, e.g. a forged sender (7, Variant("s", ...))."""
        body = Writer()
        for t, v in zip(split(signature), args):
            body.put(t, v)
        self.serial += 1
        fields = [(1, Variant("o", path)), (2, Variant("s", interface)), (3, Variant("s", member)), *extra]
        if destination or not self.peer:
            fields.append((6, Variant("s", destination or self.name)))
        if signature:
            fields.append((8, Variant("g", signature)))
        self.send_raw(CALL, fields, body, flags)
        return self.serial

    def send_raw(self, kind, fields, body, flags=0):
        if body.fds:
            fields.append((9, Variant("u", len(body.fds))))
        w = Writer()
        for t, v in zip("yyyyuu", (ord("l"), kind, flags, 1, len(body.data), self.serial)):
            w.put(t, v)
        w.put("a(yv)", fields)
        w.pad(8)
        data = bytes(w.data + body.data)
        n = socket.send_fds(self.socket, [data], body.fds) if body.fds else 0
        self.socket.sendall(data[n:])

    def reply(self, m, signature="", *args, error=None):
        """Answers a call that was received: for tests that play a service."""
        body = Writer()
        for t, v in zip(split(signature), args):
            body.put(t, v)
        self.serial += 1
        fields = [(5, Variant("u", m.serial)), (6, Variant("s", m.sender))]
        if error:
            fields.append((4, Variant("s", error)))
        if signature:
            fields.append((8, Variant("g", signature)))
        self.send_raw(ERROR if error else RETURN, fields, body)

    def _parse(self):
        if len(self.buffer) < 16:
            return None
        length, serial, fields = struct.unpack_from("<III", self.buffer, 4)
        start = 16 + fields + (-fields % 8)
        if len(self.buffer) < start + length:
            return None
        header = {k: v[1] for k, v in Reader(self.buffer, [], 12).get("a(yv)")}
        n = header.get(9, 0)
        fds, self.fds = self.fds[:n], self.fds[n:]
        r = Reader(self.buffer[start:start + length], fds)
        m = Message(self.buffer[1], header, [r.get(t) for t in split(header.get(8, ""))])
        m.serial = serial
        del self.buffer[:start + length]
        return m

    def receive(self, timeout=LIMIT):
        """The next message; None after timeout seconds."""
        end = time.monotonic() + timeout
        while True:
            m = self._parse()
            if m:
                return m
            if not select.select([self.socket], [], [], max(0, end - time.monotonic()))[0]:
                return None
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 16)
            if not data:
                raise ConnectionError("the other side closed the connection")
            self.buffer += data
            self.fds += fds

    def wait(self, serial, timeout=LIMIT):
        end = time.monotonic() + timeout
        while True:
            m = self.receive(max(0, end - time.monotonic()))
            if m is None:
                raise TimeoutError(f"no answer within {timeout} s")
            if m.kind == SIGNAL:
                self.signals.append(m)
            elif m.reply_serial == serial:
                if m.kind == ERROR:
                    raise DBusError(m.error, m.body[0] if m.body else "")
                return m.body

    def call(self, path, interface, member, signature="", *args, destination=None, timeout=LIMIT):
        return self.wait(self.send(path, interface, member, signature, *args, destination=destination), timeout)

    def get(self, path, interface, prop):
        return plain(self.call(path, "org.freedesktop.DBus.Properties", "Get", "ss", interface, prop)[0])

    def get_all(self, path, interface):
        return plain(self.call(path, "org.freedesktop.DBus.Properties", "GetAll", "s", interface)[0])

    def introspect(self, path):
        return self.call(path, "org.freedesktop.DBus.Introspectable", "Introspect")[0]

    def match(self, rule):
        self.call("/org/freedesktop/DBus", "org.freedesktop.DBus", "AddMatch", "s", rule, destination="org.freedesktop.DBus")

    def signal(self, member, path=None, timeout=LIMIT):
        """The first signal of that name (and path), kept or new; None after timeout."""
        end = time.monotonic() + timeout
        while True:
            for i, m in enumerate(self.signals):
                if m.member == member and path in (None, m.path):
                    return self.signals.pop(i)
            m = self.receive(max(0, end - time.monotonic()))
            if m is None:
                return None
            if m.kind == SIGNAL:
                self.signals.append(m)

    # What most tests want of the service.
    def manager(self, member, signature="", *args):
        return self.call(ROOT, NAME + ".Manager", member, signature, *args)

    def wait_job(self, job, timeout=120):
        """(state, error, result) at the end; raises TimeoutError after so many seconds of a quiet machine."""
        timeout *= float(os.environ.get("LATENT_TEST_PATIENCE", "1"))
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            p = self.get_all(job, NAME + ".Job")
            if p["State"] in ("done", "failed", "cancelled"):
                return p["State"], p["Error"], p["Result"]
            time.sleep(0.01)
        raise TimeoutError(f"{job} did not end within {timeout} s")


def jobs(address):
    """Properties of this user's jobs, with a connection of its own: much quicker than latentctl for a test that waits for a step. Of a service that is
    not there, none."""
    found = []
    with Connection(address) as c:
        try:
            for path, _, _ in c.manager("ListJobs")[0]:
                found.append(c.get_all(path, NAME + ".Job"))
        except DBusError:  # one that has just gone, or the service
            pass
    return found
