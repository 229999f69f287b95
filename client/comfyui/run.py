# SPDX-License-Identifier: Apache-2.0
"""A sampling run on the service: connection, models, session, steps.

One connection per process. It is made when it is needed and made anew when it was lost: a MODEL in ComfyUI may be older than the service that
now runs. A step depends on its inputs alone, so that it may be sent twice."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, TypeVar

from . import library
from .conditions import ConditionInput

log = logging.getLogger("latentd")

POLL_SEC = 0.02          # how often an interrupt is looked for
CANCEL_SEC = 0.02        # how long an interrupted run waits for the service's word; closing the session cancels as well
ALIGNMENT = 64
SHARE_MAX = 1_000_000    # of the service
ARENA_MIN = 4096         # of the service
WAITS = {                # phases of a job in which nothing is computed and a user would wonder
    "crash-wait": "the process that computes died too often; the service lets your steps wait for up to a minute (CrashBudget= of latentd.conf(5))",
    "restart": "the service is away; waiting up to a minute for it to come back"}
T = TypeVar("T")
Key = tuple[str, int, int, int, int]  # of a file as it is now
Loras = tuple[object, Callable[[], list[tuple[str, float, object]]]]

LOST = ("NoService", "Restarted", "NotFound")  # errors after which the connection, the model and the session are made anew, once


class Interface:
    """What a run needs of the program it runs in."""

    def interrupted(self) -> bool:
        """Whether the user asked to stop; does not change that."""
        return False

    def stop(self) -> None:
        """Raises the program's own exception for that, if the user asked."""

    def progress(self, done: float, total: float) -> None:
        """May raise as stop() does."""


@dataclass(frozen=True)
class Split:
    """How one step is divided among devices. None: as the service is set up."""

    ranks: Optional[int] = None
    shares: Optional[tuple[int, ...]] = None
    plan: Optional[str] = None
    exchange: Optional[str] = None
    chunks: Optional[int] = None
    gpus: Optional[tuple[str, ...]] = None

    def options(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


@dataclass(frozen=True)
class Sparse:
    """Sparse attention, as ComfyUI's node of that name has it."""

    method: str = "sol-attn"
    tau: float = 1.3
    keep_percent: float = 10.0
    start_percent: float = 0.2
    end_percent: float = 1.0
    dense_blocks: str = ""
    min_tokens: int = 12288
    sink_conditioning: str = "exact_kv_and_rows"

    def text(self, shift: float) -> str:
        """For the service. shift: of the picture's schedule, by which ComfyUI makes noise levels of percents."""
        values: dict[str, Any] = {"tau": self.tau} if self.method == "sol-attn" else {"keep": self.keep_percent}
        values.update(sigma_start=_sigma(self.start_percent, shift), sigma_end=_sigma(self.end_percent, shift))
        blocks = "+".join(x.replace(" ", "") for x in self.dense_blocks.split(",") if x.strip())
        if blocks:
            values["dense_blocks"] = blocks
        values["min_tokens"] = self.min_tokens
        if self.method != "vsa":
            values["sinks"] = self.sink_conditioning
        return f"{self.method}:" + ",".join(f"{k}={v if isinstance(v, str) else format(v, '.9g')}" for k, v in values.items())


def _sigma(percent: float, shift: float) -> float:
    if percent <= 0:
        return 1.0
    if percent >= 1:
        return 0.0
    return shift * (1 - percent) / (1 + (shift - 1) * (1 - percent))


def parse_shares(text: str, ranks: int) -> Optional[tuple[int, ...]]:
    """"3,2,2" as numbers; None if empty."""
    if not text.strip():
        return None
    try:
        shares = tuple(int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(f"latentd: shares is {text!r}; expected whole numbers with commas between, as 3,2,2") from None
    if min(shares) < 1 or max(shares) > SHARE_MAX:
        raise ValueError(f"latentd: shares is {text!r}; expected numbers from 1 to {SHARE_MAX}. To leave a device out, ask for fewer ranks")
    if ranks and len(shares) != ranks:
        raise ValueError(f"latentd: shares has {len(shares)} numbers, and ranks is {ranks}")
    return shares


def parse_gpus(text: str) -> Optional[tuple[str, ...]]:
    """Names with commas between; None if empty."""
    return tuple(name for name in (x.strip() for x in text.split(",")) if name) or None


@dataclass
class StepInputs:
    """Arrays as latent.Session.put() takes them. audio: the sound's own latent, not the carried one."""

    text: Any                      # [L, text_dim], becomes bf16
    video: Any                     # [24, T, H, W], becomes f32
    audio: Any                     # [32, 2, A], becomes f32
    sigma_video: float
    sigma_audio: float
    text_tags: Any = None          # [L]
    conditions: list[ConditionInput] = field(default_factory=list)
    seed: int = 0
    mask_video: Any = None
    mask_audio: Any = None
    sigmas_video: Any = None       # the whole schedule, if it is known
    sigmas_audio: Any = None
    position: tuple[int, int] = (0, 1)       # this step, of so many
    loras: Optional[Loras] = None  # (version, function that gives [(path, strength, user of the file)])


def _aligned(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _count(array: Any) -> int:
    n = 1
    for d in array.shape:
        n *= int(d)
    return n


class Service:
    """The connection and what was loaded through it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # liblatent: one thread at a time
        self._client: Any = None
        self._models: dict[Key, Any] = {}  # key → Model
        self._jobs: dict[Key, Any] = {}    # key → Job that loads it
        self._users: dict[Key, weakref.WeakSet[Any]] = {}  # key → weak set of the objects of this process that may still want it

    def client(self) -> Any:
        if self._client is None:
            latent = library.latent()
            try:
                self._client = latent.Client(os.environ.get("LATENTD_ADDRESS") or None)
            except latent.Error as e:
                raise RuntimeError(f"latentd: the service cannot be reached: {e}") from e
        return self._client

    def reliably(self, f: Callable[[], T], lost: Optional[Callable[[], None]] = None) -> T:
        """f(), and once more on a new connection if the service was lost. Its other errors become sentences for the user. lost: called before
        the second time."""
        latent = library.latent()
        with self.lock:
            try:
                return f()
            except latent.Error as e:
                if e.name not in LOST:
                    raise RuntimeError(f"latentd: {e}") from e
                log.warning("latentd: the service was lost (%s); connecting again", e)
                if lost is not None:
                    lost()
                self.forget()
            try:
                return f()
            except latent.Error as e:
                raise RuntimeError(f"latentd: {e}") from e

    def forget(self) -> None:
        """Drops the connection with all that hangs on it."""
        with self.lock:
            client, self._client = self._client, None
            self._models.clear()
            self._jobs.clear()
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close()

    @staticmethod
    def key(path: str) -> Key:
        s = os.stat(path)
        return os.path.realpath(path), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns

    def begin_load(self, path: str, user: object) -> Key:
        """Starts to load, unless it is done or under way. Once no user of a file lives, the next load of another one unloads it."""
        with self.lock:
            key = self.key(path)
            self._users.setdefault(key, weakref.WeakSet()).add(user)
            if key not in self._models and key not in self._jobs:
                for other in [k for k in self._models if not self._users[k]]:
                    log.info("latentd: %s", self._unload(other))
                self._jobs[key] = self.client().load(path)
            return key

    def model(self, path: str, user: object, ui: Interface) -> Any:
        """A loaded model of that file."""
        with self.lock:
            key = self.begin_load(path, user)
            if key not in self._models:
                job = self._jobs.pop(key)
                wait(job, ui, lambda p: ui.progress(p.fraction, 1.0))
                self._models[key] = job.model
            return self._models[key]

    def _unload(self, key: Key) -> str:
        name = os.path.basename(key[0])
        try:
            self._models[key].unload()
        except library.latent().Error as e:
            if e.name != "Busy":  # gone already
                del self._models[key]
            return f"{name}: {e}"
        del self._models[key]
        return f"{name}: unloaded"

    def unload(self) -> list[str]:
        """The service frees all weights that nobody else uses. What happened, a line for each file."""
        with self.lock:
            self._jobs.clear()
            return [self._unload(key) for key in list(self._models)]


SERVICE = Service()


def wait(job: Any, ui: Interface, report: Callable[[Any], None]) -> None:
    """Until the job is done. report(progress) is called now and then. On an interrupt, or whatever else is raised, it is cancelled."""
    try:
        while True:
            if ui.interrupted():
                ui.stop()
            if job.wait(timeout=POLL_SEC):
                return
            report(job.progress())
    except BaseException as e:
        if not isinstance(e, library.latent().Error):
            _cancel(job)
        raise


def _cancel(job: Any) -> None:
    latent = library.latent()
    with contextlib.suppress(latent.Error):
        job.cancel()
        end = time.monotonic() + CANCEL_SEC
        while not job.wait(timeout=0.005) and time.monotonic() < end:
            pass


class Run:
    """One session, from the first step of a sampling run to its end."""

    def __init__(self, path: str, user: object, compute: Optional[str] = None, split: Optional[Split] = None, service: Service = SERVICE,
                 sparse: Optional[str] = None) -> None:
        """user: lives as long as the file at path may be wanted. sparse: Sparse.text()."""
        self.sparse = sparse
        self.path, self.user, self.compute, self.split, self.service = path, user, compute, split or Split(), service
        self._session: Any = None
        self._room = (0, 0)
        self._loras: object = None  # version that the session has
        self._shown = 0.0

    def close(self) -> None:
        with self.service.lock:
            session, self._session, self._loras = self._session, None, None
            if session is not None:
                with contextlib.suppress(Exception):  # the service may be gone, and with it the session
                    session.close()

    def step(self, inputs: StepInputs, ui: Interface, take_video: Callable[[Any], T], take_audio: Callable[[Any], T]) -> tuple[T, T]:
        """The velocities as take_video(tensor) and take_audio(tensor) copy them out of the result, in the model's own sign."""
        return self.service.reliably(lambda: self._step(inputs, ui, take_video, take_audio), self.close)

    def _step(self, inputs: StepInputs, ui: Interface, take_video: Callable[[Any], T], take_audio: Callable[[Any], T]) -> tuple[T, T]:
        session = self._open(inputs, ui)
        self._set_loras(session, inputs, ui)
        session.reset()
        job = session.step(**self._arguments(session, inputs))
        at, steps = inputs.position
        said: set[str] = set()

        def report(p: Any) -> None:
            if p.phase in WAITS and p.phase not in said:
                said.add(p.phase)
                log.warning("latentd: %s.", WAITS[p.phase])
            # The bar never goes back: with CFG a step has two evaluations.
            done = at + (p.block / p.blocks if p.blocks else 0.0)
            if done > self._shown:
                self._shown = done
                ui.progress(done, steps)

        try:
            wait(job, ui, report)
            found = job.tensors
            return take_video(found["video_velocity"]), take_audio(found["audio_velocity"])
        finally:
            with contextlib.suppress(Exception):
                job.close()

    def _open(self, inputs: StepInputs, ui: Interface) -> Any:
        need = (max(ARENA_MIN, self._input_bytes(inputs)),
                max(ARENA_MIN, 2 * (_aligned(4 * _count(inputs.video)) + _aligned(4 * _count(inputs.audio)))))
        if self._session is not None and (need[0] > self._room[0] or need[1] > self._room[1]):
            self.close()
        if self._session is None:
            self._room = max(need[0], self._room[0]), max(need[1], self._room[1])
            model = self.service.model(self.path, self.user, ui)
            split = self.split.options()
            try:
                self._session = model.open_session(input_bytes=self._room[0], output_bytes=self._room[1], compute=self.compute, sparse=self.sparse,
                                                        **split)
            except library.latent().Error as e:
                if self.sparse and "sparse" in str(e):
                    raise RuntimeError(f"latentd: {e} The node latentd Sparse Attention asks for it: {self.sparse}.") from e
                if split and e.name in ("InvalidArgument", "NotSupported"):
                    set_there = ", ".join(f"{k} {', '.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in split.items())
                    raise RuntimeError(f"latentd: {e} The node latentd Split sets {set_there}; empty or 0 leaves it to the service.") from e
                raise
        return self._session

    def _input_bytes(self, inputs: StepInputs) -> int:
        schedule = 0 if inputs.sigmas_video is None else 2 * _aligned(4 * _count(inputs.sigmas_video))
        total = _aligned(2 * _count(inputs.text)) + _aligned(4 * _count(inputs.video)) + _aligned(4 * _count(inputs.audio)) + schedule
        for array, size in ((inputs.text_tags, 1), (inputs.mask_video, 4), (inputs.mask_audio, 4)):
            total += 0 if array is None else _aligned(size * _count(array))
        for c in inputs.conditions:
            total += sum(_aligned(4 * _count(x)) for x in (c.video, c.audio) if x is not None)
        return total

    def _arguments(self, session: Any, inputs: StepInputs) -> dict[str, Any]:
        latent = library.latent()

        def put(array: Any, dtype: str) -> Any:
            return None if array is None else session.put(array, dtype=dtype)

        arguments = {
            "text": put(inputs.text, "BF16"), "text_tags": put(inputs.text_tags, "U8"), "video": put(inputs.video, "F32"),
            "audio": put(inputs.audio, "F32"), "sigma_video": inputs.sigma_video, "sigma_audio": inputs.sigma_audio,
            "mask_video": put(inputs.mask_video, "F32"), "mask_audio": put(inputs.mask_audio, "F32"),
            "conditions": tuple(latent.Condition(c.kind, frame=c.frame, video=put(c.video, "F32"), audio=put(c.audio, "F32"))
                                for c in inputs.conditions)}
        if inputs.conditions:
            arguments.update(condition_noise="comfy", seed=inputs.seed)
        if inputs.sigmas_video is not None:
            arguments.update(sigmas_video=put(inputs.sigmas_video, "F32"), sigmas_audio=put(inputs.sigmas_audio, "F32"))
        return arguments

    def _set_loras(self, session: Any, inputs: StepInputs, ui: Interface) -> None:
        if inputs.loras is None:
            return
        version, files = inputs.loras
        if version == self._loras:
            return
        adapters = [(self.service.model(path, user, ui), strength) for path, strength, user in files()]
        if adapters or self._loras is not None:
            try:
                job = session.set_loras(adapters)
                wait(job, ui, lambda p: ui.progress(p.fraction, 1.0))
            except library.latent().Error as e:
                if e.name != "InvalidModel":
                    raise
                raise RuntimeError(f"latentd: a LoRA of the workflow was made for another model; take it out. {e}") from e
            for module, reason in (job.result or {}).get("refused") or ():
                log.warning("latentd: LoRA of %s not applied: %s", module, reason)
        self._loras = version
