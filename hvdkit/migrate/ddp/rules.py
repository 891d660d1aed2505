"""The rules about torch.distributed and DistributedDataParallel.

They apply to scripts that can be converted completely. `REPLACEMENTS` is advice for the others.
"""

from hvdkit.migrate.ddp import collectives, starting, training
from hvdkit.migrate.ddp.facts import DIST, SAMPLERS, WRAPPERS

#: In the order in which they are applied.
RULES = (*starting.RULES[:1], *training.RULES, *starting.RULES[1:], *collectives.RULES)

#: Full name -> what to use, for scripts that are not converted.
REPLACEMENTS = {
    **{DIST + name: f"hvd.{ours}()" for name, ours in starting.FUNCTIONS.items()},
    **{DIST + name: text for name, text in collectives.BY_HAND.items()},
    **dict.fromkeys(SAMPLERS, "hvd.DistributedSampler(dataset)"),
    **dict.fromkeys(
        WRAPPERS,
        "hvd.broadcast_parameters(model, root_rank=0), and "
        "hvd.DistributedOptimizer(optimizer, model.named_parameters())",
    ),
    DIST + "init_process_group": "hvd.init()",
    DIST + "all_reduce": "hvd.allreduce_(tensor, op=hvd.Sum)",
    DIST + "reduce": "hvd.allreduce_(tensor, op=hvd.Sum)",
    DIST + "broadcast": "hvd.broadcast_(tensor, root_rank=0)",
    DIST + "all_gather": "hvd.allgather(tensor)",
    DIST + "all_gather_object": "hvd.allgather_object(obj)",
    DIST + "broadcast_object_list": "hvd.broadcast_object(obj, root_rank=0)",
}
