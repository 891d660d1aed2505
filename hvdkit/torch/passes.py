"""Detect the end of a backward pass, and reduce the gradients of all optimizers in it.

A backward pass is a graph task of PyTorch, and so is each re-entrant checkpoint inside it. At the
end of a graph task, PyTorch calls the functions that were queued during this task. The gradients
are complete at the end of the outermost task.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from horovod.torch.mpi_ops import ProcessSet

from hvdkit.core.coordination import Coordinator, entry_lock
from hvdkit.core.headers import Entry
from hvdkit.core.rounds import Rounds


class Listener(Protocol):
    """An optimizer whose parameters get gradients."""

    #: The place in the order of creation, the same on every rank.
    number: int
    #: Refers to an object that is freed when the pass ends or raises; None between passes.
    graph_task: "weakref.ref[Any] | None"

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
        """The optimizer's reduction rounds."""
        ...

    @property
    def pass_dropped(self) -> bool:
        """Whether an earlier pass was dropped whose gradients this pass would reduce."""
        ...

    def end_pass(self) -> bool:
        """Record that the pass has ended; return whether to reduce its gradients now."""
        ...


class GraphTask:
    """A graph task in which gradients of listeners were accumulated.

    After `watch` PyTorch has the only reference, and drops it when the task raises. So the pass has
    raised if a weak reference is dead and the listeners were not called.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.listeners: dict[Listener, None] = {}

    def __call__(self) -> None:
        """Handle the end of the task."""
        _tasks.pop(self.number, None)
        node = torch._C._current_autograd_node()
        if node is None:
            end_pass(self.listeners)
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
        listener.graph_task = weakref.ref(task)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def end_pass(listeners: Iterable[Listener]) -> None:
    """Reduce the gradients of the optimizers that a backward pass has reached."""
    errors: list[Exception] = []
    passed: list[Listener] = []
    failed: list[Listener] = []
    for listener in listeners:
        try:
            if listener.end_pass():
                (failed if listener.pass_dropped else passed).append(listener)
        except Exception as error:
            errors.append(error)
    reduce(passed, failed, errors)


def reduce(
    passed: Iterable[Listener], failed: Iterable[Listener], errors: Iterable[Exception] = ()
) -> None:
    """Enter and complete the rounds of optimizers whose pass has ended.

    Send the buckets of all process sets, then wait for them, in the same order on all ranks. After
    an error in one process set, complete the others, because other ranks wait in them. If the
    buckets cannot be sent, for instance for lack of memory, it is as if the pass had raised.

    Args:
        passed: optimizers whose pass has ended.
        failed: optimizers whose pass raised or was dropped.
        errors: earlier errors; the first error is raised at the end.
    """
    raised = list(errors)
    failed_rounds = [listener.rounds for listener in failed]
    entered: dict[Coordinator, list[Rounds]] = {}
    for listener in sorted([*passed, *failed], key=_order):
        entered.setdefault(listener.coordinator, []).append(listener.rounds)
    sent: list[tuple[Coordinator, Entry]] = []
    with entry_lock:
        for coordinator, rounds in entered.items():
            failed_here = [each for each in rounds if each in failed_rounds]
            for given_up in (failed_here, rounds):
                try:
                    sent.append((coordinator, coordinator.send(rounds, given_up)))
                    break
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
        raised.clear()  # an error would keep this frame alive, and its optimizers


def _order(listener: Listener) -> tuple[int, int]:
    return listener.process_set.process_set_id or 0, listener.number


def _watch_outer_task(node: Any, task: GraphTask) -> None:
    """Watch the outer task after a re-entrant task, which has just ended inside `node`.

    A function that is queued here would belong to the inner task. The nodes after `node` run in the
    outer task, so queue it there.
    """

    def watch_again(_: Any) -> None:
        handle.remove()
        for listener in task.listeners:
            watch(listener)

    for following, _ in node.next_functions:
        if following is not None:
            handle = following.register_prehook(watch_again)
            for listener in task.listeners:
                listener.graph_task = weakref.ref(watch_again)
            return
