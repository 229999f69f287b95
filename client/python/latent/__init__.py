# SPDX-License-Identifier: Apache-2.0
"""latentd from Python: a typed face of liblatent, without copies and without a build step.

    import latent

    with latent.Client() as client:
        job = client.load("/models/h3/transformer")
        job.wait(progress=print)
        with job.model.open_session() as s:
            video, audio = s.put(noise_video), s.put(noise_audio)
            text = s.put(encoded, "BF16")
            job = s.sample(text=text, video=video, audio=audio, steps=8)
            job.wait()
            film = job.tensors["video"].array.copy()

The whole surface:

    Client(address=None, restart_timeout=None)
        .status() -> dict
        .devices(), .models(), .jobs(), .sessions(), .regions() -> list of dict
        .load(path_or_name, *, by_name=False, name=None, qkv_order=None, partition=None, numa=None,
              tokenizer=None) -> LoadJob (with .model)
        .find_model(name_or_path) -> Model
        .open_pipeline(folder, *, by_name=False, and what open_session() has) -> Session
        .cancel(path), .drop_cache() -> int, .release_gpus(), .close()
    Model
        .path, .properties() -> dict, .unload(), .close()
        .open_session(*, input_bytes=0, output_bytes=0, compute=None, job_class=None, conditioner=None, video_vae=None, audio_vae=None,
                      sparse=None, **split) -> Session
            sparse: "sol-attn:tau=1.3", "sla:keep=10", "vsa", ... as latentctl --sparse
            split: ranks, shares, plan, exchange, chunks, gpus
    Session
        .allocate(dtype, shape) -> Tensor;  .put(data, dtype=None, shape=None) -> Tensor;  .reset()
        .step(text=, video=, audio=, sigma_video=, sigma_audio=, text_tags=None, conditions=(), condition_noise=None, seed=None,
              mask_video=None, mask_audio=None, compute=None, output_offset=0, output_bytes=0, sigmas_video=None, sigmas_audio=None) -> Job
        .sample(text=, video=, audio=, steps= or sigmas_video= and sigmas_audio=, schedule=None, shift_video=0, shift_audio=0,
                sampler=None, noise=None, keep_steps=False, clean_video=None, clean_audio=None, and what step() has) -> Job
        .tokenize(text), .encode(text, pictures=(), picture_rule=None, type=None, compute=None) -> Job: of a conditioner; text: str or Tensor
        .decode(video= or audio=, type=None, frames=0, compute=None), .encode_media(video= or audio=, posterior=None, seed=None) -> Job: of a VAE
        .render(prompt, path=None, *, width=0, height=0, frames=0 or seconds=, steps=0, seed=None, keep_latents=False, ...) -> RenderJob
        .set_loras([(model, strength), ...], compute=None) -> Job
        .plan_step(...), .plan_sample(...), .plan_tokenize(...), .plan_encode(...), .plan_decode(...), .plan_encode_media(...) -> dict
        .path, .input_bytes, .output_bytes, .close();  .output_bytes_for(...): as latent.output_bytes(...)
    Tensor
        .array (numpy), .torch(), .memory (memoryview), .dtype, .shape, .offset, .nbytes
    Job
        .wait(timeout=None, progress=None) -> bool;  .poll() -> bool;  await job;  for p in job.updates(), async for p in job.updates()
        .progress() -> Progress;  .cancel();  .result -> dict;  .tensors -> dict of Tensor;  .properties() -> dict;  .path, .close()
        .frames_ready(known=0, timeout=None, progress=None) -> int;  .release_frames(up_to);  .tensor(name) -> Tensor
    RenderJob: a Job with .film -> pathlib.Path
    Picture(kind, picture=None, sound=False)
    Condition(kind, frame=0, video=None, audio=None)
    output_bytes(video, audio, sampler=None, steps=1, keep_steps=False) -> int
    Error(name, text), and a subclass for each error name

Lifetime. All objects but tensors are context managers; closing one, or dropping it, in any order is fine. A tensor and all views of it
(numpy, torch, memoryview) stay valid as long as they live, whatever is closed. Using a closed object raises InvalidArgument.

Threads. A client and all that was made from it may be used from several threads: a lock guards the calls. wait() does not hold it
while it sleeps, so that another thread may cancel(), look at progress() or start more jobs. After fork() only the parent may use them.

liblatent is looked for at the first use, not at import: LATENT_LIBRARY names the file, else liblatent.so.1 is what the loader finds.
numpy, torch and ml_dtypes are used if they are asked for, and not needed.
"""

from __future__ import annotations

from latent import _library
from latent.client import Client, LoadJob, Model
from latent.errors import (
    AccessDenied,
    Busy,
    Cancelled,
    DoesNotFit,
    Error,
    FileChanged,
    FileError,
    Internal,
    InvalidArgument,
    InvalidFile,
    InvalidModel,
    InvalidTensor,
    LimitExceeded,
    NoLibrary,
    NoService,
    NotFound,
    NotSupported,
    NoWorker,
    Restarted,
    WorkerCrashed,
)
from latent.film import RenderJob
from latent.job import Job, Progress
from latent.session import Condition, Picture, Session
from latent.tensor import Tensor, output_bytes

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "Busy",
    "Cancelled",
    "Client",
    "Condition",
    "DoesNotFit",
    "Error",
    "FileChanged",
    "FileError",
    "Internal",
    "InvalidArgument",
    "InvalidFile",
    "InvalidModel",
    "InvalidTensor",
    "Job",
    "LimitExceeded",
    "LoadJob",
    "Model",
    "NoLibrary",
    "NoService",
    "NoWorker",
    "NotFound",
    "NotSupported",
    "Picture",
    "Progress",
    "RenderJob",
    "Restarted",
    "Session",
    "Tensor",
    "WorkerCrashed",
    "library_version",
    "output_bytes",
]


def library_version() -> str:
    """The version of liblatent."""
    version: str = _library.library().latent_version().decode()
    return version
