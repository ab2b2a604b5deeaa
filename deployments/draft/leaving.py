"""How a draft replica ends without any target waiting for it."""

import time
from collections.abc import Callable

LOOK_S = 0.05


def linger(
    messages: Callable[[], float],
    quiet_s: float,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until no message came for ``quiet_s``: no target counts on answers any more. False when ``limit_s`` ran out.

    Serve names a replica that is to end no longer, and targets ask for the replicas there are once in a discovery period. A
    draft that stops answering before that costs each of them a round's deadline; one that answers until then costs nothing.
    ``messages`` is a count that grows.
    """
    end = clock() + limit_s
    last, since = messages(), clock()
    while (now := clock()) < end:
        if (count := messages()) != last:
            last, since = count, now
        elif now - since >= quiet_s:
            return True
        sleep(LOOK_S)
    return False
