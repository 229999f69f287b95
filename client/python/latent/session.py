# SPDX-License-Identifier: Apache-2.0
"""Sessions: two arenas of shared memory on a model, and the jobs on them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, Union

from latent import _structs
from latent._arguments import number, text, uint
from latent._library import Connection, Handle
from latent.errors import InvalidArgument, NoService, NotFound, Restarted
from latent.film import FilmFile, RenderJob, format_of
from latent.job import Job
from latent.tensor import Source, Tensor, describe, output_bytes

if TYPE_CHECKING:
    from latent.client import Model

FPS, FRAMES_MAX = 24, 362  # of a film


@dataclass(frozen=True)
class Condition:
    """A keyframe or a reference: kind "keyframe" (with its pixel frame of the film), "image", "video" or "audio"."""

    kind: str
    frame: int = 0
    video: Optional[Tensor] = None
    audio: Optional[Tensor] = None


@dataclass(frozen=True)
class Picture:
    """What the conditioner sees beside the prompt: kind "keyframe", or the references "image", "video" (U8 [F, H, W, 3], perhaps with sound) and
    "audio" (without a picture). picture: U8 [H, W, 3]."""

    kind: str
    picture: Optional[Tensor] = None
    sound: bool = False


class Session:
    """An input arena to allocate from, an output arena for results. Of Model.open_session(); use it in a with statement.

    >>> import latent
    >>> with latent.Client() as client, client.load("comfy.safetensors", by_name=True) as load:
    ...     done = load.wait()
    ...     with load.model.open_session(input_bytes=1 << 20, output_bytes=1 << 20, compute="f32") as s:
    ...         t = s.allocate("F32", (24, 2, 4, 4))
    ...         t.memory[:] = bytes(t.nbytes)
    ...         inputs = {"video": t, "audio": s.put(bytes(2048), "F32", (32, 2, 8)), "text": s.put(bytes(2880), "BF16", (9, 160))}
    ...         plan = s.plan_step(**inputs, sigma_video=0.5, sigma_audio=0.5)
    ...         job = s.step(**inputs, sigma_video=0.5, sigma_audio=0.5)
    ...         done = job.wait(60)
    >>> plan["rows"], job.result["rows"]
    (33, 33)
    >>> sorted(job.tensors.items())  # its memory stays while it is referred to
    [('audio_velocity', <latent.Tensor F32 [32, 2, 8] read-only>), ('video_velocity', <latent.Tensor F32 [24, 2, 4, 4] read-only>)]
    """

    def __init__(self, connection: Connection, pointer: int) -> None:
        lib = connection.library
        self._handle: Optional[Handle] = Handle(connection, pointer, lib.latent_session_free)
        self.input_bytes: int = lib.latent_session_input_bytes(pointer)
        self.output_bytes: int = lib.latent_session_output_bytes(pointer)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<latent.Session {self.path if self._handle else 'closed'}>"

    def _open(self) -> Handle:
        if self._handle is None:
            raise InvalidArgument("InvalidArgument", "The session was closed.")
        return self._handle

    def close(self) -> None:
        """Cancels its jobs and frees its arenas in the service. Views of its tensors in this process stay valid."""
        h, self._handle = self._handle, None
        if h is not None:
            with contextlib.suppress(Restarted, NoService, NotFound):  # it is gone anyway
                h.connection.call(h.connection.library.latent_session_close, h.pointer)

    @property
    def path(self) -> str:
        h = self._open()
        with h.connection.locked():
            path: str = h.connection.library.latent_session_path(h.pointer).decode()
        return path

    # ------------------------------------------------------------------------------------- inputs

    def allocate(self, dtype: str, shape: Sequence[int]) -> Tensor:
        """A place in the input arena, behind the last one. Its bytes are not cleared. DoesNotFit: the arena is full."""
        h = self._open()
        tensor, data = describe(dtype, shape), c_void_p()
        h.connection.call(h.connection.library.latent_session_allocate, h.pointer, tensor, data)
        return Tensor(tensor, data.value, h, is_input=True)

    def put(self, data: Any, dtype: Optional[str] = None, shape: Optional[Sequence[int]] = None) -> Tensor:
        """allocate() and one copy: of a numpy array, a torch tensor of any device, a Tensor, or plain memory (bytes, array.array).

        dtype: what it is to be there, by default what it is; floating-point types are converted, rounding to nearest. uint16 put as BF16,
        and bytes put as any type (with shape), are its bits.
        """
        source = Source(data, dtype, shape)
        place = self.allocate(str(source.dtype), source.shape)
        source.copy_to(place)
        return place

    def reset(self) -> None:
        """Gives all places of the input arena back. Tensors made before and after then share memory."""
        h = self._open()
        with h.connection.locked():
            h.connection.library.latent_session_reset(h.pointer)

    output_bytes_for = staticmethod(output_bytes)

    # ------------------------------------------------------------------------------------- jobs

    def step(
        self,
        *,
        text: Tensor,
        video: Tensor,
        audio: Tensor,
        sigma_video: float,
        sigma_audio: float,
        text_tags: Optional[Tensor] = None,
        conditions: Iterable[Condition] = (),
        condition_noise: Optional[str] = None,
        seed: Optional[int] = None,
        mask_video: Optional[Tensor] = None,
        mask_audio: Optional[Tensor] = None,
        compute: Optional[str] = None,
        output_offset: int = 0,
        output_bytes: int = 0,
        sigmas_video: Optional[Tensor] = None,
        sigmas_audio: Optional[Tensor] = None,
    ) -> Job:
        """One evaluation of the model. What each input is: latent_step_options of client/latent.h. Results: "video_velocity",
        "audio_velocity"."""
        inputs = dict(locals())
        return self._start("latent_session_step", _structs.latent_step_options, inputs)

    def sample(
        self,
        *,
        text: Tensor,
        video: Tensor,
        audio: Tensor,
        text_tags: Optional[Tensor] = None,
        sigmas_video: Optional[Tensor] = None,
        sigmas_audio: Optional[Tensor] = None,
        steps: int = 0,
        schedule: Optional[str] = None,
        shift_video: float = 0,
        shift_audio: float = 0,
        sampler: Optional[str] = None,
        noise: Optional[str] = None,
        seed: Optional[int] = None,
        keep_steps: bool = False,
        clean_video: Optional[Tensor] = None,
        clean_audio: Optional[Tensor] = None,
        conditions: Iterable[Condition] = (),
        condition_noise: Optional[str] = None,
        mask_video: Optional[Tensor] = None,
        mask_audio: Optional[Tensor] = None,
        compute: Optional[str] = None,
        output_offset: int = 0,
        output_bytes: int = 0,
    ) -> Job:
        """A whole trajectory; steps, or sigmas_video and sigmas_audio. What each input is: latent_sample_options of client/latent.h.
        Results: "video", "audio"; with keep_steps also "step.I.video", "step.I.audio"."""
        inputs = dict(locals())
        return self._start("latent_session_sample", _structs.latent_sample_options, inputs)

    def tokenize(self, text: Union[str, Tensor, None] = None, *, output_offset: int = 0, output_bytes: int = 0) -> Job:
        """A text's tokens; a str is put into the session. Result: "ids"."""
        inputs = dict(locals())
        return self._start("latent_session_tokenize", _structs.latent_tokenize_options, self._with_text(inputs))

    def encode(
        self,
        text: Union[str, Tensor, None] = None,
        *,
        pictures: Iterable[Picture] = (),
        picture_rule: Optional[str] = None,
        type: Optional[str] = None,  # noqa: A002 (as in the header)
        compute: Optional[str] = None,
        output_offset: int = 0,
        output_bytes: int = 0,
    ) -> Job:
        """A prompt and pictures, as the denoiser reads them: latent_encode_options of client/latent.h. Results: "text", "text_tags", "ids"."""
        inputs = dict(locals())
        return self._start("latent_session_encode", _structs.latent_encode_options, self._with_text(inputs))

    def decode(
        self,
        *,
        video: Optional[Tensor] = None,
        audio: Optional[Tensor] = None,
        type: Optional[str] = None,  # noqa: A002
        frames: int = 0,
        compute: Optional[str] = None,
        output_offset: int = 0,
        output_bytes: int = 0,
    ) -> Job:
        """Latents as frames or sound: latent_decode_options of client/latent.h. Results: "frames" or "sound". Frames come one after the other:
        Job.frames_ready()."""
        inputs = dict(locals())
        return self._start("latent_session_decode", _structs.latent_decode_options, inputs)

    def encode_media(
        self,
        *,
        video: Optional[Tensor] = None,
        audio: Optional[Tensor] = None,
        posterior: Optional[str] = None,
        seed: Optional[int] = None,
        output_offset: int = 0,
        output_bytes: int = 0,
    ) -> Job:
        """Frames or sound as latents: latent_encode_media_options of client/latent.h. Results: "video" or "audio"."""
        inputs = dict(locals())
        return self._start("latent_session_encode_media", _structs.latent_encode_media_options, inputs)

    def render(
        self,
        prompt: Union[str, Tensor, None] = None,
        path: Union[str, os.PathLike[str], None] = None,
        *,
        width: int = 0,
        height: int = 0,
        frames: int = 0,
        seconds: Optional[float] = None,
        steps: int = 0,
        seed: Optional[int] = None,
        sigmas_video: Optional[Tensor] = None,
        sigmas_audio: Optional[Tensor] = None,
        schedule: Optional[str] = None,
        shift_video: float = 0,
        shift_audio: float = 0,
        sampler: Optional[str] = None,
        noise: Optional[str] = None,
        keep_latents: bool = False,
        format: Optional[str] = None,  # noqa: A002 (as in the header)
        type: Optional[str] = None,  # noqa: A002
        ring: int = 0,
        compute: Optional[str] = None,
        output_offset: int = 0,
        output_bytes: int = 0,
    ) -> RenderJob:
        """A film of a prompt, in a session of Client.open_pipeline(): to a file, .mp4, .webm or .mkv (or `format`), which appears, or is
        replaced, when it is complete: RenderJob.film (InvalidArgument: what is there may be a model's file); without a path "frames" and
        "sound" in the output arena. seconds: instead of frames (24 a second). With keep_latents also "video" and "audio". What each input is:
        latent_render_options of client/latent.h.

        >>> import latent
        >>> with latent.Client() as client, client.open_pipeline("demo-model", by_name=True) as s:
        ...     job = s.render("A red circle.", "film.mp4", width=96, height=64, frames=5, steps=2, seed=1, compute="f32")
        ...     for p in job.updates():
        ...         shares = p.fraction
        >>> job.film.name, job.film.stat().st_size == job.result["bytes"], job.result["frames"], shares
        ('film.mp4', True, 5, 1.0)
        """
        inputs = dict(locals())
        if seconds is not None:
            if frames:
                raise InvalidArgument("InvalidArgument", "frames and seconds do not go together.")
            inputs["frames"] = frames_of(seconds)
        if path is not None:
            inputs["format"] = format_of(pathlib.Path(path), format)
        for name in ("self", "path", "seconds", "keep_latents"):
            del inputs[name]
        inputs["text"] = inputs.pop("prompt")
        inputs["prompt"] = self._with_text(inputs).pop("text")
        h = self._open()
        c = h.connection
        o = fill(_structs.latent_render_options, inputs, h)
        if keep_latents:
            o.flags |= _structs.RENDER_KEEP_LATENTS
        file = None
        if path is not None:
            file = FilmFile(path)
            o.flags |= _structs.RENDER_FILE
            o.file = file.fd
        try:
            return RenderJob(c, c.make(c.library.latent_session_render, h.pointer, o), file)
        except BaseException:
            if file is not None:
                file.discard()
            raise

    def plan_tokenize(self, **inputs: Any) -> dict[str, Any]:
        """What tokenize() would take: as plan_step(), and memory-bytes."""
        return self._plan("latent_session_plan_tokenize", _structs.latent_tokenize_options, self._with_text(inputs))

    def plan_encode(self, **inputs: Any) -> dict[str, Any]:
        """What encode() would take."""
        return self._plan("latent_session_plan_encode", _structs.latent_encode_options, self._with_text(inputs))

    def plan_decode(self, **inputs: Any) -> dict[str, Any]:
        """What decode() would take."""
        return self._plan("latent_session_plan_decode", _structs.latent_decode_options, inputs)

    def plan_encode_media(self, **inputs: Any) -> dict[str, Any]:
        """What encode_media() would take."""
        return self._plan("latent_session_plan_encode_media", _structs.latent_encode_media_options, inputs)

    def _with_text(self, inputs: dict[str, Any]) -> dict[str, Any]:
        value = inputs.get("text")
        if isinstance(value, str):
            given = value.encode()
            inputs["text"] = self.put(given, "U8", (len(given),)) if given else None
        return inputs

    def plan_step(self, **inputs: Any) -> dict[str, Any]:
        """What such a step would take, without running it (inputs of step()): rows, steps, output-bytes, ranks."""
        return self._plan("latent_session_plan_step", _structs.latent_step_options, inputs)

    def plan_sample(self, **inputs: Any) -> dict[str, Any]:
        """What such a trajectory would take (inputs of sample())."""
        return self._plan("latent_session_plan_sample", _structs.latent_sample_options, inputs)

    def set_loras(self, loras: Iterable[tuple[Model, float]], compute: Optional[str] = None) -> Job:
        """The adapters that later jobs use, merged in this order, with their strengths; none: the base model alone. The job merges."""
        h, pairs = self._open(), list(loras)
        models = [m.handle() for m, _ in pairs]
        array = (_structs.latent_lora * len(pairs))()
        for lora, model, (_, strength) in zip(array, models, pairs):
            lora.model, lora.strength = model.pointer, number("strength", strength)
        c = h.connection
        return Job(c, c.make(c.library.latent_session_set_loras, h.pointer, array, len(pairs), text("compute", compute)))

    def _start(self, function: str, kind: type[_structs.Struct], inputs: dict[str, Any]) -> Job:
        h = self._open()
        c = h.connection
        del inputs["self"]  # of the caller's locals()
        return Job(c, c.make(getattr(c.library, function), h.pointer, fill(kind, inputs, h)))

    def _plan(self, function: str, kind: type[_structs.Struct], inputs: dict[str, Any]) -> dict[str, Any]:
        h = self._open()
        plan: dict[str, Any] = h.connection.read(getattr(h.connection.library, function), h.pointer, fill(kind, inputs, h))
        return plan


def frames_of(seconds: float) -> int:
    """At 24 a second, not fewer than asked for."""
    value = number("seconds", seconds)
    if not 0 < value <= FRAMES_MAX / FPS:
        raise InvalidArgument("InvalidArgument", f"seconds is {seconds}, expected more than 0 and at most {FRAMES_MAX / FPS:.2f}.")
    return math.ceil(value * FPS - 1e-9)


def _conditions(conditions: Iterable[Condition], owner: Handle) -> Any:
    given = list(conditions)
    array = (_structs.latent_condition * len(given))()
    for i, (a, c) in enumerate(zip(array, given)):
        if not isinstance(c, Condition):
            raise TypeError(f"conditions[{i}] is a {type(c).__name__}, expected a latent.Condition")
        a.kind, a.frame = text("kind", c.kind), uint("frame", c.frame)
        for name in ("video", "audio"):
            if getattr(c, name) is not None:
                setattr(a, name, ctypes.pointer(getattr(c, name).struct_of(owner, f"conditions[{i}].{name}")))
    return array


def _pictures(pictures: Iterable[Picture], owner: Handle) -> Any:
    given = list(pictures)
    array = (_structs.latent_picture * len(given))()
    for i, (a, p) in enumerate(zip(array, given)):
        if not isinstance(p, Picture):
            raise TypeError(f"pictures[{i}] is a {type(p).__name__}, expected a latent.Picture")
        a.kind, a.sound = text("kind", p.kind), 1 if p.sound else 0
        if p.picture is not None:
            a.picture = ctypes.pointer(p.picture.struct_of(owner, f"pictures[{i}].picture"))
    return array


def _list(name: str, value: Iterable[Any], kind: Any) -> Any:
    """A C array for a field of the pointer type kind."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is {value!r}, expected a list")
    if kind is ctypes.POINTER(ctypes.c_char_p):
        names = [text(name, x) for x in value]
        return (ctypes.c_char_p * len(names))(*names)
    numbers = [uint(name, x, 32) for x in value]
    return (ctypes.c_uint32 * len(numbers))(*numbers)


def fill(kind: type[_structs.Struct], inputs: dict[str, Any], owner: Optional[Handle] = None) -> _structs.Struct:
    """An option struct of these fields; None leaves a default. Unknown names are a TypeError, as of any function."""
    s = _structs.sized(kind)
    fields: dict[str, Any] = {f[0]: f[1] for f in kind._fields_}
    for name, value in inputs.items():
        if name == "keep_steps" and kind is _structs.latent_sample_options:
            s.flags = _structs.SAMPLE_KEEP_STEPS if value else 0
            continue
        type_ = fields.get(name)
        if type_ is None or name in ("struct_size", "flags", "reserved", "has_seed", "file") or name.startswith("n_"):
            raise TypeError(f"{name} is none of {', '.join(f for f in fields if f not in ('struct_size', 'reserved', 'flags'))}")
        if value is None:
            continue
        if name == "seed":
            s.has_seed = 1
        if name == "conditions" and owner is not None:
            array = _conditions(value, owner)
            s.conditions, s.n_conditions = array, len(array)
        elif name == "pictures" and owner is not None:
            array = _pictures(value, owner)
            s.pictures, s.n_pictures = array, len(array)
        elif type_ is ctypes.c_char_p:
            setattr(s, name, text(name, value))
        elif type_ is ctypes.c_double:
            setattr(s, name, number(name, value))
        elif type_ in (ctypes.c_uint32, ctypes.c_uint64):
            setattr(s, name, uint(name, value, 8 * ctypes.sizeof(type_)))
        elif type_ is ctypes.c_void_p:  # models of a pipeline
            setattr(s, name, value.handle().pointer)
        elif owner is None:  # lists with their number beside them: shares (weights), gpus (names)
            array = _list(name, value, type_)
            setattr(s, name, array)
            setattr(s, "n_" + name, len(array))
        elif isinstance(value, Tensor):
            setattr(s, name, ctypes.pointer(value.struct_of(owner, name)))
        else:
            raise TypeError(f"{name} is a {type(value).__name__}, expected a latent.Tensor: put() it into the session first")
    return s
