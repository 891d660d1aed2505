"""Train a small network with TensorFlow: hvdkit run -np 2 python examples/tensorflow_minimal.py"""

import keras
import tensorflow as tf
from keras import layers

import hvdkit.tensorflow as hvd

hvd.init()

# The same data on every rank: is a point inside the circle?
points = tf.random.stateless_uniform((4096, 2), seed=(0, 0), minval=-1, maxval=1)
labels = tf.cast(tf.norm(points, axis=1) < 0.8, tf.int64)
train = tf.data.Dataset.from_tensor_slices((points[:3072], labels[:3072]))
batches = hvd.shard(train, batch_size=64, shuffle=True)  # this rank's share

model = keras.Sequential([keras.Input((2,)), layers.Dense(32, "relu"), layers.Dense(2)])
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = loss_of(targets, model(inputs, training=True))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for _ in range(10):
    for inputs, targets in batches:
        train_step(inputs, targets)

# Each rank tests its share; the sums over all ranks give the exact accuracy.
inputs, targets = points[3072 + hvd.rank() :: hvd.size()], labels[3072 + hvd.rank() :: hvd.size()]
correct = tf.reduce_sum(tf.cast(tf.argmax(model(inputs), axis=1) == targets, tf.int64))
totals = hvd.allreduce(tf.stack([correct, tf.size(targets, tf.int64)]), op=hvd.Sum)
if hvd.rank() == 0:
    print(f"accuracy={totals[0] / totals[1]:.3f} on {hvd.size()} ranks")
hvd.shutdown()
