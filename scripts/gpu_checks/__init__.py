"""The parts of `scripts/check_gpu`: one module each, which writes each result to a report at once.

`command` reads the arguments and starts the parts. `pack` downloads packages for a machine without
a network; `build` makes an environment and an engine from them. These modules use the standard
library only, because nothing else is installed yet. Every other part runs in an environment of
`build`, or in a dry run with the interpreter that runs the script.
"""
