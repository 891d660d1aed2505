"""`hvd.add_process_set`, `hvd.remove_process_set` and `hvd.grid`."""

from horovod.common import process_sets

from hvdkit.agreement.process_sets import ProcessSets
from hvdkit.torch.collectives import TorchCollectives

_sets = ProcessSets(process_sets, lambda: TorchCollectives(process_sets.global_process_set))

add_process_set = _sets.add_process_set
remove_process_set = _sets.remove_process_set
grid = _sets.grid
find_or_add = _sets.find_or_add
