"""Processes that measure side by side: who goes first, and what a failure leaves."""

import threading
import time

import pytest

from scripts.calibrate_lib.item_sets import load_items
from scripts.calibrate_lib.knobs import LOSSLESS, REFERENCES, sweep
from scripts.calibrate_lib.pool import Pool
from scripts.calibrate_lib.quality import Task
from scripts.calibrate_lib.store import Cell

SETTINGS = [REFERENCES[0], *sweep("nkl", [0.1, 0.2], {}), REFERENCES[1]]
WAIT_S = 30.0


class Fake:
    def __init__(self, name: str) -> None:
        self.name, self.stopped, self.loaded = name, threading.Event(), False

    def load(self) -> None:
        self.loaded = True

    def stop(self) -> None:
        self.stopped.set()


def tasks() -> list[Task]:
    sets = {name: load_items(name, 8, 1) for name in ("arithmetic", "prose", "copy")}
    return [Task(f"{name} {s.name}", s, items) for name, items in sets.items() for s in SETTINGS]


def cell(task: Task) -> Cell:
    return Cell(setting=task.setting.name, set=task.items[0].set, answers=[])


def test_lossless_answers_are_there_before_anything_is_compared_with_them() -> None:
    pool = Pool([Fake("a"), Fake("b")])
    together = threading.Barrier(2)  # passed only if both processes work at the same time
    done: list[Cell] = []
    seen: list[tuple[bool, int]] = []
    users: set[str] = set()

    def measure(task: Task, process: Fake) -> Cell:
        users.add(process.name)
        if task.setting.name == LOSSLESS and task.items[0].set != "copy":
            together.wait(WAIT_S)
        seen.append((task.setting.name == LOSSLESS, sum(c.setting == LOSSLESS for c in done)))
        return cell(task)

    pool.each(Fake.load)
    pool.run(tasks(), measure, lambda _, made: done.append(made))
    pool.stop()
    assert users == {"a", "b"}
    assert sorted((c.set, c.setting) for c in done) == sorted((t.items[0].set, t.setting.name) for t in tasks())
    assert all(lossless or known == 3 for lossless, known in seen)


def test_a_failure_ends_the_run_and_keeps_what_was_done() -> None:
    processes = [Fake("a"), Fake("b")]
    pool = Pool(processes)
    done: list[Cell] = []

    def measure(task: Task, process: Fake) -> Cell:
        if len(done) >= 4:
            raise RuntimeError("the engine is gone")
        time.sleep(0.001)
        return cell(task)

    with pytest.raises(RuntimeError, match="the engine is gone"):
        pool.run(tasks(), measure, lambda _, made: done.append(made))
    pool.stop()
    assert 4 <= len(done) < len(tasks())
    assert all(process.stopped.is_set() for process in processes)


def test_stopping_does_not_wait_for_answers_that_will_not_come() -> None:
    process = Fake("a")
    pool = Pool([process])
    started = threading.Event()

    def measure(task: Task, asked: Fake) -> Cell:
        started.set()
        if not asked.stopped.wait(WAIT_S):
            pytest.fail("nobody stopped it")
        raise RuntimeError("it ended")

    outcome: list[BaseException] = []

    def run() -> None:
        try:
            pool.run(tasks(), measure, lambda *_: None)
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(WAIT_S)
    pool.stop()
    thread.join(WAIT_S)
    assert [str(error) for error in outcome] == ["it ended"]
