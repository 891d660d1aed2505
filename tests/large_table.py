"""A Keras model whose non-trainable variables exceed what each rank saves for itself."""


def with_large_table():
    """Return a model with a table of 4.4 MB, which is not trained, and batch normalization."""
    import keras

    class Table(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(1100, 1000), name="table", trainable=False)

        def call(self, x):
            return x

    return keras.Sequential([keras.Input((3,)), Table(), keras.layers.BatchNormalization()])
