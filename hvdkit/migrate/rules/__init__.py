"""The rules for scripts of Horovod, in the order in which they are applied."""

from hvdkit.migrate.rules import horovod, keras, keras_modules, pytorch, tensorflow

RULES = (
    *horovod.RULES,
    *tensorflow.RULES,
    *keras_modules.RULES,
    *keras.RULES,
    *pytorch.RULES,
)

#: Rules for files that mention Horovod, but do not import it. They only give advice.
UNIMPORTED = (horovod.lightning, horovod.dynamic_imports)
