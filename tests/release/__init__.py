"""Tests for a release: the package, the images, the scripts, the examples, checks of a GPU."""
