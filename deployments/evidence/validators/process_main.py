"""The process that :mod:`.process` starts: reads jobs from standard input, answers tags, one at a time."""

import ctypes
import os
import resource
import signal
import sys

import msgspec

from deployments.evidence.validators.base import ParameterError, Tag, judge, unknown
from deployments.evidence.validators.custom import load
from deployments.evidence.validators.frames import Failed, Hello, Ready, receive, send
from deployments.evidence.validators.jobs import Job
from deployments.evidence.validators.registry import Registry

PR_SET_PDEATHSIG = 1


def serve(incoming: int, outgoing: int) -> None:
    """Load, say so, and answer until the other end closes."""
    hello = msgspec.msgpack.decode(receive(incoming), type=Hello)
    # at the end: what the starting process had first (its script's folder, say) must not hide the standard library
    sys.path.extend(entry for entry in hello.import_path if entry not in sys.path)
    limit = hello.memory_mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        registry = Registry(hello.configured)
        for name, function in registry.functions.items():
            try:
                load(function)
            except ValueError as error:
                raise ParameterError(f"{name}: {error}") from None
    except ParameterError as error:
        send(outgoing, Ready(error=str(error)))
        return
    import jsonschema  # noqa: F401  # takes long: now, and not when the first text waits for it

    send(outgoing, Ready())
    while True:
        job = msgspec.msgpack.decode(receive(incoming), type=Job)
        send(outgoing, _tag(registry, job))


def _tag(registry: Registry, job: Job) -> Tag:
    try:
        validator = registry.resolve(job.spec)
    except ParameterError as error:
        return unknown(str(error), "bad_parameters")
    return judge(validator, job.text, job.context)


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a validator that hangs would not see its input end
    if os.getppid() != parent:
        return
    # what validators print must not get between the answers
    outgoing = os.dup(1)
    os.dup2(2, 1)
    try:
        serve(0, outgoing)
    except Failed:  # the other end closed
        sys.exit(0)


if __name__ == "__main__":
    main()
