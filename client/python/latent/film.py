# SPDX-License-Identifier: Apache-2.0
"""A film that is rendered to a file, which has its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import threading
from typing import Callable, Optional, Union

from latent._arguments import path as path_bytes
from latent._library import Connection
from latent.errors import FileError, InvalidArgument
from latent.job import Job, Progress

FORMATS = ("mp4", "webm", "mkv")


def format_of(path: pathlib.Path, wanted: Optional[str]) -> str:
    """What the name ends with, unless a format is asked for."""
    name = path.suffix[1:] if wanted is None else wanted
    if name not in FORMATS:
        what = f"{path} ends with {path.suffix!r}" if wanted is None else f"format is {wanted!r}"
        raise InvalidArgument("InvalidArgument", f"{what}, expected one of {', '.join(FORMATS)}.")
    return name


def _link(fd: int, name: pathlib.Path) -> None:
    """Without a folder's descriptor os.link() does not follow /proc's link, whatever it is told."""
    folder = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), name, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _may_be_of_a_model(path: pathlib.Path) -> bool:
    """Weights, settings or word lists, by name or content."""
    if path.suffix in (".safetensors", ".json", ".txt"):
        return path.exists()
    try:
        with open(path, "rb") as f:
            return f.read(9)[8:] == b"{"  # behind the size of its header
    except OSError:
        return False


class FilmFile:
    """A file beside `path`: without a name where the file system can do that, so that nothing is left whatever ends this process."""

    def __init__(self, path: Union[str, os.PathLike[str]]) -> None:
        path_bytes("path", path)
        self.path = pathlib.Path(os.path.realpath(path))
        self._lock = threading.Lock()
        self._temporary: Optional[pathlib.Path] = None
        self.fd = -1
        if self.path.is_file() and _may_be_of_a_model(self.path):
            raise InvalidArgument("InvalidArgument", f"{self.path} is no film and may be a file of the model, which a film does not replace.")
        try:
            self._open()
        except OSError as e:
            raise FileError("IOError", f"{self.path} cannot be written: {e.strerror}.") from e

    def _open(self) -> None:
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o666
        try:
            self.fd = os.open(self.path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
            os.stat(f"/proc/self/fd/{self.fd}")  # how it gets its name
        except OSError as e:
            if self.fd < 0 and e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._close()
            self._temporary = self._other_name()
            self.fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def _other_name(self) -> pathlib.Path:
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}")

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def commit(self) -> None:
        """Gives it its name, once."""
        with self._lock:
            if self.fd < 0:
                return
            try:
                os.fsync(self.fd)
                if self._temporary is None:
                    name = self._other_name()
                    _link(self.fd, name)
                    self._temporary = name
                self._temporary.replace(self.path)
            except OSError as e:
                raise FileError("IOError", f"{self.path} cannot be written: {e.strerror}.") from e
            self._temporary = None
            self._close()

    def discard(self) -> None:
        with self._lock:
            self._close()
            if self._temporary is not None:
                with contextlib.suppress(OSError):
                    self._temporary.unlink()
                self._temporary = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ did not get so far
            self.discard()


class RenderJob(Job):
    """A film that is made. wait(), poll(), await, updates() and `film` give the file its name when it is complete; until one of them has seen
    that, and if the job fails, is cancelled or this object is closed or dropped before, there is no file, or the one that was there."""

    def __init__(self, connection: Connection, pointer: int, file: Optional[FilmFile]) -> None:
        super().__init__(connection, pointer)
        self._file = file
        self._film = None if file is None else file.path

    def wait(self, timeout: Optional[float] = None, progress: Optional[Callable[[Progress], object]] = None) -> bool:
        try:
            done = super().wait(timeout, progress)
        except BaseException:
            if self._handle is None or self.progress().state in ("failed", "cancelled"):
                self._discard()
            raise
        if done and self._file is not None:
            self._file.commit()
        return done

    def close(self) -> None:
        """Forgets the job, which goes on; a film that was not seen to be complete is dropped."""
        super().close()
        self._discard()

    def _discard(self) -> None:
        file = self._file
        if file is not None:
            file.discard()

    @property
    def film(self) -> pathlib.Path:
        """Where the film of a job that is done is. InvalidArgument: it is not done, or its frames are in the output arena ("frames")."""
        _ = self.result
        if self._film is None:
            raise InvalidArgument("InvalidArgument", 'The film is in the output arena: tensors["frames"] and tensors["sound"].')
        return self._film
