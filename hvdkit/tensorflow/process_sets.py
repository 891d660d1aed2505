"""`hvd.add_process_set`, `hvd.remove_process_set` and `hvd.grid`."""

from horovod.common import process_sets

from hvdkit.agreement.process_sets import ProcessSets
from hvdkit.tensorflow.collectives import TensorFlowCollectives

_sets = ProcessSets(process_sets, lambda: TensorFlowCollectives(process_sets.global_process_set))

add_process_set = _sets.add_process_set
remove_process_set = _sets.remove_process_set
grid = _sets.grid
