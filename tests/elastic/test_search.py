"""Drawn elastic jobs with fixed seeds: the short form of `python -m tests.elastic.search`."""

import random

import pytest

from tests.elastic import search
from tests.ranks.rank_pool import Configuration, skip_where_unsupported


@pytest.mark.long
@pytest.mark.parametrize("framework", search.FRAMEWORKS)
def test_drawn_jobs(tmp_path, framework):
    skip_where_unsupported(Configuration(framework, "gloo", 2))
    with search.preloaded_framework(framework, tmp_path) as variables:
        # Among them: more ranks within an epoch of unknown length, with an accumulation window.
        for seed in (501, 505, 509):
            folder = tmp_path / str(seed)
            folder.mkdir()
            search.run_job(search.draw_job(random.Random(seed), framework), folder, variables)


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "seeds"),
    [
        # Ranks that are removed, with both samplers; and hosts that change during a reset.
        ("torch", (551, 569, 805)),
        ("tensorflow", (552,)),
    ],
)
def test_drawn_jobs_of_horovodrun(tmp_path, framework, seeds):
    skip_where_unsupported(Configuration(framework, "gloo", 2))
    with search.preloaded_framework(framework, tmp_path) as variables:
        for seed in seeds:
            folder = tmp_path / str(seed)
            folder.mkdir()
            job = search.draw_job(random.Random(seed), framework, "horovodrun")
            search.run_job(job, folder, variables)
