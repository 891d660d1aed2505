"""Facts about the use of torch.distributed in a script."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst

from hvdkit.migrate.nodes import argument
from hvdkit.migrate.script import Script

DIST = "torch.distributed."
WRAPPERS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
SAMPLERS = (
    "torch.utils.data.DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler",
)
#: Parts of torch.distributed that need no process group.
HARMLESS = (
    "torch.distributed.is_available",
    "torch.distributed.is_nccl_available",
    "torch.distributed.is_gloo_available",
    "torch.distributed.is_mpi_available",
    "torch.distributed.get_default_backend_for_device",
    "torch.distributed.elastic.multiprocessing.errors",
    # The type of an annotation.
    "torch.distributed.ProcessGroup",
)
#: Module that hvdkit cannot replace -> what to do. A script that uses such a module is left alone.
UNSUPPORTED = {
    "torch.distributed.fsdp": "hvdkit has no FSDP: every rank has all parameters. Keep this script "
    "on torchrun, or use a model that fits on one device",
    "torch.distributed._composable": "hvdkit has no FSDP: every rank has all parameters",
    "torch.distributed.optim": "hvdkit does not shard optimizer state: replace "
    "ZeroRedundancyOptimizer(parameters, optimizer_class=C, …) by C(parameters, …), and remove "
    "consolidate_state_dict()",
    "torch.distributed.algorithms.ddp_comm_hooks": "replace the hook by compression= of "
    'hvd.DistributedOptimizer, such as compression="fp16"',
    "torch.distributed.algorithms.join": "call hvd.join() after the loop, see docs/migrating.md",
    "torch.distributed.rpc": "hvdkit has no RPC",
    "torch.distributed.pipelining": "hvdkit has no pipeline parallelism",
    "torch.distributed.pipeline": "hvdkit has no pipeline parallelism",
    "torch.distributed.tensor": "hvdkit has no tensor parallelism",
    "torch.distributed.device_mesh": "hvdkit has no device meshes: use hvd.ProcessSet",
    "torch.distributed.checkpoint": "save on rank 0, or use hvd.Checkpointer",
    "apex.parallel": "use torch.nn.parallel.DistributedDataParallel first, or wrap the optimizer "
    "with hvd.DistributedOptimizer by hand",
}
#: Arguments of DDP that hvdkit does not need.
_DROPPED = {
    "module",
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "find_unused_parameters",
    "bucket_cap_mb",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
}
#: The attribute of a model that turns the reduction of the next pass on or off.
GRADIENT_SYNC = "require_backward_grad_sync"
#: Methods of a model that return the model itself.
_MOVES = ("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "train", "eval")
_HOOKS = ("register_comm_hook", "_set_static_graph", GRADIENT_SYNC)


@dataclass
class Wrap:
    """A model that DDP wraps: `target = DDP(model)`. `target` is "" in other statements."""

    call: cst.Call
    model: cst.BaseExpression
    target: str


@dataclass
class Optimizer:
    """An optimizer of torch.optim, for the parameters of `model` ("" if they are not known)."""

    call: cst.Call
    target: str
    model: str
    #: The code of its first argument is `model.parameters()`.
    is_whole: bool


@dataclass
class Facts:
    """The uses of torch.distributed in one script."""

    script: Script
    inits: list[cst.Call] = field(default_factory=list)
    wraps: list[Wrap] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    spawns: list[cst.Call] = field(default_factory=list)
    #: (node, why the script is not converted)
    blockers: list[tuple[cst.CSTNode, str]] = field(default_factory=list)
    #: (node, full name) of each use of torch.distributed or DDP
    uses: list[tuple[cst.CSTNode, str]] = field(default_factory=list)
    #: Whether an `if` decides if ranks are started or a model is wrapped.
    is_conditional: bool = False

    @property
    def is_distributed(self) -> bool:
        """Whether the script uses torch.distributed or DDP."""
        return bool(self.uses or self.wraps or self.blockers)


def gather(script: Script) -> Facts:
    """Return what a script does with torch.distributed."""
    facts = Facts(script)
    for node, name in script.uses(cst.Attribute, cst.Name):
        if isinstance(script.parent(node), cst.Attribute):
            continue  # a part of a longer name
        unsupported = next((each for each in UNSUPPORTED if _within(name, each)), None)
        if unsupported:
            facts.blockers.append((node, UNSUPPORTED[unsupported]))
        elif (name.startswith(DIST) and not name.startswith(HARMLESS)) or name in WRAPPERS:
            facts.uses.append((node, name))
    for node in script.all(cst.ImportFrom):
        _star_import(facts, node)
    for call in script.calls():
        _call(facts, call)
    for attribute in script.attributes():
        if attribute.attr.value == GRADIENT_SYNC and assignment_of(script, attribute):
            continue
        if attribute.attr.value in _HOOKS and facts.uses:
            reason = f"hvdkit has no {attribute.attr.value}"
            if attribute.attr.value == "register_comm_hook":
                reason = UNSUPPORTED["torch.distributed.algorithms.ddp_comm_hooks"]
            facts.blockers.append((attribute, reason))
    facts.is_conditional = any(
        _condition(script, call) for call in [*facts.inits, *(wrap.call for wrap in facts.wraps)]
    ) or _called_conditionally(facts)
    return facts


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _star_import(facts: Facts, node: cst.ImportFrom) -> None:
    if isinstance(node.names, cst.ImportStar) and node.module:
        module = facts.script.dotted(node.module) or ""
        if _within(module, "torch.distributed") or _within(module, "torch.nn.parallel"):
            facts.blockers.append((node, f"import the names of {module} instead of *"))


def _call(facts: Facts, call: cst.Call) -> None:
    script = facts.script
    name = script.name_of(call.func) or ""
    if name == DIST + "init_process_group":
        facts.inits.append(call)
        if not script.is_statement(call):
            facts.blockers.append((call, "call init_process_group() as a statement of its own"))
    elif name in WRAPPERS:
        _wrap(facts, call)
    elif name == "torch.multiprocessing.spawn" or name.startswith("torch.multiprocessing.spawn."):
        facts.spawns.append(call)
    elif re.fullmatch(r"torch\.optim\.((?!lr_scheduler|swa_utils)\w+\.)*[A-Z]\w*", name):
        _optimizer(facts, call, name)


def _wrap(facts: Facts, call: cst.Call) -> None:
    script = facts.script
    model = argument(call, "module", 0)
    others = {each.keyword.value for each in call.args if each.keyword} - _DROPPED
    if model is None or any(each.star for each in call.args):
        facts.blockers.append((call, "give DistributedDataParallel the model as an argument"))
    elif others:
        facts.blockers.append((call, f"hvdkit has no {sorted(others)[0]}= of DDP"))
    else:
        facts.wraps.append(Wrap(call, model.value, target_of(script, call)))


def _optimizer(facts: Facts, call: cst.Call, name: str) -> None:
    script = facts.script
    if name.endswith(".LBFGS"):
        facts.blockers.append((call, "hvd.DistributedOptimizer does not take LBFGS"))
        return
    given = argument(call, "params", 0)
    model, is_whole = "", False
    if given is not None:
        parameters = given.value
        if isinstance(parameters, cst.Call) and not parameters.args:
            model, is_whole = _owner(script, parameters), True
        if not model:
            is_whole = False
            model = _first_owner(script, parameters)
    facts.optimizers.append(Optimizer(call, target_of(script, call), model, is_whole))


def _owner(script: Script, call: cst.Call) -> str:
    """Return "model" for `model.parameters()` and `model.module.parameters()`."""
    function = call.func
    if not isinstance(function, cst.Attribute) or function.attr.value not in (
        "parameters",
        "named_parameters",
    ):
        return ""
    return without_module(script.dotted(function.value) or "")


def _first_owner(script: Script, parameters: cst.CSTNode) -> str:
    """Return the model whose parameters an expression contains; "" for none or several."""
    todo, seen, owners = [parameters], set(), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, cst.Call) and (owner := _owner(script, node)):
            # `model.head.parameters()` are parameters of `model`.
            parts = owner.split(".")
            owners.add(".".join(parts[:2] if parts[0] == "self" else parts[:1]))
        elif isinstance(node, cst.Name | cst.Attribute):
            todo += script.values_of(node) or []
        todo += node.children
    return owners.pop() if len(owners) == 1 else ""


def model_name(script: Script, node: cst.BaseExpression) -> str:
    """Return "model" for `model`, `model.module` and `model.to(device)`; "" for others."""
    while isinstance(node, cst.Call):
        function = node.func
        if not isinstance(function, cst.Attribute) or function.attr.value not in _MOVES:
            return ""
        node = function.value
    return without_module(script.dotted(node) or "")


def without_module(name: str) -> str:
    """Return the name of a model without DDP's `.module`."""
    return name.removesuffix(".module")


def assignment_of(script: Script, target: cst.CSTNode) -> cst.Assign | None:
    """Return the statement `target = value`; None if the node is not the only target of one."""
    statement = script.parent(script.parent(target))
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    return statement if statement.targets[0].target is target else None


def target_of(script: Script, call: cst.Call) -> str:
    """Return "x" if the call is the value of a statement `x = call`; otherwise ""."""
    statement = script.parent(call)
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return ""
    line = script.parent(statement)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return ""
    return script.dotted(statement.targets[0].target) or ""


def _condition(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is in an `if` other than `if __name__ == "__main__"`."""
    return any(
        isinstance(each, cst.If | cst.IfExp) and "__name__" not in script.source(each.test)
        for each in script.around(node)
    )


def _called_conditionally(facts: Facts) -> bool:
    """Return whether a function with init_process_group() is called in an `if`."""
    script = facts.script
    names = {
        function.name.value
        for init in facts.inits
        if (function := script.enclosing(init, cst.FunctionDef))
    }
    return any(
        script.dotted(call.func) in names and _condition(script, call) for call in script.calls()
    )
