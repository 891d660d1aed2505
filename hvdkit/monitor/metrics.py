"""The metrics that every `Monitor` measures: names, units and meanings.

Names with a slash follow Composer's SpeedMonitor (`time/…`, `throughput/…`, `memory/…`). `lr` and
`grad_norm` are those of torchtitan.

To add a metric, add a row here and to docs/monitoring.md. Its value comes from `Framework` of
`framework.py`, which each adapter implements, or from `machine.py`.
"""

from dataclasses import dataclass

#: Seconds per step, by section. `hvdkit.training.stragglers` measures the sections.
STEP = "time/step"
DATA = "time/data"
FORWARD = "time/forward"
BACKWARD = "time/backward"
COMMUNICATION = "time/communication"
UPDATE = "time/update"
CHECKPOINT = "time/checkpoint"
OTHER = "time/other"

#: The other metrics, with the units of `_METRICS`.
SAMPLES = "throughput/samples_per_sec"
SAMPLES_OF_RANK = "throughput/device/samples_per_sec"
PAYLOAD = "communication/payload_bytes"
OVERFLOWS = "overflows"
SKIPPED = "skipped_steps"
RSS = "memory/rss"
ALLOCATED = "memory/allocated"
PEAK_ALLOCATED = "memory/peak_allocated"
GPU = "gpu/utilization"
LR = "lr"
GRAD_NORM = "grad_norm"
LOSS_SCALE = "loss_scale"

#: The sections of a step, in order.
SECTIONS = (DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, CHECKPOINT, OTHER)

#: Prefixes of names that only `Monitor` itself may use.
RESERVED = ("time/", "throughput/", "communication/", "memory/", "gpu/")


@dataclass(frozen=True)
class Metric:
    """A metric that `Monitor` measures itself.

    Attributes:
        name: the name in records.
        unit: "s", "B", "1/s", "ratio", or "" for a number without a unit.
        meaning: a phrase for people.
        prometheus: the name of its gauge in Prometheus, without the prefix `hvdkit_`; empty if
            there is no gauge: `hvdkit.monitor.loggers.prometheus` has counters for some metrics.
    """

    name: str
    unit: str
    meaning: str
    prometheus: str = ""


_METRICS = (
    Metric(STEP, "s", "time per step, without pauses", "step_duration_seconds"),
    Metric(DATA, "s", "waiting for the next batch (`monitor.batches`)", "section_duration_seconds"),
    Metric(
        FORWARD,
        "s",
        "from the end of a step to the backward pass, without `time/data`, `time/checkpoint` and "
        "`time/other`",
        "section_duration_seconds",
    ),
    Metric(
        BACKWARD, "s", "backward pass, with overlapped communication", "section_duration_seconds"
    ),
    Metric(
        COMMUNICATION,
        "s",
        "exposed communication: waiting for the sum of the gradients, including slower ranks",
        "section_duration_seconds",
    ),
    Metric(
        UPDATE,
        "s",
        "from the sum of the gradients to the end of the optimizer's step",
        "section_duration_seconds",
    ),
    Metric(
        CHECKPOINT,
        "s",
        "in a checkpointer; with PyTorch, without waiting there for other ranks",
        "section_duration_seconds",
    ),
    Metric(
        OTHER,
        "s",
        "from the end of a step to the next call of `monitor.batches` for a batch, without "
        "`time/checkpoint`",
        "section_duration_seconds",
    ),
    Metric(SAMPLES, "1/s", "samples per second of all ranks", "samples_per_second"),
    Metric(SAMPLES_OF_RANK, "1/s", "samples per second of one rank"),
    Metric(PAYLOAD, "B", "encoded gradients that a rank gives to collectives, per step"),
    Metric(OVERFLOWS, "", 'sums with `compression="fp16"` that were repeated in float32'),
    Metric(SKIPPED, "", "steps that an optimizer skipped: loss scaling, or `on_nonfinite`"),
    Metric(RSS, "B", "resident memory of the process", "process_resident_memory_bytes"),
    Metric(ALLOCATED, "B", "memory of tensors on the GPU", "device_allocated_bytes"),
    Metric(
        PEAK_ALLOCATED,
        "B",
        "largest memory of tensors on the GPU since the start",
        "device_peak_allocated_bytes",
    ),
    Metric(
        GPU, "ratio", "part of the last second in which the GPU was busy", "gpu_utilization_ratio"
    ),
    Metric(LR, "", "learning rate of the first parameter group", "learning_rate"),
    Metric(GRAD_NORM, "", "2-norm of the reduced gradients before clipping", "gradient_norm"),
    Metric(LOSS_SCALE, "", "scale of the loss scaler", "loss_scale"),
)

#: Name -> metric.
METRICS = {metric.name: metric for metric in _METRICS}
