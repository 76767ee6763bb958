"""Every rank averages its numbers with all others, and then passes a number around a ring. It needs numpy and no torch.

    convoke --standalone --nproc-per-node=4 average.py
"""

import convoke_dist
import numpy as np

world = convoke_dist.init()
values = np.full(1000, world.rank, dtype=np.float32)
world.all_reduce(values, "avg")
if world.rank == 0:
    print(f"average {values[0]:g}")

# Both operations progress at once, so the ring does not wait for itself.
left = np.zeros(1, dtype=np.int64)
received = world.recv(left, (world.rank - 1) % world.size, async_op=True)
world.send(np.array([world.rank]), (world.rank + 1) % world.size)
received.wait()

try:
    total = sum(rank["left"] for rank in world.all_gather_object({"left": int(left[0])}))
except convoke_dist.PeerLost as error:
    # A rank that dies is named to all others within milliseconds.
    raise SystemExit(f"rank {error.rank} at {error.address} is gone: {error.how}") from error
if world.rank == 0:
    print(f"the ranks to the left add up to {total}")
