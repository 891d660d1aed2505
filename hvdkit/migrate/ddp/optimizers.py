"""Find the optimizers of wrapped models that `facts` cannot recognize within one statement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import libcst as cst

from hvdkit.migrate.ddp.facts import Facts, Optimizer, Wrap, model_name, target_of, without_module
from hvdkit.migrate.nodes import argument, walk

#: Names such as `optimizer`, `self.optim` and `optimizer_G`, but not `optim_params`.
_NAME = re.compile(r"optim(izer)?(_?[A-Za-z0-9]{1,2})?$", re.I)


def resolve(files: Sequence[Facts], models: set[str], is_conditional: bool) -> None:
    """Complete the lists of optimizers in the facts of some files.

    - `optimizer = make_optimizer(model)` takes the place of the optimizer that `make_optimizer`
      makes for its parameter, or in a file that is not given.
    - `optimizer = Lion(model.parameters())` is an optimizer, if no optimizer of torch.optim is
      found.
    - `torch.optim.SGD(groups_of(model))` has the parameters of the model.
    - A single optimizer without a known model is that of the single model.
    - If a name is that of an optimizer, all its values are optimizers.

    Args:
        files: the files of a unit.
        models: the names of the wrapped models.
        is_conditional: whether the files can also run in one process.
    """
    for facts in files:
        for optimizer in facts.optimizers:
            if not optimizer.model and (given := argument(optimizer.call, "params", 0)):
                optimizer.model = _model_in(facts, given.value, models)
    for facts in files:
        for optimizer in list(facts.optimizers):
            if optimizer.model in models and (optimizer.target or not is_conditional):
                continue
            function = facts.script.enclosing(optimizer.call, cst.FunctionDef)
            if function and _add(files, models, function.name.value.__eq__):
                facts.optimizers.remove(optimizer)
    wraps = [wrap for facts in files for wrap in facts.wraps]
    if wraps and not any(facts.optimizers for facts in files):
        _add(files, models, lambda _: True)
    _assume(files, wraps)
    for facts in files:
        _add_other_values(facts)


def _add(files: Sequence[Facts], models: set[str], is_maker: Callable[[str], bool]) -> bool:
    """Add the optimizers that some functions return; return whether there are any.

    Args:
        is_maker: whether a function has the right name.
    """
    found = False
    for facts in files:
        for call, target in _assigned_calls(facts):
            name = (facts.script.dotted(call.func) or "").rpartition(".")[2]
            if not _NAME.search(target) or not is_maker(name):
                continue
            model = _model_of(facts, call, models)
            if model:
                found = True
                if not any(each.call is call for each in facts.optimizers):
                    facts.optimizers.append(Optimizer(call, target, model, is_whole=True))
    return found


def _assigned_calls(facts: Facts) -> Iterator[tuple[cst.Call, str]]:
    """Yield (call, target) for the statements `target = call`, without those for schedulers."""
    for call in facts.script.calls():
        target = target_of(facts.script, call)
        if target and "sched" not in f"{target} {facts.script.source(call.func)}".lower():
            yield call, target


def _model_of(facts: Facts, call: cst.Call, models: set[str]) -> str:
    """Return the model of `make_optimizer(model)` or `model.make_optimizer()`; "" without one."""
    if isinstance(call.func, cst.Attribute):
        owner = without_module(facts.script.dotted(call.func.value) or "")
        if owner in models:
            return owner
    for given in call.args:
        owner = model_name(facts.script, given.value) or _model_in(facts, given.value, models)
        if owner in models:
            return owner
    return ""


def _model_in(facts: Facts, expression: cst.CSTNode, models: set[str]) -> str:
    """Return the model that an expression mentions; "" for none or several."""
    todo, seen, found = [expression], set(), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        owner = facts.script.dotted(node) or ""
        name = next((each for each in models if f"{owner}.".startswith(f"{each}.")), "")
        if name:
            found.add(name)
            continue
        if isinstance(node, cst.Name | cst.Attribute):
            todo += facts.script.values_of(node) or []
        todo += node.children
    return found.pop() if len(found) == 1 else ""


def _assume(files: Sequence[Facts], wraps: Sequence[Wrap]) -> None:
    """Give the only model of the files to their only optimizer, if the optimizer has none."""
    optimizers = [(facts, each) for facts in files for each in facts.optimizers]
    if len(wraps) != 1 or len({each.target for _, each in optimizers}) != 1:
        return
    owner = next(each for each in files if wraps[0] in each.wraps)
    model = wraps[0].target or model_name(owner.script, wraps[0].model)
    if not model or any(each.model or not each.target for _, each in optimizers):
        return
    for facts, optimizer in optimizers:
        optimizer.model = model
        facts.script.note(
            "optimizer",
            optimizer.call,
            f"the parameters of this optimizer are taken to be those of {model}, the only model in "
            f"DistributedDataParallel",
        )


def _add_other_values(facts: Facts) -> None:
    """Add `optimizer = Lion(groups)` beside `optimizer = torch.optim.SGD(groups)`."""
    known = {each.target: each for each in facts.optimizers if each.target}
    calls = [each.call for each in facts.optimizers]
    for call, target in _assigned_calls(facts):
        if target not in known or any(call is each for each in calls):
            continue
        uses = {facts.script.dotted(each) for each in walk(call)}
        if target not in uses:  # not `optimizer = Lookahead(optimizer)`
            facts.optimizers.append(Optimizer(call, target, known[target].model, is_whole=False))
