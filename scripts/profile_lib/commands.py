"""The child's end of :class:`scripts.bench_lib.child.Child`: obeys JSON lines until standard input closes."""

import json
import os
import select
import traceback
from typing import TextIO


def serve(program: object) -> None:
    """``{"command": NAME, ...}`` calls that public method of ``program``; the dict it returns is the answer.

    An exception is answered as ``{"error": TEXT}`` and its trace goes to the log.
    """
    answers = _private_stdout()
    with open(0, "rb", buffering=0, closefd=False) as lines:  # a line read ahead would be invisible to told()
        for line in lines:
            command = json.loads(line)
            try:
                answer = getattr(program, command.pop("command"))(**command)
            except Exception as error:  # the parent decides what to do without this child
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            print(json.dumps(answer), file=answers, flush=True)


def told() -> bool:
    """Does the next line wait (or has standard input closed)? For a method that works until then."""
    return bool(select.select([0], [], [], 0)[0])


def _private_stdout() -> TextIO:
    """Keep the pipe to the parent for answers; whatever else prints goes to stderr, which is the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers
