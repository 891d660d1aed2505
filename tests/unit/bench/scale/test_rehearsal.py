"""Predictions against real ranks, whose passes sleep."""

from pathlib import Path

import pytest

from benchmarks import rehearsal
from hvdkit.bench import namespaces
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

RATE = "500Mbit/s"
TURNS = 3


@pytest.mark.long
def test_real_ranks_on_limited_links(tmp_path, monkeypatch):
    """Other load makes steps slower, so only predictions that are too slow are an error."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    if (reason := namespaces.missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))  # the ranks import benchmarks
    fitted = rehearsal.fit_machine(RATE, tmp_path)
    assert fitted.network.between.bandwidth == pytest.approx(500e6 / 8, rel=0.15)
    one_rank = rehearsal.measure_one_rank(TURNS)
    assert one_rank >= rehearsal.FORWARD + rehearsal.BACKWARD
    for count, ranks in ((2, 1), (2, 2), (4, 2)):
        hosts = rehearsal.Hosts(count, ranks, RATE)
        measured = rehearsal.measure(hosts, rehearsal.VARIANTS, TURNS)
        for variant in rehearsal.VARIANTS:
            predicted = rehearsal.predict_seconds(fitted, one_rank, hosts, variant)
            assert predicted <= 1.15 * measured[variant.name], (hosts, variant, measured)
            assert predicted > one_rank
