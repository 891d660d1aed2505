"""Run the TensorFlow and Keras examples; the latter on both backends."""

import re
import sys

import pytest

from tests.logs import without_slow_ranks
from tests.ranks.rank_pool import REPOSITORY, Configuration, start_ranks_of
from tests.ranks.torch.test_digits import minimal_accuracy, run_plain

# With these variables TensorFlow logs nothing, so ranks other than 0 have no output.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
EXAMPLES = [
    ("tensorflow_digits", "tensorflow"),
    ("keras_digits", "keras-tensorflow"),
    ("keras_digits", "keras-torch"),
]


def example(name):
    return str(REPOSITORY / "examples" / f"{name}.py")


def accuracy(name, configuration, *arguments):
    command = [sys.executable, example(name), *arguments]
    results = start_ranks_of(configuration, command, QUIET).wait(timeout=300)
    first, *others = [without_slow_ranks(result.output) for result in results]
    assert others == [""] * (configuration.size - 1)
    last = first.splitlines()[-1]
    return float(re.fullmatch(r"accuracy=(0\.\d{4}|1\.0000)", last).group(1))


@pytest.mark.long
@pytest.mark.parametrize(("name", "framework"), EXAMPLES)
def test_accuracy_of_two_ranks_after_six_epochs(name, framework):
    assert accuracy(name, Configuration(framework, "gloo", 2), "--epochs", "6") > 0.9


@pytest.mark.parametrize(
    ("name", "framework"),
    [EXAMPLES[0], pytest.param(*EXAMPLES[1], marks=pytest.mark.long), EXAMPLES[2]],
)
def test_the_minimal_examples_learn(name, framework):
    name = name.partition("_")[0]
    assert minimal_accuracy(Configuration(framework, "gloo", 2), name, QUIET) > 0.9


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensorflow_digits", "keras_digits"])
def test_the_same_seed_gives_the_same_accuracy(name):
    two = Configuration("tensorflow", "gloo", 2)
    arguments = ("--epochs", "1", "--seed", "3")
    assert accuracy(name, two, *arguments) == accuracy(name, two, *arguments)


@pytest.mark.long
@pytest.mark.parametrize(("name", "framework"), EXAMPLES)
def test_accuracy_is_the_same_on_one_two_and_four_ranks(name, framework):
    jobs = [("gloo", 1), ("gloo", 2), ("gloo", 4), ("mpi", 2)]
    found = {job: accuracy(name, Configuration(framework, *job)) for job in jobs}
    assert min(found.values()) >= 0.97, found
    assert max(found.values()) - min(found.values()) <= 0.015, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tensorflow_digits", ["--epochs", "0"]),
        ("keras_digits", ["--batch-size", "100000"]),
    ],
)
def test_invalid_arguments_exit_with_status_2(name, arguments):
    done = run_plain(sys.executable, example(name), *arguments)
    assert done.returncode == 2
    assert "expected at least 1 of each" in done.stderr
