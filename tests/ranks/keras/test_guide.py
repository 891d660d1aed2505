"""Run the code blocks of docs/keras.md and docs/tensorflow.md on several ranks."""

import contextlib
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras, tf
from tests.ranks.keras.job import (
    of_every_rank,
    same_everywhere,
)

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page, language):
    """Return the code blocks of a page; for diffs, the resulting code."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    if language == "diff":
        found = [re.sub(r"^(-.*\n|[ +])", "", block, flags=re.M) for block in found]
    return found


# Paragraphs of a block, between blank lines, that contain these words run on one backend only.
BACKEND_OF = {"tf.data": "tensorflow", "DataLoader": "torch"}


def script_names(hvd):
    """Return the names that the blocks use without defining them."""

    def build_model():
        # Ten outputs, for digits.
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10)])
        model.compile("sgd", loss="mse")
        return model

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.ones((4, 8), "float32"), np.ones((4, 10), "float32")

    names = {
        "hvd": hvd,
        "keras": keras,
        "np": np,
        "build_model": build_model,
        "teacher": build_model(),
        "images": np.ones((13, 8), "float32"),
        "x": np.ones((16, 8), "float32"),
        "y": np.ones((16, 10), "float32"),
        "batches": Batches(),
    }
    if keras.backend.backend() == "tensorflow":

        def parse(record):
            return tf.io.decode_raw(record, tf.float32), tf.ones(10)

        digits = tf.data.Dataset.from_tensor_slices((tf.ones((512, 8)), tf.range(512) % 10))
        return names | {
            "tf": tf,
            "examples": digits,
            "augment": lambda x, y: (x, y),
            "parse": parse,
            "glob": lambda pattern: [str(path) for path in Path().glob(pattern)],
            "loss_of": lambda y, outputs: tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            ),
        }
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.ones(16, 8), torch.ones(16, 10))
    return names | {"loader": DataLoader(data, 4, shuffle=True)}


@contextlib.contextmanager
def prepared(hvd):
    """Yield the names for a block, in a common working folder with the files that it reads."""
    names = script_names(hvd)
    model = names["model"] = names["build_model"]()
    before = os.getcwd()
    with shared_folder(hvd) as folder:
        os.chdir(folder)
        try:
            if hvd.rank() == 0:
                model.save("checkpoint-12.keras")
                if "tf" in names:
                    with names["tf"].io.TFRecordWriter("train-0.tfrecord") as writer:
                        for _ in range(8):
                            writer.write(np.ones(8, "float32").tobytes())
            of_every_rank("written")
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
            yield names
        finally:
            os.chdir(before)


def run(block, names):
    """Run a block as a part of a script. The ranks have called `hvd.init()` before."""
    exec(compile(block, "a code block of the guide", "exec"), names)


@pytest.mark.parametrize("number", range(len(blocks("keras.md", "python"))))
@pytest.mark.long_with("keras-tensorflow")
def test_code_blocks_of_the_keras_guide(hvd, number):
    block = blocks("keras.md", "python")[number]
    other = {"tensorflow": "torch", "torch": "tensorflow"}[keras.backend.backend()]
    parts = [
        part
        for part in block.split("\n\n")
        if not any(word in part and where == other for word, where in BACKEND_OF.items())
    ]
    if other == "tensorflow" and "hvd.shard(examples" in block:
        pytest.skip("tf.data belongs to the TensorFlow backend")
    keras.utils.set_random_seed(1)  # the same weights on every rank: not every block broadcasts
    with prepared(hvd) as names:
        run("\n\n".join(parts), names)
        if "local_fit" not in block:
            same_everywhere([weights.tolist() for weights in names["model"].get_weights()])


@pytest.mark.parametrize("page", ["keras.md", "tensorflow.md"])
def test_diffs_of_the_guides(hvd, page):
    if keras.backend.backend() == "torch":
        pytest.skip("tf.data belongs to the TensorFlow backend")
    (block,) = blocks(page, "diff")
    with prepared(hvd) as names:
        run(block.replace("epochs=24", "epochs=2"), names)
        same_everywhere([weights.tolist() for weights in names["model"].get_weights()])
        if page == "keras.md":
            assert Path("checkpoint-2.keras").exists()


def test_code_blocks_of_the_tensorflow_guide(hvd):
    accumulation, same_name = blocks("tensorflow.md", "python")
    with prepared(hvd) as names:
        run(accumulation, names)
        assert names["optimizer"].apply_gradients
        if "tf" in names:
            prepared_by = []
            run(same_name, names | {"prepare_data": lambda: prepared_by.append(hvd.rank())})
            assert prepared_by == [0][hvd.rank() :]
