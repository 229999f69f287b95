#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpacks the conditioner's reference data into the build tree and makes vocab.json from merges.txt.

    derive-text.py DATA/text OUT/text [STAMP]

Every *.bz2 and *.xz below DATA/text becomes the file of that name without the suffix. The published vocabulary is its 256 bytes, then what
each merge makes, in order; SHA256SUMS knows the published file's sum."""

import bz2
import hashlib
import json
import lzma
import pathlib
import sys

UNPACK = {".bz2": bz2.decompress, ".xz": lzma.decompress}


def byte_characters():
    """How byte-level BPE writes the bytes: printable ones as themselves, in the order of the vocabulary; the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(c) for c in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def vocabulary(merges):
    tokens = byte_characters() + ["".join(line.split(" ")) for line in merges.split("\n") if line]
    ids = {t: i for i, t in enumerate(tokens)}
    return json.dumps(ids, ensure_ascii=False, separators=(",", ":")).encode()


def derive(data, out):
    made = {}
    for p in sorted(data.rglob("*")):
        if p.suffix in UNPACK:
            made[p.relative_to(data).with_suffix("").as_posix()] = UNPACK[p.suffix](p.read_bytes())
    made["tokenizer/vocab.json"] = vocabulary(made["tokenizer/merges.txt"].decode())
    wrong = [line for line in (data / "SHA256SUMS").read_text().splitlines()
             if hashlib.sha256(made[line.split()[1]]).hexdigest() != line.split()[0]]
    for line in wrong:
        print(f"{line.split()[1]}: not the bytes that SHA256SUMS expects", file=sys.stderr)
    for name, content in made.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    return 1 if wrong else 0


def main():
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    if derive(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])):
        return 1
    if len(sys.argv) == 4:
        pathlib.Path(sys.argv[3]).write_text("derived\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
