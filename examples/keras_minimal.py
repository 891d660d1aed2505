"""Train a small network with Keras: hvdkit run -np 2 python examples/keras_minimal.py"""

import keras
import numpy as np
from keras import layers

import hvdkit.keras as hvd

hvd.init()

# The same data on every rank: is a point inside the circle?
points = np.random.default_rng(0).uniform(-1, 1, (4096, 2)).astype("float32")
labels = (np.linalg.norm(points, axis=1) < 0.8).astype("int64")
train_points, train_labels = hvd.shard((points[:3072], labels[:3072]))  # this rank's share
test_points, test_labels = hvd.shard((points[3072:], labels[3072:]))

model = keras.Sequential([keras.Input((2,)), layers.Dense(32, "relu"), layers.Dense(2)])
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    train_points,
    train_labels,
    batch_size=64,
    epochs=10,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],  # start from rank 0's weights
)

# Each rank tests its share; the callback makes the metrics those of all ranks.
metrics = model.evaluate(
    test_points,
    test_labels,
    verbose=0,
    return_dict=True,
    callbacks=[hvd.callbacks.MetricAverageCallback()],
)
if hvd.rank() == 0:
    print(f"accuracy={metrics['accuracy']:.3f} on {hvd.size()} ranks")
hvd.shutdown()
