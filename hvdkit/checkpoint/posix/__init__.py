"""Steps in a folder: local, or shared between hosts. See `storage`."""
