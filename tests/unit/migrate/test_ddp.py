"""Scripts of DDP: converted completely, or left alone with advice."""

from pathlib import Path

import pytest

from hvdkit.migrate import project
from hvdkit.migrate.ddp.example import SETUP


def migrate(**texts):
    """Return module -> the outcome of its file."""
    paths = {Path(f"/scripts/{name}.py"): text for name, text in texts.items()}
    return {path.stem: outcome for path, outcome in project.migrate(paths).items()}


def migrated(text):
    return migrate(train=text)["train"]


SPAWNED = """\
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def work(rank, size, steps):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    size = torch.cuda.device_count()
    mp.spawn(work, (size, 5), nprocs=size)
"""

OF_A_TRAINER = """\
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.model = DDP(self.model)  # sends the parameters of rank 0

    def save(self):
        torch.save(self.model.module.state_dict(), "model.pt")


def parts():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


init_process_group()
Trainer(*parts()).save()
"""

CONDITIONAL = """\
import torch
import torch.distributed as dist


def main(args):
    if args.distributed:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    plain = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
        plain = model.module
    groups = [{"params": [p for p in plain.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with model.no_sync():
        model(torch.ones(2)).backward()
    optimizer.step()
"""


def test_ranks_that_the_script_starts_itself():
    outcome = migrated(SPAWNED)
    assert not outcome.advice
    assert "MASTER_" not in outcome.after
    assert "multiprocessing" not in outcome.after
    assert outcome.after.endswith("    hvd.init()\n    work(hvd.rank(), hvd.size(), 5)\n")
    assert "    model = torch.nn.Linear(2, 1)\n" in outcome.after
    assert "    hvd.broadcast_parameters(model, root_rank=0)\n" in outcome.after


def test_a_model_and_an_optimizer_of_other_functions():
    outcome = migrated(OF_A_TRAINER.replace("    return model, torch", "    optimizer = torch", 1))
    assert "        # sends the parameters" in outcome.after or "# sends the" in outcome.after
    assert "hvd.broadcast_parameters(self.model, root_rank=0)" in outcome.after
    assert "torch.save(self.model.state_dict()" in outcome.after
    assert (
        "    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n"
        in outcome.after
    )


def test_an_optimizer_within_an_expression():
    after = migrated(OF_A_TRAINER).after
    assert (
        "return model, hvd.DistributedOptimizer("
        "torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())\n" in after
    )


def test_a_script_that_also_runs_in_one_process():
    outcome = migrated(CONDITIONAL)
    assert not outcome.advice
    assert (
        "    optimizer = torch.optim.SGD(groups, lr=0.1)\n"
        "    if hvd.is_initialized():\n"
        "        optimizer = hvd.DistributedOptimizer(optimizer)\n"
        "    with hvd.no_sync(optimizer):\n" in outcome.after
    )
    assert "        plain = model\n" in outcome.after


OF_A_FUNCTION = """\
import torch
import torch.distributed as dist


def make(net, rate):
    return torch.optim.SGD(net.parameters(), lr=rate)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = make(model, 0.1)
"""


@pytest.mark.parametrize(
    "call",
    [
        "make(model, 0.1)",  # the function is in the file
        "Lion(model.parameters(), lr=0.1)",
        "library.make_optimizer(0.1, model.module)",
        "model.module.configure_optimizers(0.1)",
    ],
)
def test_an_optimizer_that_a_function_makes(call):
    script = OF_A_FUNCTION.replace("make(model, 0.1)", call)
    if not call.startswith("make"):
        script = script.replace("torch.optim.SGD(net.parameters(), lr=rate)", "None")
    outcome = migrated(script)
    assert not outcome.advice
    assert outcome.after.endswith(
        f"optimizer = {call.replace('.module', '')}\n"
        "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n"
    )
    assert outcome.after.count("DistributedOptimizer") == 1


def test_all_values_of_an_optimizer_are_wrapped():
    script = SETUP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "")
    script += (
        "groups = groups_of(ddp_model.module)\n"
        "if fast:\n    optimizer = torch.optim.SGD(groups)\n"
        "else:\n    optimizer = Lars(groups)\noptimizer = Lookahead(optimizer)\n"
    )
    outcome = migrated(script)
    assert not outcome.advice
    wrapped = "    optimizer = hvd.DistributedOptimizer(optimizer)\n"
    assert f"torch.optim.SGD(groups)\n{wrapped}else:" in outcome.after
    assert f"Lars(groups)\n{wrapped}optimizer = Lookahead(optimizer)\n" in outcome.after
    assert outcome.after.count("DistributedOptimizer") == 2


def test_the_only_optimizer_has_the_parameters_of_the_only_model():
    script = SETUP.replace("model.parameters()", "[]") + "optimizer.add_param_group(group)\n"
    outcome = migrated(script)
    assert not outcome.advice
    assert "\noptimizer = hvd.DistributedOptimizer(optimizer)\noptimizer.add" in outcome.after
    assert any("are taken to be those of ddp_model" in each.text for each in outcome.notes)


OPTIONAL_SPAWN = """\
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(args):
    if args.spawns:
        args.world_size = args.count * args.world_size
        mp.spawn(work, nprocs=args.count, args=(args.count, args))
    else:
        work(args.gpu, args.count, args)


def work(gpu, count, args):
    if args.spawns:
        args.rank = args.rank * count + gpu
    else:
        args.rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


def test_a_script_that_may_start_its_ranks_itself():
    outcome = migrated(OPTIONAL_SPAWN)
    assert not outcome.advice
    assert "        raise SystemExit(" in outcome.after
    assert "    else:\n        work(args.gpu, args.count, args)\n" in outcome.after
    assert "multiprocessing" not in outcome.after


def test_attributes_that_turn_the_reduction_off():
    script = (
        f"{SETUP}context = nullcontext if last else ddp_model.no_sync\n"
        "with context():\n    loss.backward()\n"
        "for last in (False, True):\n    if True:\n"
        "        ddp_model.require_backward_grad_sync = last\n    loss.backward()\n"
    )
    outcome = migrated(script)
    assert not outcome.advice
    assert "nullcontext if last else (lambda: hvd.no_sync(optimizer))\n" in outcome.after
    assert "    if True:\n        pass\n    loss.backward()\n" in outcome.after


@pytest.mark.parametrize("script", [SPAWNED, OF_A_TRAINER, CONDITIONAL])
def test_a_second_run_changes_nothing(script):
    once = migrated(script).after
    again = migrate(train=once)
    assert not again or again["train"].after == once


def test_imports_that_are_still_used_stay():
    after = migrated(SETUP + "print(dist.is_available(), DDP, os.sep)\n").after
    assert "import torch.distributed as dist\n" in after
    assert "from torch.nn.parallel import DistributedDataParallel as DDP\n" in after
    assert "import hvdkit.torch as hvd\n" in after


def test_parameters_that_no_rank_uses_keep_their_values():
    """DDP leaves their gradients as None, so a weight decay does not change them."""
    script = SETUP.replace("DDP(model)", "DDP(model, find_unused_parameters=args.unused)")
    wrapped = "DistributedOptimizer(optimizer, model.named_parameters(){})"
    after = migrated(script).after
    assert wrapped.format(", find_unused_parameters=True") in after
    assert wrapped.format("") in migrated(script.replace("args.unused", "False")).after


@pytest.mark.parametrize(
    ("size", "option"), [("2", "2_097_152"), ("0.5", "524_288"), ("0", "1"), ("size", "")]
)
def test_the_size_of_buckets(size, option):
    outcome = migrated(SETUP.replace("DDP(model)", f"DDP(model, bucket_cap_mb={size})"))
    assert (f"named_parameters(), bucket_bytes={option})" in outcome.after) == bool(option)
    is_noted = any("bucket_cap_mb=size is omitted" in note.text for note in outcome.notes)
    assert is_noted != bool(option)


def test_passes_around_ddp_are_noted():
    """DDP leaves their gradients local, for example those of a Fisher matrix (icefall #226)."""
    script = SETUP + "ddp_model.module(x).sum().backward()\nddp_model(x).sum().backward()\n"
    outcome = migrated(script)
    assert outcome.after.endswith("ddp_model(x).sum().backward()\n" * 2)
    (note,) = [each for each in outcome.notes if "no_sync(optimizer)" in each.text]
    assert note.line == script.count("\n") - 1


def test_classes_of_torch_optim_that_are_no_optimizers():
    lines = (
        "average = torch.optim.swa_utils.AveragedModel(ddp_model.module)\n"
        "torch.optim.lr_scheduler.StepLR(optimizer, 3)\n"
    )
    outcome = migrated(SETUP + lines)
    assert not outcome.advice
    assert outcome.after.endswith(lines.replace(".module", ""))


def test_comments_of_removed_imports_stay():
    script = SETUP.replace("import torch.distributed", "# ours\nimport torch.distributed")
    script = script.replace("DDP\n\n", "DDP  # wraps\n\n", 1)
    after = migrated(script).after
    assert "# ours\nimport hvdkit.torch as hvd\n" in after
    assert "# wraps" in after


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("from torch.distributed.fsdp import FullyShardedDataParallel as F; F(model)", "no FSDP"),
        ("ddp_model.register_comm_hook(None, hook)", "compression="),
        (
            "from torch.distributed.optim import ZeroRedundancyOptimizer as Z; Z(1)",
            "does not shard",
        ),
        ("other = DDP(model, process_group=group)", "process_group="),
        ("other = torch.optim.SGD(teacher.parameters(), lr=1)", "teacher"),
        ("other = torch.optim.SGD(find(weights), lr=1)", "not clear whose parameters"),
        ("other = torch.optim.LBFGS(model.parameters())", "LBFGS"),
        ("second = DDP(torch.nn.Linear(3, 3))", "no optimizer of torch.optim"),
        ("torch.multiprocessing.spawn(f, args=tuple(x), nprocs=2)", "hvdkit run"),
        ("from torch.distributed import *", "instead of *"),
        ("import torch.multiprocessing as mp; mp.spawn(os.stat, (2,), nprocs=2)", "hvdkit run"),
    ],
)
def test_what_prevents_the_conversion(line, advice):
    script = f"{SETUP}{line}\n"
    outcome = migrated(script)
    assert outcome.after == script
    (found,) = [each for each in outcome.advice if advice in each.text]
    assert found.text.startswith("not converted: ")
    assert found.line in (1, script.count("\n"))


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("dist.all_reduce(x, async_op=True)", "hvd.allreduce_"),
        ("dist.all_reduce(x, group=group)", "process_set="),
        ("dist.all_reduce(x, dist.ReduceOp.SUM, group)", "process_set="),
        ("dist.broadcast(x, 0, group)", "hvd.broadcast_"),
        ("dist.all_gather(out, x, group)", "hvd.allgather"),
        ("rank_of = dist.get_rank", "get_rank is left"),
        ("work = dist.all_reduce(x)", "hvd.allreduce_"),
        ("dist.all_gather(out, x + dist.get_rank())", "hvd.allgather"),
        ("dist.all_to_all(out, x)", "hvd.alltoall"),
        ("g = dist.new_group([0])", "hvd.add_process_set"),
        ("torch.save(network.module.state_dict(), path)", "network.module"),
    ],
)
def test_a_line_that_is_left_in_a_converted_script(line, advice):
    outcome = migrated(f"{SETUP}{line}\n")
    assert "hvd.DistributedOptimizer" in outcome.after
    (found,) = outcome.advice
    assert advice in found.text
    assert found.line == SETUP.count("\n") + 1
    assert line.replace("dist.get_rank()", "hvd.rank()") in outcome.after


def test_a_script_for_horovod_or_ddp_keeps_the_part_of_ddp():
    script = "import horovod.torch as hvd\n" + SETUP
    outcome = migrated(script)
    assert outcome.after == script.replace("horovod", "hvdkit")
    assert not outcome.advice
    assert "left as they are" in outcome.notes[0].text


LIBRARY = """\
import torch.distributed as dist


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0
"""
USER = SETUP + "from library import is_main\nif is_main():\n    print('main')\n"


def test_files_that_import_each_other_are_converted_together(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(USER)
    library, train = tmp_path / "library.py", tmp_path / "train.py"
    found = project.migrate({library: LIBRARY, train: USER})
    assert "return not hvd.is_initialized() or hvd.rank() == 0" in found[library].after
    assert "hvd.DistributedOptimizer" in found[train].after
    assert not found[library].advice + found[train].advice


def test_an_absolute_import_within_a_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    texts = {
        package / "__init__.py": "",
        package / "library.py": LIBRARY,
        package / "train.py": USER.replace("from library", "from package.library"),
    }
    for path, text in texts.items():
        path.write_text(text)
    found = project.migrate(texts)
    assert "hvd.is_initialized()" in found[package / "library.py"].after
    assert "hvd.DistributedOptimizer" in found[package / "train.py"].after


def test_a_script_is_not_converted_without_a_library_that_uses_the_ranks(tmp_path):
    """Its `is_initialized()` would be False, so that every rank would be the main one."""
    (tmp_path / "library.py").write_text(LIBRARY)
    train = tmp_path / "train.py"
    train.write_text(USER)
    (outcome,) = project.migrate({train: USER}).values()
    assert outcome.after == USER
    assert any("library.py" in each.text for each in outcome.advice)


def test_an_obstacle_in_one_file_keeps_all_files(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    train, library = tmp_path / "train.py", tmp_path / "library.py"
    script = USER + "other = torch.optim.LBFGS(model.parameters())\n"
    train.write_text(script)
    found = project.migrate({library: LIBRARY, train: script})
    assert found[library].after == LIBRARY
    assert found[train].after == script


def test_a_library_that_uses_the_wrapped_model_is_converted(tmp_path):
    texts = {
        "train.py": SETUP + "import library\nlibrary.save(ddp_model)\n",
        "library.py": "def save(ddp_model):\n    keep(ddp_model.module.state_dict())\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = project.migrate({tmp_path / name: text for name, text in texts.items()})
    assert "keep(ddp_model.state_dict())" in found[tmp_path / "library.py"].after


BOTH = """\
import torch.distributed as dist
try:
    import horovod.torch as hvd
except ImportError:
    hvd = None


def size():
    return hvd.size() if hvd else dist.get_world_size()
"""


def test_a_library_for_horovod_or_ddp_gets_no_advice():
    first = migrated(BOTH)
    assert not first.advice
    assert first.after == BOTH.replace("horovod", "hvdkit")
    assert not migrated("import hvdkit.torch as hvd\n" + BOTH.replace("horovod", "hvdkit")).notes
    assert not migrate(train=first.after)  # nothing is left to do


def test_a_library_alone_is_left_with_advice():
    outcome = migrated(LIBRARY)
    assert outcome.after == LIBRARY
    assert {"use hvd.rank()", "use hvd.is_initialized()"} <= {
        each.text.partition(": ")[2] for each in outcome.advice
    }


@pytest.mark.parametrize(
    ("imports", "before", "after"),
    [
        (
            "import torch.distributed.nn",
            "z = torch.cat(torch.distributed.nn.all_gather(model(x)), dim=0)",
            "z = hvd.gather_for_loss(model(x))",
        ),
        (
            "from torch.distributed.nn.functional import all_gather",
            "z = torch.cat(all_gather(a + b))",
            "z = hvd.gather_for_loss(a + b)",
        ),
        (
            "from torch.distributed.nn import all_gather",
            "z = torch.stack(all_gather(a + b), dim=1)",
            "z = torch.stack(hvd.gather_for_loss((a + b)[None]).unbind(), dim=1)",
        ),
        (
            "import torch.distributed.nn.functional as nnf",
            "z = torch.cat(nnf.all_gather(a), 1)",
            "z = torch.cat(hvd.gather_for_loss(a[None]).unbind(), 1)",
        ),
        (
            "import torch.distributed.nn as nnd",
            "total = nnd.all_reduce(loss)",
            "total = hvd.allreduce(loss, op=hvd.Sum)",
        ),
    ],
)
def test_differentiable_collectives(imports, before, after):
    outcome = migrated(f"{imports}\n{SETUP}{before}\n")
    assert not outcome.advice
    assert after in outcome.after


def test_differentiable_collectives_that_are_left():
    script = (
        f"import torch.distributed.nn as nnd\n{SETUP}"
        "y = nnd.broadcast(x, 0)\nz = nnd.all_gather(x, group)\n"
    )
    advice = [each.text for each in migrated(script).advice]
    assert any("nn.broadcast is left" in text and "mean over ranks" in text for text in advice)
    assert any("hvd.gather_for_loss(tensor)" in text for text in advice)


def test_a_layer_that_gathers():
    script = (
        f"{SETUP}class GatherLayer(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())]\n"
        "        dist.all_gather(rows, x)\n        return tuple(rows)\n\n    @staticmethod\n"
        "    def backward(ctx, *gradients):\n        total = torch.stack(gradients)\n"
        "        dist.all_reduce(total)\n        return total[dist.get_rank()]\n"
    )
    outcome = migrated(script)
    assert not outcome.advice
    assert any(
        "hvd.gather_for_loss(tensor) can replace GatherLayer" in n.text for n in outcome.notes
    )
    assert "rows[:] = hvd.allgather(x.detach()[None]).unbind()" in outcome.after
    assert "hvd.allreduce_(total, op=hvd.Sum)" in outcome.after


def test_advice_quotes_the_code_that_it_is_about():
    script = (
        "import torch\nimport torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\nclass Trainer:\n"
        "    def __init__(self):\n        dist.init_process_group()\n"
        "        self.model = DDP(torch.nn.Linear(1, 1))\n"
        "        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)\n\n\n"
        "def train(trainer):\n    with trainer.model.no_sync():\n        loss.backward()\n"
        "    dist.all_reduce(loss, async_op=True)\n"
    )
    advice = [each.text for each in migrated(script).advice]
    assert "replace trainer.model.no_sync() by hvd.no_sync(optimizer)" in advice
    assert any(text.startswith("replace dist.all_reduce by hvd.allreduce_(") for text in advice)
