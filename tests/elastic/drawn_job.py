"""The script of the jobs that `tests.elastic.search` draws. It reads `job.json`.

Sample i is the unit vector i, and a 1. The model has two outputs:

- The loss of a batch contains the sum of the first outputs. So each time that sample i is trained
  in epoch e, weight i decreases by the learning rate, `BASE ** -e`. The digits of the final weights
  therefore tell how often each sample was trained in each epoch.
- The loss is quadratic in the second outputs. Their weights depend on the order of the samples.
"""

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time

import numpy as np
import psutil

with open("job.json") as file:
    JOB = json.load(file)
SAMPLES, BATCH, EPOCHS, FITS = JOB["samples"], JOB["batch"], JOB["epochs"], JOB["fits"]
BASE = JOB["base"]
IN_PROCESS = JOB["launcher"] == "horovodrun"
INPUTS = np.concatenate([np.eye(SAMPLES), np.ones((SAMPLES, 1))], 1).astype("float32")
TARGETS = np.arange(SAMPLES, dtype="float32")[:, None]


def rate(epoch):
    return float(BASE) ** -epoch


def set_hosts(hosts):
    with open("hosts.draft", "w") as file:
        file.write(hosts.replace(",", "\n") + "\n")
    os.replace("hosts.draft", "hosts.txt")


class Disturbances:
    """Cause the drawn disturbances. `point` is called at many points of the training.

    `hvdkit run` starts the script again after a disturbance. With Horovod's launcher, a start is a
    call of the training function, and points outside of the training function are not counted.
    """

    def __init__(self):
        self.points = 0
        self.lock = threading.Lock()
        self.start = self.first = -1
        self.drawn = []
        self.next_hosts = None
        self.is_full = False
        if not IN_PROCESS:
            rank = int(os.environ.get("HOROVOD_RANK", 0))
            self.set_start(int(os.environ.get("HVDKIT_ELASTIC_START", 0)), rank)

    def set_start(self, start, rank):
        self.start, self.points = start, 0
        self.drawn = [
            d
            for d in JOB["disturbances"]
            # Without the launcher, only all ranks together can change to other hosts.
            if d["start"] == start
            and d.get("launch", 0) == JOB["launch"]
            and (d["rank"] == rank or (IN_PROCESS and d["action"] == "interrupt"))
        ]

    def begin(self, hvd, state):
        """Call this at the beginning of the training function."""
        if IN_PROCESS:
            # A new rank has not counted the starts.
            self.set_start(hvd.broadcast_object(self.start) + 1, hvd.rank())
            self.hvd = hvd
            self.first = self.start if self.first < 0 else self.first
            if state.epoch == EPOCHS:
                self.drawn = []  # No commit follows.
        if hvd.rank() == 0:
            print(f"begin on {hvd.size()} ranks", flush=True)
        self.point("begin")

    def point(self, name):
        # The first rank that ends ends the job: Horovod's launcher ends all others.
        if IN_PROCESS and name in ("end", "trained"):
            return
        with self.lock:
            self.points += 1
            points = self.points
        for each in list(self.drawn):
            if IN_PROCESS and each["action"] == "interrupt":
                due = each["point"] <= points and name == "checked"
            else:
                due = each["point"] == points
            if due:
                self.drawn.remove(each)
                print("disturbed", self.start, points, name, json.dumps(each), flush=True)
                self.cause(**each)

    def interrupted(self):
        """Change the hosts again while Horovod starts again and waits for a new rank."""
        if self.next_hosts is not None:
            set_hosts(self.next_hosts)
            self.next_hosts = None

    def settle(self):
        """Wait until the launcher has noticed the last change of hosts. None follows."""
        self.drawn = [each for each in self.drawn if each["action"] != "hosts"]
        time.sleep(max(0.0, os.stat("hosts.txt").st_mtime + 6 - time.time()))
        self.hvd.broadcast_object(None)

    def cause(self, action, hosts="", wait=0.0, before=0.0, then=None, **_):
        from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "internal":
            raise HorovodInternalError("drawn")
        elif action == "interrupt":
            raise HostsUpdatedInterrupt(False)
        elif action == "error":
            raise ValueError("drawn")
        elif action == "full":
            self.is_full = True
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif action in ("terminate", "launcher", "agent"):
            with open("launcher") as file, contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(file.read()))
                if action == "agent":
                    agents = process.children()
                    process = next(p for p in agents if "hvdkit.launch.agent.main" in p.cmdline())
                process.send_signal(signal.SIGTERM if action == "terminate" else signal.SIGKILL)
        elif action == "hosts":
            time.sleep(before)
            set_hosts(hosts)
            self.next_hosts = then
            time.sleep(wait)


disturbances = Disturbances()
point = disturbances.point


def watch_commits():
    """Make points within commits: before, between and after the writing of the hosts.

    With Horovod's launcher, make a point between the saving and the search for changed hosts.
    """
    from hvdkit.checkpoint import writing
    from hvdkit.elastic import commits, state

    begin, read_back = commits.Commits._begin, writing.Writer._read_back
    save = state.CommittedState.save

    def watched(self, content):
        point("before write")
        begin(self, content)
        point("after write")

    def watched_thread(self, *args):
        # A thread writes the commit of a host.
        point("in write")
        if disturbances.is_full:
            disturbances.is_full = False
            raise OSError(errno.ENOSPC, "drawn")
        read_back(self, *args)

    def watched_save(self):
        save(self)
        point("saved")

    if IN_PROCESS:
        if any("then" in each for each in JOB["disturbances"]):
            time.sleep(2)  # As if this process had imported a framework.
        state.CommittedState.save = watched_save
    else:
        commits.Commits._begin = watched
        writing.Writer._read_back = watched_thread


def loss_of(outputs, targets):
    """Return the loss of each sample."""
    return outputs[:, 0] + 0.02 * (outputs[:, 1] - targets[:, 0]) ** 2


def commit(state, due=True):
    """Commit, or only look for changed hosts."""
    if not (due or JOB["checks"]):
        return
    if IN_PROCESS and state.epoch == EPOCHS:
        disturbances.settle()
    try:
        state.commit() if due else state.check_host_updates()
    except state._interrupt:
        disturbances.interrupted()
        raise
    if IN_PROCESS and state.epoch < EPOCHS:
        point("checked")


def own_share(hvd):
    """Return this rank's samples in their order; some twice, so that all ranks have as many."""
    padded = -(-SAMPLES // hvd.size()) * hvd.size()
    return (np.arange(padded) % SAMPLES)[hvd.rank() :: hvd.size()]


def report(hvd, weights, state, **more):
    values = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "weights": np.asarray(weights, "float64").tolist(),
        "seen": state.seen,
        "resets": resets,
        "start": disturbances.start,
        "first": disturbances.first,
        **more,
    }
    name = f"result-{disturbances.start}-{hvd.rank()}"
    with open(f"{name}.draft", "w") as file:
        json.dump(values, file)
    os.replace(f"{name}.draft", f"{name}.json")
    print("reported", flush=True)


resets = []


def torch_job():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hvdkit.torch as hvd

    point("start")
    hvd.init()
    point("initialized")
    data = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    model = torch.nn.Linear(SAMPLES + 1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if JOB["wraps"]:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op=hvd.Sum, backward_passes_per_step=JOB["window"]
        )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1 / BASE)
    resumable = JOB["sampler"] == "resumable"
    options = {"shuffle": JOB["shuffle"], "seed": 3}
    if resumable:
        sampler = hvd.ResumableSampler(data, BATCH, **options)
    else:
        sampler = hvd.elastic.ElasticSampler(data, **options)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    checkpointer = archive = None
    objects = {"epoch": 0, "batch": 0, "step": 0, "seen": []}
    if JOB["checkpoint"] and resumable:
        checkpointer = hvd.Checkpointer(
            "checkpoints",
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            data=sampler,
            metadata=objects,
            every_steps=JOB["checkpoint"],
            every_steps_in_memory=JOB["memory"] or None,
            asynchronous=JOB["asynchronous"],
        )
        restored = checkpointer.restore()
        if JOB["archive"]:
            best = hvd.KeepBest("score", "max")
            archive = hvd.Checkpointer("best", model=model, every_steps=2, keep_best=best)
            archive.continue_at(restored.step if restored else 0)

    def after_batch(state):
        point("before commit")
        commit(state, state.step % JOB["commit"] == 0)
        if checkpointer is not None:
            objects.update({name: getattr(state, name) for name in objects})
            checkpointer.maybe_save(state.step)
            if archive is not None:
                archive.maybe_save(state.step, metrics={"score": state.step % 7})
        point("after commit")

    @hvd.elastic.run
    def train(state):
        disturbances.begin(hvd, state)
        while state.epoch < EPOCHS:
            batches = sampler.batches(loader) if resumable else loader
            count = len(batches)
            for number, (x, y) in enumerate(batches):
                point("batch")
                loss_of(model(x), y).sum().backward()
                point("backward")
                if (number + 1) % JOB["window"] == 0 or number + 1 == count:
                    if not JOB["wraps"]:
                        hvd.allreduce_(model.weight.grad, op=hvd.Sum)
                    optimizer.step()
                    optimizer.zero_grad()
                state.step += 1
                state.seen.append([0, state.epoch, state.batch])
                state.batch += 1
                if not resumable:
                    state.sampler.record_batch(number, BATCH)
                after_batch(state)
            point("epoch end")
            state.epoch += 1
            state.batch = 0
            scheduler.step()
            if not resumable:
                state.sampler.set_epoch(state.epoch)
            commit(state)
        point("end")

    state = hvd.elastic.TorchState(
        model, optimizer, scheduler=scheduler, sampler=sampler, **objects
    )
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    point("trained")
    rate = optimizer.param_groups[0]["lr"]
    report(hvd, model.weight.detach().T, state, rate=rate, step=state.step)


def scheduled(fit):
    return lambda epoch: rate(fit * EPOCHS + epoch)


def sum_of_predictions(keras):
    class Total(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.sum(y_pred, axis=-1)

    return Total(reduction="sum")


def keras_model(keras):
    model = keras.Sequential([keras.Input((SAMPLES + 1,)), keras.layers.Dense(2, use_bias=False)])
    model.layers[0].kernel.assign(np.zeros((SAMPLES + 1, 2)))
    return model


def keras_job():
    import keras

    import hvdkit.keras as hvd

    point("start")
    hvd.init()
    point("initialized")
    style = JOB["style"]
    model = keras_model(keras)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=JOB["window"]
    )
    model.compile(
        optimizer, sum_of_predictions(keras), steps_per_execution=JOB["steps_per_execution"]
    )
    targets = TARGETS
    sampler = None
    own = own_share(hvd)
    if JOB["data"].startswith("sampler"):
        sampler = hvd.ResumableSampler(SAMPLES, BATCH, seed=3, shuffle=JOB["shuffle"])

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(own) // BATCH)

        def __getitem__(self, number):
            rows = own[number * BATCH : (number + 1) * BATCH]
            return INPUTS[rows], targets[rows]

    def data():
        if JOB["data"] == "arrays":
            return {"x": INPUTS[own], "y": targets[own], "batch_size": BATCH}
        if JOB["data"] == "pydataset":
            return {"x": Batches()}
        if JOB["data"] == "dataset" and keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            pairs = tf.data.Dataset.from_tensor_slices((INPUTS[own], targets[own]))
            return {"x": pairs.batch(BATCH)}
        if JOB["data"] == "unknown" and keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            pairs = tf.data.Dataset.from_tensor_slices((INPUTS[own], targets[own])).batch(BATCH)
            return {"x": pairs.filter(lambda *_: True)}
        if JOB["data"] == "unknown":
            import torch
            from torch.utils.data import DataLoader, IterableDataset

            class Stream(IterableDataset):
                def __iter__(self):
                    return ((INPUTS[row], targets[row]) for row in own)

            return {"x": DataLoader(Stream(), BATCH)}
        if JOB["data"] == "dataset":
            import torch
            from torch.utils.data import DataLoader, TensorDataset

            pairs = TensorDataset(torch.from_numpy(INPUTS[own]), torch.from_numpy(targets[own]))
            return {"x": DataLoader(pairs, BATCH)}
        return {"x": arrays}

    if sampler is not None:
        arrays = sampler.arrays((INPUTS, targets))

    def current(state, epoch):
        return state.epoch if style == "remaining" else epoch

    class Seen(keras.callbacks.Callback):
        def state_dict(self):
            return {"seen": list(state.seen)}

        def load_state_dict(self, content):
            state.seen = list(content["seen"])

        def on_epoch_begin(self, epoch, logs=None):
            point("epoch begin")
            self.epoch = current(state, epoch)
            if JOB["rates"] == "callback":
                self.model.optimizer.learning_rate = rate(state.fit * EPOCHS + self.epoch)

        def on_train_batch_begin(self, batch, logs=None):
            point("batch")

        def on_train_batch_end(self, batch, logs=None):
            point("before commit")
            state.seen.append([state.fit, self.epoch, batch])

        def on_epoch_end(self, epoch, logs=None):
            point("epoch end")
            state.seen.append([state.fit, self.epoch, -1])

    class After(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            point("after commit")

        def on_epoch_end(self, epoch, logs=None):
            point("before the commit of the epoch")

        def on_train_end(self, logs=None):
            point("train end")

        def on_test_batch_end(self, batch, logs=None):
            point("validation")

    @hvd.elastic.run
    def train(state):
        disturbances.begin(hvd, state)
        while state.fit < FITS:
            callbacks = [Seen()]
            others = [hvd.elastic.CommitStateCallback(state, JOB["commit"])]
            if style != "checkpoint":
                others.append(hvd.elastic.UpdateEpochStateCallback(state))
            if JOB["update_batch"]:
                others.append(hvd.elastic.UpdateBatchStateCallback(state))
            if JOB["checkpoint"]:
                others.append(
                    hvd.callbacks.Checkpoint(
                        f"checkpoints-{state.fit}",
                        every_steps=JOB["checkpoint"],
                        data=sampler,
                        every_steps_in_memory=JOB["memory"] or None,
                        asynchronous=JOB["asynchronous"],
                    )
                )
            callbacks += [others[number] for number in JOB["order"] if number < len(others)]
            if JOB["rates"] == "scheduler":
                callbacks.append(keras.callbacks.LearningRateScheduler(scheduled(state.fit)))
            callbacks.append(After())
            options = {
                "remaining": {"epochs": EPOCHS - state.epoch},
                "initial": {"initial_epoch": state.epoch, "epochs": EPOCHS},
                "checkpoint": {"epochs": EPOCHS},
            }[style]
            if JOB["validation"]:
                options["validation_data"] = (INPUTS[:2], targets[:2])
            model.fit(**data(), shuffle=False, callbacks=callbacks, verbose=0, **options)
            point("fit has ended")
            state.fit += 1
            state.epoch = state.batch = 0
            if JOB["commits_fits"]:
                state.commit()
        point("end")

    state = hvd.elastic.KerasState(model, epoch=0, batch=0, fit=0, seen=[])
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    point("trained")
    report(hvd, model.get_weights()[0], state, iterations=int(model.optimizer.iterations))


def tensorflow_job():
    import keras
    import tensorflow as tf

    import hvdkit.tensorflow as hvd

    point("start")
    hvd.init()
    point("initialized")
    model = keras_model(keras)
    optimizer = keras.optimizers.SGD(1.0)
    wrapped = JOB["state"] == "keras"
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
    optimizer.build(model.trainable_variables)
    sampler = None
    if JOB["sampler"] == "resumable":
        sampler = hvd.ResumableSampler(SAMPLES, BATCH, seed=3, shuffle=JOB["shuffle"])

    def dataset():
        if sampler is not None:
            return sampler.dataset(lambda i: (tf.gather(INPUTS, i), tf.gather(TARGETS, i)))
        own = own_share(hvd)
        return tf.data.Dataset.from_tensor_slices((INPUTS[own], TARGETS[own])).batch(BATCH)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(model(x), y))
        if not wrapped:
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @hvd.elastic.run
    def train(state):
        disturbances.begin(hvd, state)
        data = dataset()
        while state.epoch < EPOCHS:
            optimizer.learning_rate.assign(rate(state.epoch))
            for x, y in sampler.batches(data) if sampler is not None else data.skip(state.batch):
                point("batch")
                step(x, y)
                state.seen.append([0, state.epoch, state.batch])
                state.step += 1
                state.batch += 1
                point("before commit")
                commit(state, state.step % JOB["commit"] == 0)
                point("after commit")
            point("epoch end")
            state.epoch += 1
            state.batch = 0
            commit(state)
        point("end")

    objects = {"epoch": 0, "batch": 0, "step": 0, "seen": []}
    if sampler is not None:
        objects["sampler"] = sampler
    if JOB["state"] == "keras":
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, **objects)
    else:
        state = hvd.elastic.TensorFlowState(model.variables, optimizer=optimizer, **objects)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    point("trained")
    report(
        hvd, model.get_weights()[0], state, iterations=int(optimizer.iterations), step=state.step
    )


if __name__ == "__main__":
    sys.setrecursionlimit(2000)
    watch_commits()
    {"torch": torch_job, "keras": keras_job, "tensorflow": tensorflow_job}[JOB["kind"]]()
