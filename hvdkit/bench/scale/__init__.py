"""`hvdkit bench scale`: predict the time of a training step on more ranks than there are here."""
