"""Keras's variables and optimizers, for the adapters of TensorFlow and of Keras."""
