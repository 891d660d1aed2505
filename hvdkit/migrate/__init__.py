"""`hvdkit migrate`: rewrite scripts of Horovod and DDP for hvdkit and today's frameworks.

`project` migrates the texts of files, `rules` and `ddp` have the rules, and `command` is the
command line. All but `command` and `files` need LibCST, which is an optional requirement.
"""
