"""Small files that would take gigabytes to unpickle: prints a line for each, how it was refused with 500 MB to spare."""

import io
import resource
import shutil
import sys
import zipfile
from pathlib import Path

import torch

from megaenc.errors import InputError
from megaenc.training.checkpoint.safe_pickle import rewrite_pickles

SPARE = 500 << 20
HEAD = b"\x80\x04"
MODULE = b"\x8c\x25torch.distributed.checkpoint.metadata\x94"


def many_keys(count: int) -> bytes:
    """A dictionary of `count` keys, built and left on the stack."""
    return b"}(" + b"".join(b"\x8c\x04%04dN" % number for number in range(count)) + b"u\x94"


def copies_of_a_state() -> bytes:
    make = HEAD + MODULE + b"\x8c\x08Metadata\x93\x94" + many_keys(2000) + b"]("  # memo: 0 module, 1 class, 2 state
    return make + 2000 * b"h\x01)\x81h\x02b" + b"e."


def copies_of_a_size() -> bytes:
    size = HEAD + b"\x8c\x05torch\x8c\x04Size\x93\x94(" + 20000 * b"K\x01" + b"t\x94]("
    return size + 10000 * b"h\x00h\x01\x85R" + b"e."


def doubling(levels: int = 60) -> bytes:
    """A list of two lists of two lists ...: printed or walked through, it has no end."""
    return b"]" + b"".join(b"\x94](h%ch%ce" % (level, level) for level in range(levels))


def storage_of_doubled_values() -> bytes:
    """The doubled list in the place of a class and of a place in a shard."""
    return HEAD + doubling() + b"\x8c\x04name\x93."


def compressed_zeros() -> bytes:
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("common/data.pkl", "w", force_zip64=True) as entry,
    ):
        for _ in range(150):
            entry.write(bytes(4 << 20))
    return stream.getvalue()


def archive(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("common/data.pkl", data)
        file.writestr("common/version", "3\n")
    return stream.getvalue()


def doubled_plain_values() -> bytes:
    return archive(b"\x80\x02]" + b"".join(b"q%c](h%ch%ce" % (level, level, level) for level in range(60)) + b".")


def big_storage() -> bytes:
    """A tensor of a byte that says it has 2 ** 33."""
    stream = io.BytesIO()
    torch.save(torch.zeros(1), stream)
    with zipfile.ZipFile(stream) as file:
        data = file.read("archive/data.pkl")
    return archive(data.replace(b"K\x01tq", b"\x8a\x05\0\0\0\0\x02tq", 1))


BOMBS = {
    ".metadata": [
        copies_of_a_state(),
        copies_of_a_size(),
        storage_of_doubled_values(),
        HEAD + b"X\xff\xff\xff\xffa.",  # text of 4 GB
        HEAD + b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",  # a frame of 8 EB
        HEAD + b"\x8b\xff\xff\xff\x7f\x01.",  # a number of 2 GB
        bytes(33 << 20),
    ],
    "common.pt": [
        compressed_zeros(),
        doubled_plain_values(),
        big_storage(),
        archive(b"\x80\x02)" + 100_000 * b"\x85" + b"."),  # tuples in tuples
        bytes(2 << 20),
    ],
}


def main(checkpoint: Path, copy: Path) -> None:
    """Put each bomb into the checkpoint's `copy` and read that."""
    for name, bombs in BOMBS.items():
        for number, bomb in enumerate(bombs):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(checkpoint, copy)
            (copy / name).write_bytes(bomb)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, resource.RLIM_INFINITY))
            try:
                rewrite_pickles(copy)
                print(name, number, "was read", flush=True)
            except InputError as error:
                print(name, number, "refused:", error, flush=True)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
