"""The modules and names of Keras 2, and their places in Keras 3."""

import re

#: Packages that hold Keras's public names.
PREFIXES = (
    "tensorflow.python.keras.",
    "tensorflow.keras.",
    "keras.",
)
#: Modules of Keras 2 whose names Keras 3 has in the same module.
PUBLIC = frozenset(
    [
        "",
        "activations",
        "applications",
        "backend",
        "callbacks",
        "constraints",
        "datasets",
        "initializers",
        "layers",
        "losses",
        "metrics",
        "models",
        "optimizers",
        "optimizers.schedules",
        "preprocessing",
        "preprocessing.image",
        "preprocessing.sequence",
        "preprocessing.text",
        "regularizers",
        "utils",
    ]
)
#: Module of Keras 2 -> module of Keras 3, for modules whose public names have moved as they are.
MOVED = {
    **{
        f"layers.{name}": "layers"
        for name in (
            "advanced_activations",
            "convolutional",
            "convolutional_recurrent",
            "core",
            "cudnn_recurrent",
            "embeddings",
            "experimental.preprocessing",
            "merge",
            "noise",
            "normalization",
            "pooling",
            "recurrent",
            "wrappers",
        )
    },
    "backend.tensorflow_backend": "backend",
    "engine": "layers",
    "engine.base_layer": "layers",
    "engine.topology": "layers",
    "engine.training": "models",
    "mixed_precision.experimental": "mixed_precision",
    "objectives": "losses",
    "optimizers.experimental": "optimizers",
    "optimizers.legacy": "optimizers",
    "utils.data_utils": "utils",
    "utils.generic_utils": "utils",
    "utils.np_utils": "utils",
    "utils.vis_utils": "utils",
}
#: Names that did not move with their module: name -> its module now.
MOVED_NAMES = {"Model": "models", "Sequential": "models", "get_source_inputs": "utils"}
#: Names that Keras 3 does not have in any module -> what to use.
REMOVED = {
    "AtrousConvolution2D": "Conv2D(…, dilation_rate=…)",
    "HDF5Matrix": "h5py",
    "Highway": "a layer of your own",
    "LocallyConnected1D": "a layer of your own",
    "LocallyConnected2D": "a layer of your own",
    "MaxoutDense": "a layer of your own",
    "Merge": "Add, Concatenate or another merging layer",
    "ThresholdedReLU": "ReLU(threshold=…)",
    "merge": "add, concatenate or another merging function",
    "multi_gpu_model": "nothing: each rank uses one GPU",
}
#: Names that have another name now, in the same module.
RENAMED = {"CuDNNGRU": "GRU", "CuDNNLSTM": "LSTM"}
#: Names of keras.preprocessing.image and .text that only tf.keras still has.
ONLY_TF_KERAS = {
    "preprocessing.image": (
        "DirectoryIterator",
        "ImageDataGenerator",
        "Iterator",
        "NumpyArrayIterator",
    ),
    "preprocessing.text": ("Tokenizer", "text_to_word_sequence", "one_hot", "hashing_trick"),
    "preprocessing.sequence": ("TimeseriesGenerator", "make_sampling_table", "skipgrams"),
}
#: The names of keras.backend in Keras 3. tf.keras.backend has most of the names that Keras 3 lacks.
BACKEND = frozenset(
    [
        "backend",
        "clear_session",
        "epsilon",
        "floatx",
        "get_uid",
        "image_data_format",
        "is_float_dtype",
        "is_int_dtype",
        "is_keras_tensor",
        "result_type",
        "set_epsilon",
        "set_floatx",
        "set_image_data_format",
        "standardize_dtype",
    ]
)


def keras_name(name: str | None) -> str | None:
    """Return a full name without its package, as "optimizers.SGD"; None if it is not of Keras."""
    if name is None:
        return None
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    found = re.fullmatch(r"tensorflow\.(optimizers|losses|metrics|initializers)\.(.*)", name)
    return f"{found[1]}.{found[2]}" if found else None
