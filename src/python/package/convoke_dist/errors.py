"""The exceptions of convoke. Each has the facts of the error as attributes."""

from __future__ import annotations

import json
from typing import Any

__all__ = [
    "Aborted",
    "BootstrapFailed",
    "ConvokeError",
    "Destroyed",
    "Excluded",
    "Exhausted",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "ProtocolError",
    "StoreFailed",
    "Timeout",
    "Truncated",
]


class ConvokeError(RuntimeError):
    """An error of the runtime.

    `code` names the kind. `ends_group` tells whether the group has ended on all ranks. `rank` is the rank to look at
    first, or None. `facts` has all that the runtime knows, as docs/reference/c.md lists it for each code.
    """

    code = "internal"

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = {"code": self.code} if facts is None else facts

    @property
    def ends_group(self) -> bool:
        """True if the group has ended on all ranks."""
        return bool(self.facts.get("ends_group", False))

    @property
    def rank(self) -> int | None:
        """The rank to look at first, or None."""
        return self.facts.get("rank")

    @property
    def call(self) -> str | None:
        """The call that failed, as `all_reduce(f32, 1000, sum)`."""
        return self.facts.get("call")

    def __reduce__(self):
        return type(self), (str(self), self.facts)


class PeerLost(ConvokeError):
    """A rank has died, cannot be reached, or has left although a call needs it."""

    code = "peer_lost"

    @property
    def address(self) -> str | None:
        """The address of the rank, with its port."""
        return self.facts.get("address")

    @property
    def how(self) -> str:
        """The way in which the rank was lost, as text."""
        return self.facts.get("how", {}).get("text", "")

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the rank, if the launcher reported one."""
        return self.facts.get("how", {}).get("signal")


class Timeout(ConvokeError, TimeoutError):
    """A call was not done in time. `missing` are the ranks that hold it up."""

    code = "timeout"

    @property
    def missing(self) -> list[int]:
        """The ranks that hold up the call."""
        return self.facts.get("missing", [])


class Mismatch(ConvokeError):
    """Two ranks made different calls."""

    code = "mismatch"


class Aborted(ConvokeError):
    """A rank has aborted the group."""

    code = "aborted"


class Exhausted(ConvokeError):
    """A rank has no memory or file descriptors left."""

    code = "exhausted"


class ProtocolError(ConvokeError):
    """Another rank has sent bytes that are not allowed."""

    code = "protocol"


class Truncated(ConvokeError):
    """A message was longer than the array. The group goes on."""

    code = "truncated"


class BootstrapFailed(ConvokeError):
    """The group could not form."""

    code = "bootstrap"


class Destroyed(ConvokeError):
    """The group was closed."""

    code = "destroyed"


class Excluded(ConvokeError):
    """The other ranks have made a smaller group without this one."""

    code = "excluded"


class InvalidArgument(ConvokeError, ValueError):
    """An argument is wrong. Nothing was sent, and the group goes on."""

    code = "invalid_argument"


class StoreFailed(ConvokeError):
    """The store does not answer, or refuses a request."""

    code = "store"


_CLASSES = {made.code: made for made in ConvokeError.__subclasses__()}


def from_json(text: str) -> ConvokeError:
    """Makes the exception that a JSON object of the runtime describes."""
    facts = json.loads(text)
    made = _CLASSES.get(facts.get("code"), ConvokeError)
    return made(facts.get("message", text), facts)
