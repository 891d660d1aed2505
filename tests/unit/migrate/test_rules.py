"""Each rule, on its own example; and scripts that no rule may touch."""

import random
import sysconfig
from pathlib import Path

import libcst as cst
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.migrate import project
from hvdkit.migrate.ddp.rules import RULES as DDP_RULES
from hvdkit.migrate.rules import RULES
from hvdkit.migrate.rules.horovod import names_in
from hvdkit.migrate.script import Script

ALL = (*RULES, *DDP_RULES)
SCRIPT = Path("/scripts/train.py")


def migrate(text):
    """Return the migrated text, and the advice."""
    outcome = project.migrate({SCRIPT: text}).get(SCRIPT)
    return (outcome.after, outcome.advice) if outcome else (text, [])


def unchanged(text):
    after, _ = migrate(text)
    return after == text


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_the_example_of_a_rule(rule):
    script = f"{rule.setup}{rule.before}\n"
    if rule.setup and not rule.setup.endswith("\n"):
        script = f"{rule.setup}\n{rule.before}\n"
    after, advice = migrate(script)
    if rule.after is None:
        assert after.endswith(f"{rule.before}\n")
        assert rule.name in {each.rule for each in advice}
        return
    assert after.endswith(f"{rule.after}\n")
    assert rule.name in {each.rule for each in project.migrate({SCRIPT: script})[SCRIPT].changes}
    assert not advice
    again = project.migrate({SCRIPT: after}).get(SCRIPT)
    assert again is None or not again.changes


def test_rules_have_different_names_and_full_sentences():
    assert len({rule.name for rule in ALL}) == len(ALL)
    assert not [rule.name for rule in ALL if not rule.reason.endswith(".")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.tensorflow.keras as hvd", "import hvdkit.tensorflow.keras as hvd"),
        (
            "from horovod.tensorflow import keras as hvd",
            "from hvdkit.tensorflow import keras as hvd",
        ),
        ("import horovod.keras as hvd", "import hvdkit.keras as hvd"),
        ("from horovod import torch as hvd", "from hvdkit import torch as hvd"),
        ("from horovod.torch.elastic import run", "from hvdkit.torch.elastic import run"),
        ("import horovod.torch.mpi_ops as ops", "import hvdkit.torch.mpi_ops as ops"),
        ("from horovod import run", "from hvdkit import run"),
        (
            "from horovod.torch import (  # both\n    init,\n    rank,  # own\n)",
            "from hvdkit.torch import (  # both\n    init,\n    rank,  # own\n)",
        ),
        (
            "import horovod\nimport horovod.torch\nhorovod.torch.init()\nhorovod.run(f, np=2)",
            "import hvdkit\nimport hvdkit.torch\nhvdkit.torch.init()\nhvdkit.run(f, np=2)",
        ),
        (
            "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None",
            "try:\n    import hvdkit.torch as hvd\nexcept ImportError:\n    hvd = None",
        ),
        (
            "def main():\n    import horovod.torch as hvd\n    hvd.init()",
            "def main():\n    import hvdkit.torch as hvd\n    hvd.init()",
        ),
    ],
)
def test_imports(before, after):
    assert migrate(before + "\n") == (after + "\n", [])


@pytest.mark.parametrize(
    "script",
    [
        "from horovod.common.exceptions import HorovodInternalError\n",  # the engine has it
        "from horovod.runner.common.util import config_parser\n",
        "import horovod\nprint(horovod.__version__)\n",
        "import hvdkit.torch as hvd\nhvd.allreduce(x, average=False)\n",
        # hvdkit ignores the argument of a wrapped optimizer.
        "import keras\nimport hvdkit.keras as hvd\nopt = hvd.DistributedOptimizer('sgd')\n"
        "model.compile(optimizer=opt, experimental_run_tf_function=False)\n",
        # The metric has the short name.
        "import keras\nimport hvdkit.keras as hvd\nm.compile(loss='mse', metrics=['acc'])\n"
        "keras.callbacks.EarlyStopping(monitor='val_acc')\n",
        # Each model has its own optimizer.
        "import keras\nimport hvdkit.keras as hvd\nopt = keras.optimizers.SGD(1)\n"
        "a.compile(opt, 'mse')\nopt = keras.optimizers.SGD(1)\nb.compile(opt, 'mse')\n",
        # Tensors of several numbers, and NumPy's own names.
        "import torch\nimport hvdkit.torch as hvd\nprint(weights.data[0])\n",
        "import numpy as np\nimport hvdkit.torch as hvd\nx = np.zeros(3, np.float32)\n",
        "import numpy as np\nimport hvdkit.torch as hvd\nfloat = 3\nx = np.float\n",
        # Not an iterator that the script made.
        "import hvdkit.torch as hvd\nx = stack.next()\n",
        # A sampler with its own rank and size needs no process group.
        "import torch\nimport hvdkit.torch as hvd\n"
        "s = torch.utils.data.DistributedSampler(d, num_replicas=hvd.size(), rank=hvd.rank())\n",
        # DDP in a file without the start of the processes is not touched.
        "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(model)\n",
    ],
)
def test_what_works_is_not_touched(script):
    assert unchanged(script)


@pytest.mark.parametrize(
    "script",
    [
        # The name is a parameter, a loop's variable, or assigned twice.
        "import keras\nimport hvdkit.keras as hvd\ndef f(keras):\n    keras.optimizers.SGD(lr=1)\n",
        "import keras\nimport hvdkit as hvd\nfor keras in x:\n    keras.optimizers.SGD(lr=1)\n",
        "import hvdkit.keras as hvd\nimport keras\nkeras = mine\nkeras.optimizers.SGD(lr=1)\n",
        # Another class of that name.
        "import keras\nimport hvdkit.keras as hvd\nfrom mine import SGD\nSGD(lr=0.1)\n",
        # An object that may be anything.
        "import keras\nimport hvdkit.keras as hvd\ndef f(thing):\n    thing.fit_generator(1)\n",
        "import keras\nimport hvdkit.keras as hvd\ndef f(thing):\n    return thing.variables()\n",
        "import keras\nimport hvdkit.keras as hvd\ndef f(thing):\n    thing.lr = 3\n",
        # Arguments that are not known.
        "import keras\nimport hvdkit.keras as hvd\nkeras.optimizers.SGD(**options)\n",
        "import keras\nimport hvdkit.keras as hvd\nm = keras.Sequential()\nm.fit_generator(*a)\n",
        # Names that only look alike.
        "import horovodish\nimport hvdkit\nhorovodish.run()\n",
        "import importlib\nhvd = importlib.import_module('horovod.torch')\n",
    ],
)
def test_what_is_not_understood_is_not_touched(script):
    assert unchanged(script)


def test_an_optimizer_that_is_chosen_by_its_name():
    script = (
        "import keras\nimport hvdkit.keras as hvd\n"
        "kind = getattr(keras.optimizers, name)\noptimizer = kind(lr=0.1)\n"
    )
    after, advice = migrate(script)
    assert after == script.replace("lr=", "learning_rate=")
    assert not advice


def test_a_backend_that_is_imported_as_a_module():
    script = "import keras.backend as K\nimport hvdkit.keras as hvd\nK.mean(x)\n"
    line = "from tensorflow.keras import backend as K\n"
    assert migrate(script) == (script.replace("import keras.backend as K\n", line), [])


def test_a_module_has_the_name_of_a_removed_function():
    script = (
        "import keras\nfrom keras.layers.merge import concatenate\nimport hvdkit.keras as hvd\n"
    )
    assert migrate(script) == (script.replace("layers.merge", "layers"), [])


def test_a_name_of_a_model_file_that_the_script_does_not_show_is_a_note():
    script = (
        "import keras\nimport hvdkit.keras as hvd\nkeras.callbacks.ModelCheckpoint(args.name)\n"
    )
    (note,) = project.migrate({SCRIPT: script + "keras.optimizers.SGD(lr=1)\n"})[SCRIPT].notes
    assert note.line == 3
    assert ".weights.h5" in note.text


def test_a_name_that_a_failed_import_replaces_is_understood():
    script = (
        "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    class Alone:\n"
        "        pass\n    hvd = Alone()\nhvd.nothing()\n"
    )
    after, (advice,) = migrate(script)
    assert after == script.replace("horovod", "hvdkit")
    assert advice.line == 7


@pytest.mark.parametrize(
    ("script", "line", "advice"),
    [
        ("import hvdkit.torch as hvd\nhvd.nccl_bulit()\n", 2, "hvdkit.torch has no `nccl_bulit`"),
        ("import horovod.spark.torch as hvd\n", 1, "hvdkit does not have horovod.spark"),
        ("from horovod.torch import nothing\n", 1, "hvdkit.torch has no `nothing`"),
        ("import horovod.torch\nhorovod = wrap(horovod)\nhorovod.torch.init()\n", 1, "by hand"),
        (
            "import keras\nimport hvdkit.keras as hvd\n"
            "keras.optimizers.SGD(learning_rate=r, decay=1e-4)\n"
            "keras.callbacks.ReduceLROnPlateau()\n",
            3,
            "ignores decay=",
        ),
        (
            "import tensorflow as tf\nimport hvdkit.tensorflow as hvd\n"
            "config = tf.ConfigProto(inter_op_parallelism_threads=1)\n",
            3,
            "is TensorFlow 1",
        ),
        (
            "import horovod.torch as hvd\nfrom transformers import AdamW\n"
            "AdamW(weights, correct_bias=False)\n",
            3,
            "transformers 5",
        ),
        (
            "import keras\nimport hvdkit.keras as hvd\nkeras.models.save_model(m, 'final')\n",
            3,
            "must end with .keras",
        ),
        (
            "import keras\nimport hvdkit.keras\nm = keras.Sequential()\nm.predict_proba(x)\n",
            4,
            "no predict_proba: use m.predict(x)",
        ),
        ("from keras import backend as K\nimport hvdkit.keras as hvd\nK.tf.abs(x)\n", 3, "K.tf"),
        ("import torch\nimport horovod.torch as hvd\ntorch.symeig(x)\n", 3, "eigvalsh"),
        ("import horovod.torch as hvd\nfrom distutils.util import strtobool\n", 2, "strtobool"),
        ("import horovod.torch as hvd\nprint 'old'\n", 2, "Python 2"),
        ("import horovod.torch as hvd\nx = x.cuda(async=True)\n", 2, "non_blocking"),
        (
            "import hvdkit.torch as hvd\nhvd.DistributedOptimizer(o, mine, named_parameters=p)\n",
            2,
            "argument 2 of hvd.DistributedOptimizer is named_parameters",
        ),
        ("class Backend:\n    MODULE = 'horovod.torch'\n", 2, 'use "hvdkit.torch"'),
        (
            "import keras\nimport hvdkit.keras as hvd\nx = keras.Input((args.size))\n",
            3,
            "write (args.size,)",
        ),
        (
            "import keras\nimport hvdkit.keras as hvd\nx = keras.Input((3,))\n"
            "size = keras.layers.Dense(2)(x)\nsize.get_shape()\n",
            5,
            "use size.shape",
        ),
        (
            "import tensorflow as tf\nimport hvdkit.keras as hvd\nx = tf.keras.Input((3,))\n"
            "y = 2 * tf.keras.activations.relu(x) + 1\nz = tf.reduce_sum([y[:, 0], 1])\n",
            5,
            "use keras.ops.sum",
        ),
        (
            "import keras\nimport hvdkit.keras as hvd\n"
            "from tensorflow.keras.utils import layer_utils\n",
            3,
            "Keras 3 has no keras.utils.layer_utils: use the methods",
        ),
        (
            "import keras\nimport hvdkit.keras as hvd\nfor each in metrics:\n"
            "    each.reset_states()\n",
            4,
            "write each.reset_state()",
        ),
        (
            "import keras\nimport hvdkit.keras as hvd\ndef step(model, optimizer):\n"
            "    v = model.a.trainable_variables\n    optimizer.apply_gradients(zip(g, v))\n"
            "    v = model.b.trainable_variables\n    optimizer.apply_gradients(zip(h, v))\n",
            5,
            "optimizer.build(model.a.trainable_variables + model.b.trainable_variables)",
        ),
        (
            "import keras\nimport hvdkit.keras as hvd\nloss = optimizer.get_scaled_loss(loss)\n",
            3,
            "use scale_loss(loss)",
        ),
    ],
)
def test_advice_names_the_line(script, line, advice):
    _, given = migrate(script)
    assert [each.line for each in given if advice in each.text] == [line]


@pytest.mark.parametrize(
    "line",
    [
        # A function of TensorFlow in a layer, on other tensors, and on the shape of a tensor.
        "y = keras.layers.Lambda(lambda x: tf.square(x))(x)",
        "y = tf.square(tf.ones(3))",
        "y = tf.reduce_prod(x.shape[1:])",
        "def f(x):\n    return tf.square(x)",
        "keras.Model(x, keras.layers.Dense(2)(x)).save('a.keras')",
        # One list of variables, and one optimizer for each list.
        "a.apply_gradients(zip(g, m.variables))\na.apply_gradients(zip(h, m.variables))",
        "a.apply_gradients(zip(g, m.variables))\nb.apply_gradients(zip(h, n.variables))",
        # Names that Keras 3 has.
        "y = tf.keras.layers.Dense(3).weights\nfrom keras.utils import to_categorical",
        "y = tf.keras.preprocessing.image.ImageDataGenerator()",
        "y = tf.keras.applications.resnet50.preprocess_input(z)",
        # Arguments that hvdkit has.
        "hvd.DistributedOptimizer(optimizer, None, '', compression=hvd.Compression.fp16)",
        "hvd.DistributedOptimizer(*everything, compressor=1)",
        "class N(keras.Model):\n    def call(self, x):\n        return self.f(x, 1)",
    ],
)
def test_what_works_gets_no_advice(line):
    head = "import keras\nimport tensorflow as tf\nimport hvdkit.keras as hvd\n"
    text = f"{head}x = keras.Input((10,))\n{line}\n"
    assert migrate(text) == (text, [])


PLOT = """\
import keras
acc = history.history['acc']
if 'val_acc' in history.history.keys():
    plot(history.history["val_acc"])
keras.callbacks.ModelCheckpoint(path, "val_acc", save_best_only=True)
done = logs.get('acc') > 0.9
colours = {"acc": "red"}
"""
COMPILE = """\
import keras
import horovod.keras as hvd
import plot
model.compile("sgd", "mse", ["accuracy"])
name = "w-{epoch:02d}-{val_acc:.2f}.keras"
keras.callbacks.ModelCheckpoint(name)
"""


@pytest.mark.parametrize("metric", ["accuracy", "acc"])
def test_the_name_of_the_accuracy_in_all_files(tmp_path, metric):
    texts = {"plot.py": PLOT, "train.py": COMPILE.replace("accuracy", metric)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = project.migrate({tmp_path / name: text for name, text in texts.items()})
    if metric == "acc":
        assert tmp_path / "plot.py" not in found
        return
    plot, train = found[tmp_path / "plot.py"].after, found[tmp_path / "train.py"].after
    assert plot == PLOT.replace("acc'", "accuracy'").replace('acc"', 'accuracy"').replace(
        '{"accuracy"', '{"acc"'
    )
    assert "{epoch:02d}-{val_accuracy:.2f}.keras" in train


def test_a_file_that_understands_both_names_of_the_accuracy_stays():
    script = (
        COMPILE.partition("name")[0] + "h = model.fit(x)\n"
        "key = 'acc' if 'acc' in h.history else 'accuracy'\n"
        "if 'accuracy' in h.history: print(h.history['accuracy'])\n"
    )
    after, _ = migrate(script)
    assert after == script.replace("horovod", "hvdkit")


def test_private_modules_of_tensorflow():
    script = (
        "import tensorflow as tf\nimport hvdkit.tensorflow as hvd\n"
        "if int(tf.__version__[0]) >= 2:\n    from tensorflow.python import _pywrap_util_port\n"
        "else:\n    tf.pywrap_tensorflow.IsMklEnabled()\n"
        "from tensorflow.python.client import device_lib\n"
    )
    outcome = project.migrate({SCRIPT: script})[SCRIPT]
    assert [each.line for each in outcome.advice] == [4]
    assert [each.line for each in outcome.notes] == [7]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from tensorflow.python.keras import backend as K",
            "from tensorflow.keras import backend as K",
        ),
        (
            "from tensorflow.python.keras.layers.core import Dense",
            "from tensorflow.keras.layers import Dense",
        ),
        ("import tensorflow.python.keras.layers as L", "from tensorflow.keras import layers as L"),
        ("from tensorflow.python import keras", "from tensorflow import keras"),
    ],
)
def test_the_private_copy_of_keras(before, after):
    start = "import hvdkit.keras as hvd\n"
    assert migrate(f"{start}{before}\n") == (f"{start}{after}\n", [])
    (advice,) = migrate(f"{start}from tensorflow.python.keras.saving import hdf5_format\n")[1]
    assert "private to Keras 2" in advice.text


def test_comments_and_layout_stay():
    script = """\
#!/usr/bin/env python
# A licence.
import keras   # Keras
import tensorflow as tf
import horovod.keras as hvd  # the ring

from keras import backend as K

hvd.init()

# One GPU for each process.
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

opt = keras.optimizers.SGD(
    lr = 0.1,  # small
    momentum=0.9,
)
"""
    after, advice = migrate(script)
    assert not advice
    assert after == (
        script.replace("import horovod.keras", "import hvdkit.keras")
        .replace("    lr = 0.1", "    learning_rate = 0.1")
        .replace(
            "# One GPU for each process.\nconfig = tf.ConfigProto()\n"
            "config.gpu_options.visible_device_list = str(hvd.local_rank())\n"
            "K.set_session(tf.Session(config=config))\n\n",
            "",
        )
        .replace("\nopt =", "\nopt =")
    )


def test_unix_and_windows_line_ends_stay():
    script = "import horovod.torch as hvd\r\n\r\nhvd.init()\r\n# \t end"
    assert migrate(script) == (script.replace("horovod", "hvdkit", 1), [])


def test_names_of_modules_are_read_from_their_source():
    assert {"DistributedOptimizer", "init", "elastic", "Average"} <= names_in("hvdkit.torch")
    assert {"callbacks", "load_model", "size"} <= names_in("hvdkit.tensorflow.keras")
    assert "*" not in names_in("hvdkit.keras")


def test_imports_are_found_beside_other_blocks():
    script = (
        "def f():\n    pass\n\n\nimport hvdkit.keras as hvd\nfrom tensorflow import keras\n"
        "opt = keras.optimizers.SGD(lr=0.1, decay=1e-4)\n"
    )
    after, _ = migrate(script)
    assert "learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-4)" in after


def test_the_experimental_module_of_mixed_precision_is_imported_from_its_new_place():
    script = (
        "import hvdkit.keras as hvd\n"
        "from tensorflow.keras.mixed_precision import experimental as mixed_precision\n"
        "mixed_precision.set_policy('mixed_float16')\n"
    )
    after, _ = migrate(script)
    assert "experimental" not in after
    assert "mixed_precision.set_global_policy('mixed_float16')" in after


def test_one_name_for_horovod_and_hvdkit():
    lines = (
        "try:",
        "    import horovod.torch as hvd",
        "except ImportError:",
        "    import hvdkit.torch as hvd",
        "hvd.DistributedTrainableOptimizer(optimizer)",
        "",
    )
    _, advice = migrate("\n".join(lines))
    assert [each.line for each in advice] == [5]


_PARTS = st.lists(
    st.sampled_from([rule for rule in RULES if "\n\n" not in rule.before]), min_size=1, max_size=6
)


@given(_PARTS, st.booleans())
@settings(max_examples=15, deadline=None)
def test_a_second_run_changes_nothing(rules, in_function):
    setups = "\n".join(rule.setup for rule in rules)
    befores = "\n".join(rule.before for rule in rules)
    if in_function:
        befores = "def main():\n" + "\n".join(f"    {line}" for line in befores.split("\n"))
    once, advice = migrate(f"{setups}\nimport hvdkit\n{befores}\n")
    cst.parse_module(once)
    twice, again = migrate(once)
    assert twice == once
    assert {each.text for each in again} <= {each.text for each in advice}


def standard_library(count, seed):
    """Return files of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not {"site-packages", "lib2to3", "test", "distutils"} & set(path.parts)
        and path.stat().st_size < 60_000
    )
    random.Random(seed).shuffle(files)
    return files[:count]


def assert_untouched(path):
    try:
        text = path.read_bytes().decode()
        script = Script(text)
    except (UnicodeDecodeError, cst.ParserSyntaxError):
        return
    assert project.migrate({path: text}) == {}
    # The rules do not change it either if they are applied nevertheless.
    for rule in RULES:
        rule(script)
    assert script.apply() == text, path
    if not script.module.body:
        return
    # An edit keeps the layout of all other lines.
    script.insert(script.module.body[-1], cst.parse_statement("the_end = 1"))
    assert script.apply().replace("the_end = 1\n", "") == text, path


def test_the_standard_library_is_untouched():
    for path in standard_library(4, seed=1):
        assert_untouched(path)


@pytest.mark.long
def test_all_of_the_standard_library_is_untouched():
    for path in standard_library(2_000, seed=2):
        assert_untouched(path)


def test_an_h5_file_loses_the_momentum():
    script = (
        "import keras\nimport horovod.keras as hvd\n"
        'keras.callbacks.ModelCheckpoint("best-{epoch}.h5")\n'
        'keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True)\n'
        'keras.callbacks.ModelCheckpoint("best.keras")\n'
    )
    (note,) = project.migrate({SCRIPT: script})[SCRIPT].notes
    assert note.line == 3
    assert "momentum" in note.text
    assert ".keras" in note.text


def test_advice_does_not_reduce_gradients_twice():
    script = (
        "import keras\nimport hvdkit.keras as hvd\n"
        "opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))\nopt.minimize(loss, variables)\n"
    )
    (advice,) = project.migrate({SCRIPT: script})[SCRIPT].advice
    assert "minimize: compute gradients with tf.GradientTape" in advice.text
    assert "never use both" in advice.text
