"""The parts of `scripts/check_gpu`: one module each, which writes a report as it goes.

`command` reads the arguments and starts the parts. `pack` gathers what a machine without a network
lacks; `build` makes an environment and an engine from it. Those two and `command` use the standard
library only, because nothing else is installed yet. Every other part runs inside an environment
that `build` has made (in a dry run: inside the interpreter that runs the script).
"""
