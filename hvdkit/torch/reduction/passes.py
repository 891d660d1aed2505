"""Detect the end of a backward pass, and reduce the gradients of all optimizers in it.

A backward pass is a graph task of PyTorch, and so is each re-entrant checkpoint inside it. At the
end of a graph task, PyTorch calls the functions that were queued during this task. The gradients
are complete at the end of the outermost task.
"""

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from hvdkit.torch.reduction.coordination import Coordinator
from hvdkit.torch.reduction.headers import Entry
from hvdkit.torch.reduction.rounds import Rounds

#: An `hvdkit.torch.reduction.optimizer_reducer.OptimizerReducer`, whose module imports this one.
Reducer = Any


class Reducers:
    """The reducers of all optimizers of a process, in the order of their creation.

    Attributes:
        lock: hold it while entering rounds. Otherwise two threads could send headers of one name.
        passes: the number of passes, for each optimizer that they have reached, since the last step
            or `zero_grad()` of any optimizer.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.passes = 0
        self._count = itertools.count()
        self._reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()

    def add(self, reducer: Reducer) -> int:
        """Add a reducer; return its place in the order of creation."""
        self._reducers.add(reducer)
        return next(self._count)

    def __iter__(self) -> Iterator[Reducer]:
        return iter(sorted(self._reducers, key=lambda each: each.number))


#: The reducers of this process.
reducers = Reducers()


class GraphTask:
    """A graph task in which gradients of optimizers were accumulated.

    After `watch` PyTorch has the only reference, and drops it when the task raises. So the pass has
    raised if a weak reference is dead and the reducers were not called.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        # The values keep the optimizers alive until the pass ends.
        self.reducers: dict[Reducer, Any] = {}

    def __call__(self) -> None:
        """Handle the end of the task."""
        _tasks.pop(self.number, None)
        node = torch._C._current_autograd_node()
        if node is None:
            end_pass(self.reducers)
        else:
            _watch_outer_task(node, self)


_lock = threading.Lock()
_tasks: "weakref.WeakValueDictionary[int, GraphTask]" = weakref.WeakValueDictionary()


def watch(reducer: Reducer) -> None:
    """Call `reducer` at the end of the backward pass that runs in this thread."""
    number = torch._C._current_graph_task_id()
    with _lock:
        task = _tasks.get(number)
        if task is None:
            task = _tasks[number] = GraphTask(number)
            torch.autograd.Variable._execution_engine.queue_callback(task)
        task.reducers[reducer] = reducer.optimizer()
        reducer.graph_task = weakref.ref(task)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def end_pass(reached: Iterable[Reducer]) -> None:
    """Reduce the gradients of the optimizers that a backward pass has reached."""
    errors: list[Exception] = []
    passed: list[Reducer] = []
    failed: list[Reducer] = []
    for reducer in reached:
        try:
            if reducer.end_pass():
                # A dropped pass fails the reduction that would include its gradients.
                (failed if reducer.window.counts.dropped else passed).append(reducer)
        except Exception as error:
            errors.append(error)
    reduce(passed, failed, errors)


def reduce(
    passed: Iterable[Reducer],
    failed: Iterable[Reducer],
    errors: Iterable[Exception] = (),
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
    failed_rounds = [reducer.rounds for reducer in failed]
    entered: dict[Coordinator, list[Rounds]] = {}
    reached = sorted([*passed, *failed], key=_order)
    for reducer in reached:
        entered.setdefault(reducer.coordinator, []).append(reducer.rounds)
    sent: list[tuple[Coordinator, Entry]] = []
    with reached[0].siblings.lock if reached else nullcontext():
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


def _order(reducer: Reducer) -> tuple[int, int]:
    return reducer.settings.process_set.process_set_id or 0, reducer.number


def _watch_outer_task(node: Any, task: GraphTask) -> None:
    """Watch the outer task after a re-entrant task, which has just ended inside `node`.

    A function that is queued here would belong to the inner task. The nodes after `node` run in the
    outer task, so queue it in the first one that runs. With `backward(inputs=...)`, some do not.
    """
    handles: list[Any] = []

    def watch_again(_: Any) -> None:
        for handle in handles:
            handle.remove()
        for reducer in task.reducers:
            watch(reducer)

    for following, _ in node.next_functions:
        if following is not None:
            handles.append(following.register_prehook(watch_again))
    for reducer in task.reducers:
        reducer.graph_task = weakref.ref(watch_again)
