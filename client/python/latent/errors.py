# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one class per error name of the service."""

from __future__ import annotations


class Error(Exception):
    """What liblatent or the service refused or could not do.

    name: for programs, e.g. "DoesNotFit"; text: for people: what was wrong, what was expected, what to do.
    A name that this package does not know is raised as Error itself.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self.name = name
        self.text = text

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class InvalidArgument(Error):
    """A wrong value, an unknown option, a handle that was closed."""


class InvalidFile(Error):
    """A file breaks a rule of its format."""


class InvalidModel(Error):
    """A well formed file that is no known model."""


class InvalidTensor(Error):
    """An input: its place, type or shape, a NaN or Inf in it."""


class NotFound(Error):
    """No such model, file or job."""


class AccessDenied(Error):
    """This user may not."""


class NotSupported(Error):
    """Not by this version or on this machine."""


class DoesNotFit(Error):
    """Too little memory; the text has the numbers."""


class LimitExceeded(Error):
    """Too many sessions, jobs or bytes of this user."""


class Busy(Error):
    """In use by a session or an unfinished job."""


class Cancelled(Error):
    """The job was cancelled."""


class WorkerCrashed(Error):
    """Workers died of the job, twice."""


class NoWorker(Error):
    """No worker can be started."""


class NoService(Error):
    """The bus or the service is not reachable."""


class NoLibrary(NoService):
    """liblatent itself was not found, so nothing is reachable."""


class Restarted(Error):
    """The service went away, and what was asked cannot be taken up."""


class FileError(Error):
    """Reading a file failed, or there was no answer in time (named IOError by the service)."""


class FileChanged(Error):
    """A file changed while it was read; or one of the model or an adapter did over a restart of the service, and the job cannot go on."""


class Internal(Error):
    """A bug, or no memory in this process."""


_CLASSES: dict[str, type[Error]] = {
    **{c.__name__: c for c in Error.__subclasses__() if c is not FileError},
    "IOError": FileError,
    "NoLibrary": NoLibrary,
}


def error_of(name: str, text: str) -> Error:
    """The exception for an error name, for raising.

    >>> error_of("Busy", "in use")
    Busy('Busy', 'in use')
    >>> error_of("IOError", "short read").name
    'IOError'
    """
    return _CLASSES.get(name, Error)(name, text)
