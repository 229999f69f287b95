# SPDX-License-Identifier: Apache-2.0
"""Jobs: long work of the service. Waiting for them blocks neither other threads nor an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from ctypes import c_uint64, c_void_p
from types import TracebackType
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from latent import _structs
from latent._arguments import uint
from latent._library import Connection, Handle, error_from, value_of
from latent.errors import Error, InvalidArgument
from latent.tensor import Tensor

# Between two looks when nothing arrives: another thread may have taken in what this one waits for.
_NAP = 0.05

_J = TypeVar("_J", bound="Job")


class Progress(NamedTuple):
    """How far a job is."""

    state: str
    """"queued", "running", "cancelling", "done", "failed", "cancelled"."""
    phase: str
    """"read", "check" of a load; "queue", "sample", "merge", "tokenize", "encode", "decode", "encode-media", "decode-sound"; "frames-wait" until
    release_frames(); "restart" while the service is away."""
    step: int
    """Steps that are finished, of `steps` (0: not known yet)."""
    steps: int
    block: int
    """Blocks of this step that are finished, of `blocks`; MiB read of a load."""
    blocks: int
    fraction: float
    """0 to 1 of the whole job."""
    eta: float
    """Seconds until the end; 0: unknown."""


class Job:
    """A step, a trajectory or a merge. It goes on when this object is dropped; cancel() ends it.

    >>> import asyncio, latent
    >>> async def load(client: latent.Client, name: str) -> latent.Model:
    ...     return (await client.load(name, by_name=True)).model
    >>> with latent.Client() as client:
    ...     model = asyncio.run(load(client, "comfy.safetensors"))
    ...     with model.open_session() as s:
    ...         job = s.sample(video=s.put(bytes(3072), "F32", (24, 2, 4, 4)), audio=s.put(bytes(2048), "F32", (32, 2, 8)),
    ...                        text=s.put(bytes(2880), "BF16", (9, 160)), steps=1000)
    ...         job.poll()
    ...         job.cancel()
    ...         job.wait()
    Traceback (most recent call last):
    latent.errors.Cancelled: Cancelled: The job was cancelled.
    """

    def __init__(self, connection: Connection, pointer: int) -> None:
        self._handle: Optional[Handle] = Handle(connection, pointer, connection.library.latent_job_free)
        self._told: Optional[Progress] = None
        self._result: Optional[dict[str, Any]] = None
        self._tensors: Optional[dict[str, Tensor]] = None

    def __enter__(self: _J) -> _J:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<latent.{type(self).__name__} {self.path if self._handle else 'closed'}>"

    def _open(self) -> Handle:
        if self._handle is None:
            raise InvalidArgument("InvalidArgument", "The job was closed.")
        return self._handle

    def close(self) -> None:
        """Forgets the job, which goes on. Views of its results stay valid."""
        self._handle = self._tensors = None

    @property
    def path(self) -> str:
        """Its object path. Another one after a restart of the service."""
        h = self._open()
        with h.connection.locked():
            path: str = h.connection.library.latent_job_path(h.pointer).decode()
        return path

    def _look(self) -> tuple[bool, Progress, Optional[Error]]:
        """Takes in what arrived: is it done, how far, what it failed with."""
        h, error = self._open(), _structs.latent_error()
        with h.connection.locked():
            r = h.connection.library.latent_job_wait(h.pointer, 0, None, None, error)
            progress = _progress(h)
        return r == 0, progress, error_from(error) if r < 0 else None

    def wait(self, timeout: Optional[float] = None, progress: Optional[Callable[[Progress], object]] = None) -> bool:
        """Waits for the end, at most so many seconds. True: it is done; False: not yet. Raises the error of a job that failed.

        progress is called in this thread with the newest news. Other threads go on meanwhile, also with this client: they may cancel().
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            done, news, error = self._look()
            if progress is not None and news != self._told:
                self._told = news
                progress(news)
            if error is not None:
                raise error
            if done:
                return True
            left = _NAP if end is None else end - time.monotonic()
            if not left > 0:
                return False
            self._open().connection.sleep(min(left, _NAP))

    def frames_ready(self, known: int = 0, timeout: Optional[float] = None, progress: Optional[Callable[[Progress], object]] = None) -> int:
        """Of Session.decode(): how many frames are final, counted from the film's start. Waits as wait() does until there are more than `known`
        or the job is done; `known` if there are no more by then. tensor("frames") has them, frame i at i modulo its first dimension."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            h, frames, error = self._open(), c_uint64(), _structs.latent_error()
            with h.connection.locked():
                r = h.connection.library.latent_job_frames_ready(h.pointer, uint("known", known), 0, None, None, frames, error)
                news = _progress(h)
            if progress is not None and news != self._told:
                self._told = news
                progress(news)
            if r < 0:
                raise error_from(error)
            if r == 0:
                return frames.value
            left = _NAP if end is None else end - time.monotonic()
            if not left > 0:
                return known
            h.connection.sleep(min(left, _NAP))

    def release_frames(self, up_to: int) -> None:
        """The frames before this one were read: in a ring (frames= of Session.decode()) others may take their place."""
        h = self._open()
        h.connection.call(h.connection.library.latent_job_release_frames, h.pointer, uint("up_to", up_to))

    def tensor(self, name: str) -> Tensor:
        """A tensor of the result: of a job that is done, or "frames" of a decode from its first frame on; "video" and "audio" of a
        render with keep_latents that failed when they were done."""
        h, tensor, data = self._open(), _structs.latent_tensor(), c_void_p()
        h.connection.call(h.connection.library.latent_job_tensor, h.pointer, name.encode(), tensor, data)
        return Tensor(tensor, data.value, h, is_input=False)

    def poll(self) -> bool:
        """wait() without waiting."""
        return self.wait(0)

    def __await__(self: _J) -> Generator[Any, None, _J]:
        """Waits without blocking the event loop; gives the job. Cancelling the task leaves the job alone."""
        return self._wait_async().__await__()

    async def _wait_async(self: _J) -> _J:
        # A look may take long (a service that restarts has to be asked for the session again): not in the loop's thread.
        loop, nap = asyncio.get_running_loop(), 0.002
        while not await loop.run_in_executor(None, self.poll):
            await asyncio.sleep(nap)
            nap = min(nap * 1.5, _NAP)
        return self

    def updates(self) -> Updates:
        """News as they come, the last ones those of the end: `for p in job.updates()`, or `async for`, which does not block the event loop.
        Raises the error of a job that failed; leaving the loop leaves the job alone."""
        return Updates(self)

    def progress(self) -> Progress:
        """The newest news that arrived, without asking the service."""
        h = self._open()
        c = h.connection
        with c.locked():
            if c.pointer is not None:
                c.library.latent_client_process(c.pointer, None)  # a lost connection is wait()'s to tell
            return _progress(h)

    def cancel(self) -> None:
        """Asks the service to cancel it; wait() then raises Cancelled. No error if it has ended already."""
        h = self._open()
        h.connection.call(h.connection.library.latent_job_cancel, h.pointer)

    def properties(self) -> dict[str, Any]:
        """Its properties as org.latentd.Latent1.Job names them."""
        h = self._open()
        properties: dict[str, Any] = h.connection.read(h.connection.library.latent_job_properties, h.pointer)
        return properties

    @property
    def result(self) -> dict[str, Any]:
        """What a job that is done says: rows, numerics, tensors, compute-usec and how it was split of a step; model, bytes-read of a load;
        applied, refused, bytes of a merge; cached of an encode, frames of a decode."""
        h = self._open()
        if self._result is None:
            if not self.poll():
                raise InvalidArgument("InvalidArgument", "The job is not done yet: wait() for it.")
            lib = h.connection.library
            self._result = value_of(lib, lib.latent_job_result(h.pointer)) or {}
        return self._result

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a job that is done: "video_velocity" and "audio_velocity" of a step, "video", "audio", "step.I.video" ... of a
        trajectory. They lie in the session's output arena, which stays readable as long as one of them lives."""
        h = self._open()
        if self._tensors is None:
            _ = self.result
            found: dict[str, Tensor] = {}
            lib = h.connection.library
            while True:
                with h.connection.locked():
                    name: Optional[bytes] = lib.latent_job_tensor_name(h.pointer, len(found))
                if name is None:
                    break
                tensor, data = _structs.latent_tensor(), c_void_p()
                h.connection.call(lib.latent_job_tensor, h.pointer, name, tensor, data)
                found[name.decode()] = Tensor(tensor, data.value, h, is_input=False)
            self._tensors = found
        return dict(self._tensors)


class Updates:
    """Of Job.updates()."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Progress]:
        news: list[Progress] = []
        done = False
        while not done:
            done = self._job.wait(_NAP, news.append)
            yield from news
            news.clear()

    async def __aiter__(self) -> AsyncIterator[Progress]:
        news: list[Progress] = []
        loop, done = asyncio.get_running_loop(), False
        while not done:
            done = await loop.run_in_executor(None, self._job.wait, 0, news.append)
            for p in news:
                yield p
            news.clear()
            if not done:
                await asyncio.sleep(_NAP)


def _progress(h: Handle) -> Progress:
    p = _structs.sized(_structs.latent_progress)
    h.connection.library.latent_job_progress(h.pointer, p)
    state = _structs.JOB_STATES[p.state] if p.state < len(_structs.JOB_STATES) else str(p.state)
    return Progress(state, p.phase.decode("utf-8", "replace"), p.step, p.steps, p.block, p.blocks, p.fraction, p.eta_usec / 1e6)
