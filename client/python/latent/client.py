# SPDX-License-Identifier: Apache-2.0
"""The connection to the service, and models."""

from __future__ import annotations

import math
import os
from ctypes import c_uint64
from types import TracebackType
from typing import Any, Optional, Union

from latent import _structs
from latent._arguments import path as path_bytes
from latent._arguments import text, uint
from latent._library import Connection, Handle
from latent.errors import InvalidArgument
from latent.job import Job
from latent.session import Session, fill


class Client:
    """A connection to the service. What was made from it works no more when it is closed, but for memory that was mapped.

    address: None: the system bus if the service is there, else the user bus; "system" or "user"; an absolute path: the service's own
    socket; else the address of a message bus. restart_timeout: seconds that a job waits for a service that went away (default 60);
    0: jobs end with Restarted instead. Raises NoService.

    >>> import latent
    >>> with latent.Client() as client:
    ...     client.status()["ApiVersion"]
    1
    >>> client.status()
    Traceback (most recent call last):
    latent.errors.InvalidArgument: InvalidArgument: The client was closed.
    """

    def __init__(self, address: Union[str, os.PathLike[str], None] = None, restart_timeout: Optional[float] = None) -> None:
        o = _structs.sized(_structs.latent_client_options)
        where = None if address is None else os.fspath(address)
        if where in ("system", "user"):
            o.bus = _structs.BUS_SYSTEM if where == "system" else _structs.BUS_USER
        elif where is not None and where.startswith("/"):
            o.socket = path_bytes("address", where)
        elif where is not None:
            o.bus, o.address = _structs.BUS_ADDRESS, text("address", where)
        if restart_timeout is not None:
            if not 0 <= restart_timeout < 1 << 32:
                raise InvalidArgument("InvalidArgument", f"restart_timeout is {restart_timeout}, expected seconds.")
            o.flags = _structs.CLIENT_NO_RESUME if restart_timeout == 0 else 0
            o.restart_timeout_sec = math.ceil(restart_timeout)
        self._connection = Connection(o)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection: the service cancels this client's jobs, closes its sessions and forgets its private models."""
        self._connection.close()

    def _read(self, function: str) -> Any:
        c = self._connection
        return c.read(getattr(c.library, function), c.client())

    def status(self) -> dict[str, Any]:
        """The service's properties, as org.latentd.Latent1.Manager names them."""
        status: dict[str, Any] = self._read("latent_client_status")
        return status

    def _list(self, what: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._read("latent_client_" + what)
        return found

    def devices(self) -> list[dict[str, Any]]:
        """What the service may compute on: "path" and properties of each, as for all lists."""
        return self._list("devices")

    def models(self) -> list[dict[str, Any]]:
        """Models that this user may see."""
        return self._list("models")

    def jobs(self) -> list[dict[str, Any]]:
        """This user's jobs."""
        return self._list("jobs")

    def sessions(self) -> list[dict[str, Any]]:
        """This user's sessions."""
        return self._list("sessions")

    def regions(self) -> list[dict[str, Any]]:
        """The weight cache, one entry per file."""
        return self._list("regions")

    def cancel(self, path: str) -> None:
        """Cancels any job of this user by its object path."""
        c = self._connection
        c.call(c.library.latent_client_cancel_job, c.client(), text("path", path))

    def drop_cache(self) -> int:
        """Frees all weights that no model uses. How many bytes."""
        c, n = self._connection, c_uint64()
        c.call(c.library.latent_client_drop_cache, c.client(), n)
        return n.value

    def release_gpus(self) -> None:
        """Ends idle workers, and with them what they have on devices; the weights stay in main memory. Busy: jobs run or wait."""
        c = self._connection
        c.call(c.library.latent_client_release_gpus, c.client())

    def load(
        self,
        path_or_name: Union[str, os.PathLike[str]],
        *,
        by_name: bool = False,
        name: Optional[str] = None,
        qkv_order: Optional[str] = None,
        partition: Optional[str] = None,
        numa: Optional[str] = None,
        tokenizer: Optional[str] = None,
    ) -> LoadJob:
        """Loads a checkpoint: files that this process opens, or by_name below the service's ModelPath=. When the job is done: its model.

        >>> import latent
        >>> with latent.Client() as client, client.load("comfy.safetensors", by_name=True) as load:
        ...     load.wait()
        ...     load.model.properties()["Layout"]
        True
        'comfy'
        >>> with latent.Client() as client:
        ...     client.load("no such file.safetensors")
        Traceback (most recent call last):
        latent.errors.NotFound: NotFound: no such file.safetensors does not exist.
        """
        c = self._connection
        o = fill(
            _structs.latent_load_options, {"name": name, "qkv_order": qkv_order, "partition": partition, "numa": numa, "tokenizer": tokenizer}
        )
        f = c.library.latent_model_load_name if by_name else c.library.latent_model_load_path
        return LoadJob(c, c.make(f, c.client(), path_bytes("path_or_name", path_or_name), o))

    def open_pipeline(
        self,
        folder: Union[str, os.PathLike[str]],
        *,
        by_name: bool = False,
        input_bytes: int = 0,
        output_bytes: int = 0,
        compute: Optional[str] = None,
        job_class: Optional[str] = None,
        **split: Any,
    ) -> Session:
        """Loads the four parts of a checkpoint folder (transformer, text_encoder, vae, audio_vae), as load() does, and opens a session for
        Session.render() and all jobs of its denoiser. Waits for the loads. The other arguments are those of Model.open_session()."""
        parts = [os.path.join(os.fspath(folder), p) for p in ("transformer", "text_encoder", "vae", "audio_vae")]
        loads = [self.load(p, by_name=by_name) for p in parts]
        for job in loads:
            job.wait()
        model, conditioner, video_vae, audio_vae = (job.model for job in loads)
        return model.open_session(
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            compute=compute,
            job_class=job_class,
            conditioner=conditioner,
            video_vae=video_vae,
            audio_vae=audio_vae,
            **split,
        )

    def find_model(self, name_or_path: str) -> Model:
        """A model that is there, by its object path or its name."""
        c = self._connection
        return Model(c, c.make(c.library.latent_model_find, c.client(), text("name_or_path", name_or_path)))


class Model:
    """A checkpoint that the service knows. It stays when this object is closed or dropped. After a restart of the service, which sessions with
    a job survive, it raises Restarted: load it again, which reads no file again."""

    def __init__(self, connection: Connection, pointer: int) -> None:
        self._handle: Optional[Handle] = Handle(connection, pointer, connection.library.latent_model_free)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<latent.Model {self.path if self._handle else 'closed'}>"

    def handle(self) -> Handle:
        """For the package."""
        if self._handle is None:
            raise InvalidArgument("InvalidArgument", "The model was closed.")
        return self._handle

    def close(self) -> None:
        """Lets go of the handle; the model stays."""
        self._handle = None

    @property
    def path(self) -> str:
        h = self.handle()
        with h.connection.locked():
            path: str = h.connection.library.latent_model_path(h.pointer).decode()
        return path

    def properties(self) -> dict[str, Any]:
        """Name, State, Layout, Types, Bytes, ... as org.latentd.Latent1.Model names them."""
        h = self.handle()
        properties: dict[str, Any] = h.connection.read(h.connection.library.latent_model_properties, h.pointer)
        return properties

    def unload(self) -> None:
        """Removes it from the service. Busy: sessions use it."""
        h = self.handle()
        h.connection.call(h.connection.library.latent_model_unload, h.pointer)

    def open_session(
        self,
        *,
        input_bytes: int = 0,
        output_bytes: int = 0,
        compute: Optional[str] = None,
        job_class: Optional[str] = None,
        conditioner: Optional[Model] = None,
        video_vae: Optional[Model] = None,
        audio_vae: Optional[Model] = None,
        sparse: Optional[str] = None,
        **split: Any,
    ) -> Session:
        """Opens a session; sizes of its arenas: 0: 64 MiB; see latent.output_bytes(). conditioner, video_vae, audio_vae: the other parts of a
        pipeline, for Session.render(). sparse: sparse attention, METHOD[:key=value,...] as `latentctl --sparse` has it. split: how a step is
        split over ranks, with the same bits: ranks, shares (a list of weights, one per rank), plan, exchange, chunks, gpus (a list of names) of
        latent_session_options in client/latent.h."""
        h = self.handle()
        c = h.connection
        o = fill(
            _structs.latent_session_options,
            {
                "input_bytes": uint("input_bytes", input_bytes),
                "output_bytes": uint("output_bytes", output_bytes),
                "compute": compute,
                "job_class": job_class,
                "conditioner": conditioner,
                "video_vae": video_vae,
                "audio_vae": audio_vae,
                "sparse": sparse,
                **split,
            },
        )
        return Session(c, c.make(c.library.latent_session_open, c.client(), h.pointer, o))


class LoadJob(Job):
    """The load of a model."""

    _model: Optional[Model] = None

    @property
    def model(self) -> Model:
        """The model of a load that is done."""
        h = self._open()
        if self._model is None:
            _ = self.result
            self._model = Model(h.connection, h.connection.make(h.connection.library.latent_job_model, h.pointer))
        return self._model
