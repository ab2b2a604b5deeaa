"""From the section ``args.evidence.validators`` to a running :class:`Validation`."""

from collections.abc import Callable

from deployments.chain.faults import FaultPolicy
from deployments.config.validators import Validators
from deployments.evidence.validators.embedded import EmbeddedQueue
from deployments.evidence.validators.registry import Registry
from deployments.evidence.validators.validation import Validation


def build_validation(settings: Validators, faults: FaultPolicy, tagged: Callable[[str, str, str], None]) -> Validation:
    """Load what is configured and start its process. ``tagged`` hears of tags, see :class:`Validation`.

    Raises:
        ParameterError: naming the validator that cannot be loaded.
        ValueError: the Redis URL cannot be read.
    """
    registry = Registry(settings.configured)
    if settings.redis is not None:
        from deployments.evidence.validators.redis_stream import RedisStream  # only who uses it needs the client

        address, stream = settings.redis.address(), settings.redis.stream
        elsewhere = RedisStream(address, faults, stream=stream, queue=settings.redis.queue)
        return Validation(registry, elsewhere, faults, cache=settings.cache, tagged=tagged)
    queue = embedded_queue(settings, registry, faults)
    return Validation(registry, queue, faults, cache=settings.cache, tagged=tagged)


def embedded_queue(settings: Validators, registry: Registry, faults: FaultPolicy) -> EmbeddedQueue:
    """A started queue of this process' own. Raises as :func:`build_validation` does."""
    queue = EmbeddedQueue(
        registry, faults, workers=settings.workers, queue=settings.queue, memory_mib=settings.memory_mib
    )
    queue.start()
    return queue
