# SPDX-License-Identifier: Apache-2.0
"""A file system in user space with one file, "model.safetensors", whose bytes never come: INIT, LOOKUP, GETATTR, OPEN and FLUSH are answered
until hang() (then nothing is), READ never is. Speaks the kernel's FUSE protocol directly (Linux only, root only), so that no library is needed."""

import ctypes
import os
import select
import struct
import threading

IN = struct.Struct("<IIQQIIII")   # len, opcode, unique, nodeid, uid, gid, pid, padding
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, RELEASEDIR, ACCESS, STATX, BATCH_FORGET, INTERRUPT = \
    1, 2, 3, 14, 15, 18, 25, 26, 27, 29, 34, 52, 42, 36
MNT_DETACH = 2
SIZE = 1 << 20


class Fuse:
    def __init__(self, folder):
        self.folder, self.hung, self.reads, self.unanswered = str(folder), False, 0, 0
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self.fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},allow_other"
        if self.libc.mount(b"hostile", os.fsencode(self.folder), b"fuse", 0, options.encode()) < 0:
            e = ctypes.get_errno()
            os.close(self.fd)
            raise OSError(e, os.strerror(e))
        self.stop_r, self.stop_w = os.pipe()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def hang(self):
        """From now on nothing is answered."""
        self.hung = True

    def close(self):
        self.libc.umount2(os.fsencode(self.folder), MNT_DETACH)
        os.close(self.stop_w)
        self.thread.join(5)
        os.close(self.fd)  # aborts what still waits
        os.close(self.stop_r)

    def reply(self, unique, data=b"", error=0):
        try:
            os.write(self.fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
        except OSError:
            pass  # the caller gave up

    def attr(self, node):
        mode, size = (0o40755, 0) if node == 1 else (0o100644, SIZE)
        return ATTR.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def serve(self):
        while True:
            ready = select.select([self.fd, self.stop_r], [], [])[0]
            if self.stop_r in ready:
                return
            try:
                data = os.read(self.fd, 1 << 20)
            except OSError:
                return  # unmounted
            _, opcode, unique, node, *_ = IN.unpack_from(data)
            self.handle(opcode, unique, node, data[IN.size:])

    def handle(self, opcode, unique, node, body):
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        if opcode == READ:
            self.reads += 1
            return
        if self.hung and opcode not in (FLUSH, RELEASE):
            self.unanswered += 1
            return
        if opcode == INIT:
            self.reply(unique, struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0, *[0] * 7))
        elif opcode == LOOKUP and body.rstrip(b"\0") == b"model.safetensors":
            self.reply(unique, struct.pack("<QQQQII", 2, 0, 1, 0, 0, 0) + self.attr(2))
        elif opcode == GETATTR:
            self.reply(unique, struct.pack("<QII", 0, 0, 0) + self.attr(node))  # valid for no time at all
        elif opcode in (OPEN, OPENDIR):
            self.reply(unique, struct.pack("<QII", 1, 0, 0))
        elif opcode in (RELEASE, RELEASEDIR, ACCESS):
            self.reply(unique)
        else:
            self.reply(unique, error=2 if opcode == LOOKUP else 38)  # ENOENT, ENOSYS
