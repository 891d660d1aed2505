from dataclasses import dataclass

import pytest

from hvdkit.bench import software
from hvdkit.bench.allreduce import variants as allreduce_variants
from hvdkit.bench.step import variants as step_variants
from hvdkit.errors import UsageError


@dataclass(frozen=True)
class Named:
    name: str

    @property
    def needs(self):
        return software.Needs("", (), "gloo")


KNOWN = [Named(name) for name in ("ours-gloo", "ours-mpi", "theirs", "missing")]


def choose(text):
    return software.choose(
        KNOWN,
        text,
        lambda variant: variant.name != "ours-mpi",
        lambda variant: "install it" if variant.name == "missing" else None,
    )


def test_variants_that_are_not_named():
    chosen, left_out = choose(None)
    assert [variant.name for variant in chosen] == ["ours-gloo", "theirs"]
    assert left_out == ["missing is left out: install it"]


def test_named_variants_and_patterns():
    assert [variant.name for variant in choose("theirs, ours-*")[0]] == [
        "ours-gloo",
        "ours-mpi",
        "theirs",
    ]
    # A pattern asks for what is there.
    assert choose("*")[1] == ["missing is left out: install it"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("missing", "--variants has missing: install it"),
        ("other", "--variants has 'other'; expected some of ours-gloo"),
        ("mis*", "none of the variants can be measured with these options: missing is left out"),
        ("", "--variants is empty"),
    ],
)
def test_variants_that_cannot_be_measured(text, expected):
    with pytest.raises(UsageError, match=expected.replace("*", r"\*")):
        choose(text)


def test_a_missing_module_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: None)
    found = software.Software("torch", {})
    ring = allreduce_variants.Variant(allreduce_variants.RING, "mpi")
    assert "pip install 'hvdkit[mpi]'" in found.lacks(ring.needs, ("gloo", "mpi"))


def test_names_are_unique():
    for framework in step_variants.FRAMEWORKS:
        names = [variant.name for variant in step_variants.known(framework)]
        assert len(names) == len(set(names))
    names = [variant.name for variant in allreduce_variants.known(["new"])]
    assert len(names) == len(set(names))
    assert "new-gloo" in names


def test_pairs_compare_hvdkit_with_each_other_optimizer():
    known = step_variants.known("torch")
    names = {(a.name, b.name) for a, b in step_variants.pairs(known)}
    assert ("hvdkit-gloo-fp32", "ddp-gloo-fp32") in names
    assert ("hvdkit-gloo-int8", "ddp-gloo-powersgd") in names
    assert ("ddp-gloo-fp32", "hvdkit-gloo-fp32") not in names
    assert not any("alone" in pair or "single" in pair for pair in names)
