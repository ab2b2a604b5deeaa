"""How a target replica ends whose engine has died."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


async def leave_with_engine(dead: Callable[[], bool], leave: Callable[[], None], watch_s: float) -> None:
    """Call ``leave`` once ``dead``, noticed within ``watch_s``; so much later that streams have said that they failed.

    Serve's own check needs three failures, ten seconds apart. Until then such a replica fails requests faster than others
    answer them, so that it looks the least busy and is sent most of them.
    """
    while not dead():
        await asyncio.sleep(watch_s)
    logger.error("the engine has died, and this replica leaves with it; Serve starts another")
    await asyncio.sleep(watch_s)
    leave()
