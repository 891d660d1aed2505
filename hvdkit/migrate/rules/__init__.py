"""The rules for scripts of Horovod, in the order in which they are applied."""

from hvdkit.migrate.rules import horovod, keras, keras_modules, pytorch, tensorflow

RULES = (
    *horovod.RULES,
    *tensorflow.RULES,
    *keras_modules.RULES,
    *keras.RULES,
    *pytorch.RULES,
)
