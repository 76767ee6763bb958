"""Process groups, collectives and a launcher for distributed programs.

    import numpy, convoke_dist

    world = convoke_dist.init()            # the launcher's job; without a launcher, a world of one rank
    values = numpy.full(1000, world.rank, dtype=numpy.float32)
    world.all_reduce(values, "avg")

`convoke_dist.torch` has the backend "convoke" of torch.distributed, which torch finds by itself.
`convoke_dist.launch` runs a function as several ranks on this machine. `convoke` in PATH, or
`python -m convoke_dist.run`, starts scripts on one or many machines, with torchrun's flags.
"""

from ._core import Store, StoreServer, __version__
from .errors import (
    Aborted,
    BootstrapFailed,
    ConvokeError,
    Destroyed,
    Excluded,
    Exhausted,
    InvalidArgument,
    Mismatch,
    PeerLost,
    ProtocolError,
    StoreFailed,
    Timeout,
    Truncated,
)
from .group import Group, Message, Work, init
from .launch import LaunchError, launch

__all__ = [
    "Aborted",
    "BootstrapFailed",
    "ConvokeError",
    "Destroyed",
    "Excluded",
    "Exhausted",
    "Group",
    "InvalidArgument",
    "LaunchError",
    "Message",
    "Mismatch",
    "PeerLost",
    "ProtocolError",
    "Store",
    "StoreFailed",
    "StoreServer",
    "Timeout",
    "Truncated",
    "Work",
    "__version__",
    "init",
    "launch",
]
