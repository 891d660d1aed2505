"""The reduction of gradients in TensorFlow graphs."""
