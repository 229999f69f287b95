# SPDX-License-Identifier: Apache-2.0
"""liblatent itself: finding it, its functions, connections to the service and who frees what.

Threads: liblatent wants one thread at a time per client and all that was made from it. A Connection has a lock that every call holds; no
call holds it for long, since waiting for jobs sleeps outside of it. Finalisers never wait for the lock (Python may run them in any thread
at any time): what they find in use is freed by whoever has the lock.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Optional

from latent import _structs
from latent.errors import Error, Internal, InvalidArgument, NoLibrary, error_of

SONAME = "liblatent.so.1"

_TENSOR = POINTER(_structs.latent_tensor)
_ERROR = POINTER(_structs.latent_error)
_OUT = POINTER(c_void_p)

# name: result, arguments
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "latent_version": (c_char_p, []),
    "latent_client_new": (c_int, [POINTER(_structs.latent_client_options), _OUT, _ERROR]),
    "latent_client_free": (None, [c_void_p]),
    "latent_client_fd": (c_int, [c_void_p]),
    "latent_client_events": (c_int, [c_void_p]),
    "latent_client_timeout": (c_int, [c_void_p, POINTER(c_uint64)]),
    "latent_client_process": (c_int, [c_void_p, _ERROR]),
    "latent_value_type": (c_int, [c_void_p]),
    "latent_value_count": (c_size_t, [c_void_p]),
    "latent_value_at": (c_void_p, [c_void_p, c_size_t]),
    "latent_value_key_at": (c_char_p, [c_void_p, c_size_t]),
    "latent_value_as_string": (c_char_p, [c_void_p]),
    "latent_value_as_uint": (c_int, [c_void_p, POINTER(c_uint64)]),
    "latent_value_as_int": (c_int, [c_void_p, POINTER(c_int64)]),
    "latent_value_as_double": (c_int, [c_void_p, POINTER(c_double)]),
    "latent_value_as_bool": (c_int, [c_void_p]),
    "latent_value_free": (None, [c_void_p]),
    "latent_client_status": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_client_devices": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_client_models": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_client_jobs": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_client_sessions": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_client_regions": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_client_drop_cache": (c_int, [c_void_p, POINTER(c_uint64), _ERROR]),
    "latent_client_release_gpus": (c_int, [c_void_p, _ERROR]),
    "latent_client_cancel_job": (c_int, [c_void_p, c_char_p, _ERROR]),
    "latent_model_load_name": (c_int, [c_void_p, c_char_p, POINTER(_structs.latent_load_options), _OUT, _ERROR]),
    "latent_model_load_path": (c_int, [c_void_p, c_char_p, POINTER(_structs.latent_load_options), _OUT, _ERROR]),
    "latent_model_find": (c_int, [c_void_p, c_char_p, _OUT, _ERROR]),
    "latent_model_path": (c_char_p, [c_void_p]),
    "latent_model_properties": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_model_unload": (c_int, [c_void_p, _ERROR]),
    "latent_model_free": (None, [c_void_p]),
    "latent_session_open": (c_int, [c_void_p, c_void_p, POINTER(_structs.latent_session_options), _OUT, _ERROR]),
    "latent_output_bytes": (c_uint64, [_TENSOR, _TENSOR, c_char_p, c_uint32, c_int]),
    "latent_session_set_loras": (c_int, [c_void_p, POINTER(_structs.latent_lora), c_size_t, c_char_p, _OUT, _ERROR]),
    "latent_session_path": (c_char_p, [c_void_p]),
    "latent_session_input": (c_void_p, [c_void_p]),
    "latent_session_output": (c_void_p, [c_void_p]),
    "latent_session_input_bytes": (c_uint64, [c_void_p]),
    "latent_session_output_bytes": (c_uint64, [c_void_p]),
    "latent_session_allocate": (c_int, [c_void_p, _TENSOR, _OUT, _ERROR]),
    "latent_session_reset": (None, [c_void_p]),
    "latent_session_close": (c_int, [c_void_p, _ERROR]),
    "latent_session_free": (None, [c_void_p]),
    "latent_session_step": (c_int, [c_void_p, POINTER(_structs.latent_step_options), _OUT, _ERROR]),
    "latent_session_sample": (c_int, [c_void_p, POINTER(_structs.latent_sample_options), _OUT, _ERROR]),
    "latent_session_plan_step": (c_int, [c_void_p, POINTER(_structs.latent_step_options), _OUT, _ERROR]),
    "latent_session_plan_sample": (c_int, [c_void_p, POINTER(_structs.latent_sample_options), _OUT, _ERROR]),
    "latent_session_tokenize": (c_int, [c_void_p, POINTER(_structs.latent_tokenize_options), _OUT, _ERROR]),
    "latent_session_encode": (c_int, [c_void_p, POINTER(_structs.latent_encode_options), _OUT, _ERROR]),
    "latent_session_decode": (c_int, [c_void_p, POINTER(_structs.latent_decode_options), _OUT, _ERROR]),
    "latent_session_render": (c_int, [c_void_p, POINTER(_structs.latent_render_options), _OUT, _ERROR]),
    "latent_session_encode_media": (c_int, [c_void_p, POINTER(_structs.latent_encode_media_options), _OUT, _ERROR]),
    "latent_job_preview": (c_int, [c_void_p, POINTER(_structs.latent_tensor), POINTER(c_void_p), _ERROR]),
    "latent_session_plan_render": (c_int, [c_void_p, POINTER(_structs.latent_render_options), _OUT, _ERROR]),
    "latent_session_plan_tokenize": (c_int, [c_void_p, POINTER(_structs.latent_tokenize_options), _OUT, _ERROR]),
    "latent_session_plan_encode": (c_int, [c_void_p, POINTER(_structs.latent_encode_options), _OUT, _ERROR]),
    "latent_session_plan_decode": (c_int, [c_void_p, POINTER(_structs.latent_decode_options), _OUT, _ERROR]),
    "latent_session_plan_encode_media": (c_int, [c_void_p, POINTER(_structs.latent_encode_media_options), _OUT, _ERROR]),
    "latent_job_frames_ready": (c_int, [c_void_p, c_uint64, c_uint64, c_void_p, c_void_p, POINTER(c_uint64), _ERROR]),
    "latent_job_release_frames": (c_int, [c_void_p, c_uint64, _ERROR]),
    "latent_job_wait": (c_int, [c_void_p, c_uint64, c_void_p, c_void_p, _ERROR]),
    "latent_job_progress": (c_int, [c_void_p, POINTER(_structs.latent_progress)]),
    "latent_job_cancel": (c_int, [c_void_p, _ERROR]),
    "latent_job_path": (c_char_p, [c_void_p]),
    "latent_job_properties": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_job_result": (c_void_p, [c_void_p]),
    "latent_job_model": (c_int, [c_void_p, _OUT, _ERROR]),
    "latent_job_tensor_name": (c_char_p, [c_void_p, c_size_t]),
    "latent_job_tensor": (c_int, [c_void_p, c_char_p, _TENSOR, _OUT, _ERROR]),
    "latent_job_free": (None, [c_void_p]),
}

_loaded: Optional[ctypes.CDLL] = None
_loading = threading.Lock()


def library() -> ctypes.CDLL:
    """liblatent, loaded at the first use: LATENT_LIBRARY, else what the loader finds. Raises NoLibrary."""
    global _loaded
    with _loading:
        if _loaded is None:
            name = os.environ.get("LATENT_LIBRARY") or SONAME
            try:
                found = ctypes.CDLL(name)
                for function, (result, arguments) in FUNCTIONS.items():
                    f = getattr(found, function)
                    f.restype, f.argtypes = result, arguments
            except (OSError, AttributeError) as e:
                raise NoLibrary(
                    "NoLibrary",
                    f"{name} cannot be loaded ({e}). Install liblatent of latentd, or name it in the environment variable LATENT_LIBRARY.",
                ) from e
            _loaded = found
        return _loaded


def error_from(error: _structs.Struct) -> Error:
    return error_of(error.name.decode("utf-8", "replace"), error.text.decode("utf-8", "replace"))


class Connection:
    """A latent_client, its lock, and handles that wait to be freed."""

    def __init__(self, options: _structs.Struct) -> None:
        self.library = library()
        self.pid = os.getpid()
        self.lock = threading.RLock()  # re-entered when a finaliser of the user's closes something of ours
        self.trash: collections.deque[tuple[Any, int]] = collections.deque()
        self.pointer: Optional[int] = None
        made, error = c_void_p(), _structs.latent_error()
        if self.library.latent_client_new(options, made, error) < 0:
            raise error_from(error)
        self.pointer = made.value

    def __del__(self) -> None:
        if getattr(self, "pointer", None) is not None and os.getpid() == self.pid:
            self.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Calls into liblatent are made inside."""
        if os.getpid() != self.pid:
            raise InvalidArgument("InvalidArgument", "This client was made before fork(), in the parent. Make one of your own in the child.")
        try:
            with self.lock:
                yield
        finally:
            self.drain()

    def call(self, function: Any, *arguments: Any) -> int:
        """A function whose last argument is a latent_error. Its result, or its error raised."""
        error = _structs.latent_error()
        with self.locked():
            r: int = function(*arguments, error)
        if r < 0:
            raise error_from(error)
        return r

    def make(self, function: Any, *arguments: Any) -> int:
        """A function whose last arguments are an output pointer and a latent_error. The output."""
        out = c_void_p()
        self.call(function, *arguments, out)
        if out.value is None:
            raise Internal("Internal", "liblatent gave no handle.")
        return out.value

    def client(self) -> int:
        if self.pointer is None:
            raise InvalidArgument("InvalidArgument", "The client was closed.")
        return self.pointer

    def read(self, function: Any, *arguments: Any) -> Any:
        """Like make(), for a tree of values, as Python's own."""
        pointer = self.make(function, *arguments)
        try:
            return value_of(self.library, pointer)
        finally:
            self.library.latent_value_free(pointer)  # of no client

    def close(self) -> None:
        with self.locked():
            pointer, self.pointer = self.pointer, None
            if pointer is not None:
                self.library.latent_client_free(pointer)

    def dispose(self, free: Any, pointer: int) -> None:
        """From finalisers."""
        if os.getpid() != self.pid:
            return  # the parent's
        self.trash.append((free, pointer))
        self.drain()

    def drain(self) -> None:
        while self.trash and self.lock.acquire(blocking=False):
            try:
                free, pointer = self.trash.popleft()
                free(pointer)
            except IndexError:
                pass
            finally:
                self.lock.release()

    def sleep(self, seconds: float) -> None:
        """Until something arrives, at most so long. Without the lock: others may go on, and may take in what arrives."""
        with self.locked():
            fd, events, usec = -1, 0, c_uint64()
            if self.pointer is not None and self.library.latent_client_timeout(self.pointer, usec) >= 0:
                fd, events = self.library.latent_client_fd(self.pointer), self.library.latent_client_events(self.pointer)
                seconds = min(seconds, usec.value / 1e6)
        if fd < 0 or events < 0:
            time.sleep(seconds)
            return
        p = select.poll()
        p.register(fd, events)
        p.poll(seconds * 1000)


class Handle:
    """Something of liblatent that is freed when nobody refers to it any more: neither its object nor a view of its memory."""

    __slots__ = ("__weakref__", "_free", "connection", "pointer")

    def __init__(self, connection: Connection, pointer: int, free: Any) -> None:
        self.connection, self.pointer, self._free = connection, pointer, free

    def __del__(self) -> None:
        self.connection.dispose(self._free, self.pointer)


def value_of(lib: ctypes.CDLL, value: Optional[int]) -> Any:
    """A tree of values as dict, list, str, int, float, bool; None if there is none."""
    kind = lib.latent_value_type(value)
    if kind == _structs.VALUE_DICT:
        return {
            lib.latent_value_key_at(value, i).decode(): value_of(lib, lib.latent_value_at(value, i))
            for i in range(lib.latent_value_count(value))
        }
    if kind == _structs.VALUE_LIST:
        return [value_of(lib, lib.latent_value_at(value, i)) for i in range(lib.latent_value_count(value))]
    if kind == _structs.VALUE_STRING:
        return lib.latent_value_as_string(value).decode("utf-8", "replace")
    if kind == _structs.VALUE_BOOL:
        return lib.latent_value_as_bool(value) == 1
    numbers: dict[int, tuple[Any, Any]] = {
        _structs.VALUE_UINT: (c_uint64, lib.latent_value_as_uint),
        _structs.VALUE_INT: (c_int64, lib.latent_value_as_int),
        _structs.VALUE_DOUBLE: (c_double, lib.latent_value_as_double),
    }
    if kind not in numbers:
        return None
    number: Any = numbers[kind][0]()
    numbers[kind][1](value, number)
    return number.value
