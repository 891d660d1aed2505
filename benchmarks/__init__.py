"""The project's own measurements, which `scripts/` run. They are no part of the package."""
