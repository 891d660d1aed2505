"""The rules for scripts of Horovod, in the order in which they are applied."""

from hvdkit.migrate.rules import (
    horovod,
    keras_accuracy,
    keras_api,
    keras_functional,
    keras_models,
    keras_modules,
    keras_optimizers,
    pytorch,
    tensorflow,
)

RULES = (
    *horovod.RULES,
    *tensorflow.RULES,
    *keras_modules.RULES,
    *keras_optimizers.RULES,
    *keras_models.RULES,
    *keras_accuracy.RULES,
    *keras_functional.RULES,
    *keras_api.RULES,
    *pytorch.RULES,
)

#: Rules for files that mention Horovod, but do not import it. They only give advice.
UNIMPORTED = (horovod.lightning, horovod.dynamic_imports)
