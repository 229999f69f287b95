#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A file system that never answers a read: one file in a folder, served through /dev/fuse. Root, standard library only.

    fuse_server.py FOLDER NAME SIZE

Mounts on FOLDER, prints "ready" and serves until its standard input ends; then the kernel fails what still waits."""

import ctypes
import errno
import os
import select
import stat
import struct
import sys

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 1, 2, 3, 14, 15, 18, 25, 26, 27, 29, 36, 42
ROOT, FILE = 1, 2


class Server:
    def __init__(self, folder, name, size):
        self.name, self.size = name.encode(), size
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self.fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if libc.mount(b"hostile", os.fsencode(folder), b"fuse", 2 | 4, options.encode()) != 0:  # MS_NOSUID | MS_NODEV
            raise OSError(ctypes.get_errno(), "mount")

    def attributes(self, node):
        mode, size = (stat.S_IFDIR | 0o755, 0) if node == ROOT else (stat.S_IFREG | 0o644, self.size)
        return struct.pack("<6Q10I", node, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def reply(self, unique, payload=b"", error=0):
        os.write(self.fd, struct.pack("<IiQ", 16 + len(payload), -error, unique) + payload)

    def serve_one(self):
        data = os.read(self.fd, 1 << 20)
        _, opcode, unique, node = struct.unpack_from("<IIQQ", data)
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT, READ):
            return  # the first three want no answer
        if opcode == INIT:
            readahead = struct.unpack_from("<III", data, 40)[2]
            self.reply(unique, struct.pack("<IIIIHHIIHHI7I", 7, 31, readahead, 0, 16, 12, 1 << 16, 1, 0, 0, 0, *[0] * 7))
        elif opcode == LOOKUP:
            if data[40:].rstrip(b"\0") != self.name:
                self.reply(unique, error=errno.ENOENT)
            else:
                self.reply(unique, struct.pack("<QQQQII", FILE, 0, 60, 60, 0, 0) + self.attributes(FILE))
        elif opcode == GETATTR:
            self.reply(unique, struct.pack("<QII", 60, 0, 0) + self.attributes(node))
        elif opcode in (OPEN, OPENDIR):
            self.reply(unique, struct.pack("<QII", 1, 0, 0))
        elif opcode in (RELEASE, RELEASEDIR, FLUSH):
            self.reply(unique)
        else:
            self.reply(unique, error=errno.ENOSYS)


def main():
    server = Server(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([server.fd, 0], [], [])
        if 0 in ready and not os.read(0, 1):
            return 0
        if server.fd in ready:
            server.serve_one()


if __name__ == "__main__":
    sys.exit(main())
