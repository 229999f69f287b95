# SPDX-License-Identifier: Apache-2.0
"""Reads a film with ffmpeg: its frames as bytes of RGB, its sound as two lists of samples."""

import array
import json
import shutil
import struct
import subprocess
import zlib


class FilmError(Exception):
    pass


def run(program, *args):
    if not shutil.which(program):
        raise FilmError(f"{program} is not installed (Debian: apt-get install ffmpeg)")
    r = subprocess.run([program, "-v", "error", *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if r.returncode != 0:
        raise FilmError(f"{program} {' '.join(map(str, args))}: {r.stderr.decode(errors='replace').strip()}")
    return r.stdout


def probe(path):
    """{"video": {...}, "audio": {...}} as ffprobe says, with frames counted."""
    out = json.loads(run("ffprobe", "-count_frames", "-show_streams", "-of", "json", path))
    return {s["codec_type"]: s for s in out["streams"]}


def frames(path, width, height):
    data = run("ffmpeg", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    size = width * height * 3
    if len(data) % size:
        raise FilmError(f"{path}: {len(data)} bytes of frames are no multiple of {width}x{height}")
    return [data[i:i + size] for i in range(0, len(data), size)]


def sound(path):
    """Left and right, as far as the film says that it goes."""
    samples = array.array("f", run("ffmpeg", "-i", path, "-vn", "-f", "f32le", "-ac", 2, "-ar", 32000, "-"))
    return samples[0::2], samples[1::2]


def write_png(path, width, height, rgb):
    """rgb: bytes, three a pixel."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + rgb[y * width * 3:(y + 1) * width * 3] for y in range(height))
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(lines, 9))
                + chunk(b"IEND", b""))
