"""Hypothesis's settings for searches whose examples are slow: jobs, or steps on real ranks."""

from hypothesis import HealthCheck, Phase, settings


def search_settings(examples: int) -> settings:
    """Return the decorator of a search: the same examples in each run, without a time limit.

    Args:
        examples: the number of examples to draw.
    """
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        # A failing example is slow, so the phase `explain` would take long.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
