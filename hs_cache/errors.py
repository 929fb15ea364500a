"""Exceptions of hs_cache.

The tree::

    HiddenStateCacheError
      x  InvalidInputError (ValueError)
           x  ConfigError
      x  ConfigMismatchError
      x  PoolError
           x  PoolTooLargeError (MemoryError)
           x  StaleIncarnationError
      x  ServiceError
           x  ServiceNotRunningError
           x  ServiceTimeoutError (TimeoutError)
           x  StaleRevisionError
      x  CacheClosedError
      x  InstallationError (ImportError)

A miss is a value, never an exception. Infrastructure trouble (`ServiceError` and what is below it) is turned into a
miss or a failed store unless the caller asked for ``strict=True``; everything else is the caller's mistake and is
always raised.

All of them survive pickling: every argument is handed positionally to ``Exception.__init__``, because an exception
    whose constructor takes keyword-only arguments cannot be rebuilt on the other side of a Ray call.
"""


class HiddenStateCacheError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInputError(HiddenStateCacheError, ValueError):
    """An argument is wrong. The message names the argument, what came and what was expected; nothing was changed."""


class ConfigError(InvalidInputError):
    """A configuration key or value is wrong; the message names key and source, and suggests the nearest name."""


class ConfigMismatchError(HiddenStateCacheError):
    """The running service was started with another value for a setting that this client insists on."""


class PoolError(HiddenStateCacheError):
    """The shared memory pool cannot be created, opened or verified."""


class PoolTooLargeError(PoolError, MemoryError):
    """The pool asked for does not fit into the memory that is available; nothing was allocated."""


class StaleIncarnationError(PoolError):
    """A request named a pool that its owner no longer has, because the owner was restarted in between."""


class ServiceError(HiddenStateCacheError):
    """The service could not be reached or did not answer; raised only with ``strict=True`` or when connecting."""


class ServiceNotRunningError(ServiceError):
    """No service of that name runs in this Ray cluster, and none was to be started."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """A call to the service did not return within its deadline."""


class StaleRevisionError(ServiceError):
    """Rows of other weights than the model's current revision were to be stored; they are not taken."""


class CacheClosedError(HiddenStateCacheError):
    """The cache was used after ``close()``, or in a forked child of the process that connected it."""


class InstallationError(HiddenStateCacheError, ImportError):
    """This Python, its Ray or its PyTorch is missing or too old, or an extra is missing; raised when the first name
    that needs it is used."""
