"""Parts of a training loop that all adapters share: samples, schedules, times, trials."""
