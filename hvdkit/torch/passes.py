"""Detect the end of a backward pass, and reduce the gradients of all optimizers in it.

A backward pass is a graph task of PyTorch. At its end, PyTorch calls the functions that were queued
during the task. Each re-entrant checkpoint in the pass is a graph task, too; the gradients are
complete at the end of the outermost task.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from horovod.torch.mpi_ops import ProcessSet

from hvdkit.core.coordination import Coordinator, Entry, one_thread
from hvdkit.core.rounds import Rounds


class Listener(Protocol):
    """An optimizer whose parameters receive gradients."""

    #: The number of the optimizer in the order of creation, the same on every rank.
    number: int
    #: Refers to an object that exists until the pass has ended or raised; None between passes.
    running: "weakref.ref[Any] | None"

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose gradients are reduced."""
        ...

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the process set."""
        ...

    @property
    def rounds(self) -> Rounds:
        """The optimizer's rounds."""
        ...

    def end_pass(self) -> bool:
        """Record the end of a pass; return whether its gradients must be reduced now."""
        ...


class GraphTask:
    """A graph task in which gradients of listeners have been accumulated.

    After `watch`, PyTorch has the only reference to it, and drops the reference if the task raises.
    So a dead weak reference to a task that has not ended means that the pass has raised.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.listeners: dict[Listener, None] = {}

    def __call__(self) -> None:
        """End the task."""
        _tasks.pop(self.number, None)
        node = torch._C._current_autograd_node()
        if node is None:
            end(self.listeners)
        else:
            _watch_outer_task(node, self)


_lock = threading.Lock()
_tasks: "weakref.WeakValueDictionary[int, GraphTask]" = weakref.WeakValueDictionary()


def watch(listener: Listener) -> None:
    """Call `listener` at the end of the backward pass that runs in this thread."""
    number = torch._C._current_graph_task_id()
    with _lock:
        task = _tasks.get(number)
        if task is None:
            task = _tasks[number] = GraphTask(number)
            torch.autograd.Variable._execution_engine.queue_callback(task)
        task.listeners[listener] = None
        listener.running = weakref.ref(task)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def end(listeners: Iterable[Listener]) -> None:
    """End the pass that has reached these optimizers: reduce their gradients."""
    errors: list[Exception] = []
    passed = []
    for listener in listeners:
        try:
            if listener.end_pass():
                passed.append(listener)
        except Exception as error:
            errors.append(error)
    reduce(passed, (), errors)


def reduce(
    passed: Iterable[Listener], failed: Iterable[Listener], errors: Iterable[Exception] = ()
) -> None:
    """Enter the rounds of optimizers whose pass has ended or raised.

    Starts the rounds of all process sets and then waits for them, in the same order on all ranks.
    After an error in one process set, the others are completed, because other ranks wait for them.

    Args:
        passed: optimizers whose pass has ended.
        failed: optimizers whose pass has raised.
        errors: earlier errors; the first error of all is raised at the end.
    """
    raised = list(errors)
    failed_rounds = [listener.rounds for listener in failed]
    entered: dict[Coordinator, list[Rounds]] = {}
    for listener in sorted([*passed, *failed], key=_order):
        entered.setdefault(listener.coordinator, []).append(listener.rounds)
    sent: list[tuple[Coordinator, Entry]] = []
    with one_thread():
        for coordinator, rounds in entered.items():
            try:
                of_these = [each for each in rounds if each in failed_rounds]
                sent.append((coordinator, coordinator.send(rounds, of_these)))
            except Exception as error:
                raised.append(error)
        for coordinator, entry in sent:
            try:
                coordinator.wait(entry)
            except Exception as error:
                raised.append(error)
    try:
        if raised:
            raise raised[0]
    finally:
        raised.clear()  # Otherwise an error keeps this frame and its optimizers alive.


def _order(listener: Listener) -> tuple[int, int]:
    return listener.process_set.process_set_id or 0, listener.number


def _watch_outer_task(node: Any, task: GraphTask) -> None:
    """Watch the outer task, after a re-entrant task has ended in `node`.

    A function that is queued here would belong to the inner task. The nodes after `node` run in the
    outer task.
    """

    def watch_again(_: Any) -> None:
        handle.remove()
        for listener in task.listeners:
            watch(listener)

    for following, _ in node.next_functions:
        if following is not None:
            handle = following.register_prehook(watch_again)
            for listener in task.listeners:
                listener.running = weakref.ref(watch_again)
            return
