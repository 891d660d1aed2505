"""Rules about TensorFlow 1 in scripts for TensorFlow 2."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit.migrate.rule import Advice, Change, Findings, Note, Rules, lower
from hvdkit.migrate.script import Script

_SETUP = "import tensorflow as tf\nfrom keras import backend as K\nimport hvdkit.keras as hvd\n"
_CONFIG = re.compile(r"tensorflow\.(compat\.v1\.)?ConfigProto")
_SESSION = re.compile(r"tensorflow\.(compat\.v1\.)?(Interactive)?Session")
_SET_SESSION = re.compile(
    r"(tensorflow\.(python\.)?keras|keras|tensorflow\.compat\.v1\.keras)"
    r"\.backend\.(tensorflow_backend\.)?set_session"
)

RULES: Rules[Script] = Rules(_SETUP)
rule = RULES.add


@rule(
    "TensorFlow 2 has no sessions. hvd.init() chooses the GPU of the local rank.",
    before="config = tf.ConfigProto()\n"
    "config.gpu_options.allow_growth = True\n"
    "config.gpu_options.visible_device_list = str(hvd.local_rank())\n"
    "K.set_session(tf.Session(config=config))",
    after='for gpu in tf.config.list_physical_devices("GPU"):\n'
    "    tf.config.experimental.set_memory_growth(gpu, True)",
)
def pinned_gpu(script: Script) -> Findings:
    for node in script.all(cst.Module, cst.IndentedBlock):
        body = [each for each in getattr(node, "body", ()) if isinstance(each, cst.CSTNode)]
        for i, line in enumerate(body):
            config = _assigned_config(script, line)
            if config:
                yield from _pinned(script, body[i:], config)


def _assigned_config(script: Script, line: cst.CSTNode) -> str:
    """Return "config" for `config = tf.ConfigProto()`."""
    statement = _only(line)
    if not isinstance(statement, cst.Assign) or not isinstance(statement.value, cst.Call):
        return ""
    if statement.value.args or not _CONFIG.fullmatch(script.name_of(statement.value.func) or ""):
        return ""
    target = statement.targets[0].target
    return target.value if isinstance(target, cst.Name) and len(statement.targets) == 1 else ""


def _only(line: cst.CSTNode) -> cst.CSTNode | None:
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        return line.body[0]
    return None


def _pinned(script: Script, lines: list[cst.CSTNode], config: str) -> Findings:
    """Replace the lines from `config = …` to `set_session`, if all are understood."""
    grows, used = False, [lines[0]]
    for line in lines[1:]:
        code = script.source(line).strip().splitlines()[-1].strip()
        if re.match(rf"{config}\.gpu_options\.visible_device_list\s*=.*local_rank\(\)", code):
            used.append(line)
        elif re.match(rf"{config}\.gpu_options\.allow_growth\s*=\s*True", code):
            used.append(line)
            grows = True
        elif re.match(rf"{config}\.allow_soft_placement\s*=", code):
            used.append(line)
        elif _is_set_session(script, line, config):
            used.append(line)
            break
        else:
            return
    else:
        return
    uses = list(script.variables(config))
    if len(uses) != len(used) or "tensorflow" not in script.imported or _tf(script) is None:
        return
    yield Change(lines[0])
    new = cst.parse_statement(
        f'for gpu in {_tf(script)}.config.list_physical_devices("GPU"):\n'
        f"    {_tf(script)}.config.experimental.set_memory_growth(gpu, True)\n"
    )
    first, *others = used
    if grows and not script.binds("gpu"):
        script.edit(first, lambda each: new.with_changes(leading_lines=each.leading_lines))
    elif grows:
        new = new.with_changes(target=cst.Name("device"))  # rare: the script has a name `gpu`
        script.edit(first, _renamed, new)
    else:
        script.remove(first)
    for line in others:
        script.remove(line)


def _renamed(line: cst.CSTNode, loop: cst.CSTNode) -> cst.CSTNode:
    code = cst.Module([loop]).code.replace("(gpu,", "(device,")  # type: ignore[list-item]
    return cst.parse_statement(code).with_changes(leading_lines=line.leading_lines)  # type: ignore[attr-defined]


def _tf(script: Script) -> str | None:
    """Return the script's name for tensorflow."""
    for _, name, alias in script.imported_names(cst.Import):
        if name == "tensorflow":
            return alias.evaluated_alias or name
    return None


def _is_set_session(script: Script, line: cst.CSTNode, config: str) -> bool:
    """Return whether a line is `K.set_session(tf.Session(config=config))`."""
    statement = _only(line)
    call = statement.value if isinstance(statement, cst.Expr) else None
    if not isinstance(call, cst.Call) or len(call.args) != 1:
        return False
    session = call.args[0].value
    return (
        _SET_SESSION.fullmatch(script.name_of(call.func) or "") is not None
        and isinstance(session, cst.Call)
        and _SESSION.fullmatch(script.name_of(session.func) or "") is not None
        and [script.source(each.value) for each in session.args] == [config]
    )


#: Names of TensorFlow 1 that tf.compat.v1 has, and that do not need a graph.
_COMPATIBLE = frozenset(
    [
        "app",
        "assign",
        "assign_add",
        "decode_raw",
        "div",
        "enable_eager_execution",
        "flags",
        "gfile",
        "image.resize_images",
        "log",
        "logging",
        "parse_single_example",
        "python_io",
        "random.set_random_seed",
        "random_normal",
        "random_uniform",
        "read_file",
        "set_random_seed",
        "sparse_tensor_to_dense",
        "to_double",
        "to_float",
        "to_int32",
        "to_int64",
    ]
)
#: Names of TensorFlow 1 that belong to graphs and sessions.
_GRAPH = re.compile(
    r"tensorflow\.(compat\.v1\.)?"
    r"(Session|InteractiveSession|ConfigProto|GPUOptions|GraphOptions|OptimizerOptions|placeholder|"
    r"get_variable|variable_scope|global_variables|global_variables_initializer|"
    r"trainable_variables|reset_default_graph|local_variables_initializer|layers|contrib|"
    r"estimator|disable_eager_execution|disable_v2_behavior|"
    r"train\.(\w*Optimizer|MonitoredTrainingSession|Saver|StopAtStepHook|LoggingTensorHook|"
    r"get_or_create_global_step|create_global_step|get_global_step|SessionRunHook)|"
    r"keras\.backend\.(set_session|get_session))"
)
_KERAS_GRAPH = re.compile(r"keras\.backend\.(tensorflow_backend\.)?(set_session|get_session)")


@rule(
    "TensorFlow 2 has the name in tf.compat.v1.",
    before="tf.set_random_seed(1)",
    after="tf.compat.v1.set_random_seed(1)",
)
def compatible_names(script: Script) -> Findings:
    for attribute, name in script.uses():
        short = name.removeprefix("tensorflow.")
        if short in _COMPATIBLE and script.dotted(attribute) == f"{_tf(script)}.{short}":
            yield script.put(attribute, cst.parse_expression(f"{_tf(script)}.compat.v1.{short}"))


@rule(
    "TensorFlow 2 has no placeholders and sessions. hvdkit needs eager execution.",
    before="x = tf.placeholder(tf.float32)",
)
def graphs(script: Script) -> Findings:
    pinned = {each.line for each in script.changes if each.rule == pinned_gpu.name}
    seen = set()
    for node, name in script.uses(cst.Attribute, cst.Name):
        outer = script.parent(node)
        if isinstance(outer, cst.Attribute) and _is_graph(script.name_of(outer) or ""):
            continue
        if not _is_graph(name) or name in seen:
            continue
        if pinned and re.search(r"ConfigProto|Session|set_session", name):
            continue
        seen.add(name)
        yield Advice(node, f"{name} is TensorFlow 1: {_replacement(name)}")


def _replacement(name: str) -> str:
    """Return what to use in place of a name of graphs and sessions."""
    if re.search(r"ConfigProto|\w+Options", name):
        return (
            "set threads with tf.config.threading, and the memory of GPUs with "
            "tf.config.experimental.set_memory_growth. hvd.init() has chosen the GPU"
        )
    if "set_session" in name:
        return "remove the line, because TensorFlow 2 has no sessions"
    return (
        "write this part with Keras or tf.GradientTape. The command tf_upgrade_v2 renames what "
        "has only another name"
    )


def _is_graph(name: str) -> bool:
    return bool(_GRAPH.fullmatch(name) or _KERAS_GRAPH.fullmatch(name))


@rule(
    "In TensorFlow 2, a data set needs no iterator: `for batch in dataset`.",
    before="iterator = dataset.make_one_shot_iterator()",
)
def dataset_iterators(script: Script) -> Findings:
    for call, _ in script.methods("make_one_shot_iterator", "make_initializable_iterator"):
        yield Advice(call, "iterate over the data set, or call iter(dataset)")


@rule(
    "The tensors of tf.py_function have no shape, but fit of Keras 3 needs one.",
    before="dataset.map(lambda i: tf.py_function(read, [i], tf.float32))",
)
def py_functions(script: Script) -> Findings:
    if any(each.attr.value in ("set_shape", "ensure_shape") for each in script.attributes()):
        return
    for call, name in script.named_calls():
        if name in ("tensorflow.py_function", "tensorflow.numpy_function"):
            yield Advice(
                call,
                "if fit reads this data set, give the tensors a shape with tf.ensure_shape, "
                "because Keras 3 needs their number of dimensions",
            )


#: Private module that TensorFlow no longer has -> what to use.
_REMOVED_MODULES = {
    "tensorflow.python._pywrap_util_port": "import it from tensorflow.python.util",
    "tensorflow.python.distribute.distribution_strategy_context": "use tf.distribute",
    "tensorflow.python.estimator": "train with Keras or tf.GradientTape",
    "tensorflow.python.training.distribution_strategy_context": "use tf.distribute",
    "tensorflow.python.training.tracking": "use tensorflow.python.trackable",
    "tensorflow.pywrap_tensorflow": "use the public function of TensorFlow, such as "
    "tf.sysconfig.get_build_info()",
}


@rule(
    "A private module of TensorFlow may move or disappear in any version.",
    before="from tensorflow.python.training.tracking import base",
)
def private_modules(script: Script) -> Findings:
    found = [(node, name) for node, name, _ in script.imported_names()]
    found += [
        (node, script.name_of(node) or "")
        for node in script.attributes()
        if script.source(node).startswith(f"{_tf(script)}.")
        and not isinstance(script.parent(node), cst.Attribute)
    ]
    for node, name in found:
        if not re.match(r"tensorflow\.(python|pywrap_tensorflow)\b(?!\.keras)", name):
            continue
        module = next((each for each in _REMOVED_MODULES if _is_in(name, each)), None)
        if module is None:
            yield Note(node, f"{name} is private: {lower(private_modules.reason)}")
        elif not _is_for_tensorflow_1(script, node):
            text = f"TensorFlow has no module {module}: {_REMOVED_MODULES[module]}"
            yield Advice(node, text)


def _is_for_tensorflow_1(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is in the `else` of a comparison of versions."""
    branch = script.enclosing(node, cst.Else)
    test = script.parent(branch) if branch else None
    return isinstance(test, cst.If) and "version" in script.source(test.test)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")
