"""Process groups, collectives and a launcher for distributed programs.

    import numpy, convoke_dist

    world = convoke_dist.init()            # the launcher's job; without a launcher, a world of one rank
    values = numpy.full(1000, world.rank, dtype=numpy.float32)
    world.all_reduce(values, "avg")

`convoke_dist.torch` has the backend "convoke" of torch.distributed, which torch finds by itself.
`convoke_dist.launch` runs a function as several ranks on this machine. `convoke` in PATH, or
`python -m convoke_dist.run`, starts scripts on one or many machines, with torchrun's flags.
"""

from . import errors, group, launch as _launch
from ._core import Store, StoreServer, __version__
from .errors import *  # noqa: F403
from .group import *  # noqa: F403
from .launch import *  # noqa: F403

__all__ = [*errors.__all__, *group.__all__, *_launch.__all__, "Store", "StoreServer", "__version__"]
