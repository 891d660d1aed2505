"""Show the `Example:` section of a docstring as code."""

import re
import textwrap

import griffe


def as_code(docstring: str) -> str:
    """Return the docstring with a fence around the code of each `Example:` section."""

    def fenced(match):
        code = textwrap.indent(f"```python\n{textwrap.dedent(match[1]).strip()}\n```", "    ")
        return f"Example:\n{code}\n"

    return re.sub(r"^Example:\n((?:[ \t]+.*\n?|\n)+)", fenced, docstring, flags=re.M)


class ExamplesAsCode(griffe.Extension):
    """Apply `as_code` to each docstring that is loaded."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = as_code(obj.docstring.value)
